"""One dispatch and combine with all their gradients: its inputs, how a rank runs it, what must come out.

The inputs of all ranks are made in the test's process, where the reference computes what must come out; each
rank runs its share with :func:`run_step`. Values in padding rows are NaN wherever the caller could have put
anything, so a sum that touches them shows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from tests import reference

__all__ = ["StepInputs", "StepResult", "differences", "expected_step", "make_inputs", "run_step", "same_bits"]


@dataclass
class StepInputs:
    """One rank's inputs. Rows are the required ones; a static buffer's tail is filled up by run_step."""

    tokens: Tensor  # [T, H]
    topk_idx: Tensor  # [T, K]
    topk_weights: Tensor  # [T, K]
    expert_output: Tensor  # [required, H]
    grad_out: Tensor  # [T, H]
    grad_rows: Tensor  # [required, H]
    grad_row_weights: Tensor  # [required]


@dataclass
class StepResult:
    """What one rank must get."""

    tokens_per_expert: list[int]
    expert_offsets: list[int]
    required_rows: int
    tokens_sent: int
    rows: Tensor
    weights: Tensor
    out: Tensor
    grad_expert_output: Tensor
    grad_tokens: Tensor
    grad_topk_weights: Tensor  # through the rows' weights
    grad_topk_weights_combine: Tensor  # through combine(apply_weights=True), else empty
    tail_is_zero: bool = True


def make_inputs(
    plan: list[reference.Layout],
    topk_idx: list[list[list[int]]],
    top_k: int,
    hidden: int,
    dtype: torch.dtype,
    idx_dtype: torch.dtype = torch.int64,
    seed: int = 0,
    integers: bool = False,
) -> list[StepInputs]:
    """Inputs of every rank. ``integers``: small whole numbers, whose dot products are exact in FP32."""
    gen = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> Tensor:
        if integers:
            return torch.randint(-4, 5, shape, generator=gen).to(dtype)
        return torch.randn(shape, generator=gen).to(dtype)

    inputs = []
    for layout, chosen in zip(plan, topk_idx, strict=True):
        num_tokens, rows = len(chosen), layout.required_rows
        padding = torch.tensor([source is None for source in layout.row_source], dtype=torch.bool)
        step = StepInputs(
            tokens=values(num_tokens, hidden),
            topk_idx=torch.tensor(chosen, dtype=idx_dtype).reshape(num_tokens, top_k),
            topk_weights=torch.rand(num_tokens, top_k, generator=gen),
            expert_output=values(rows, hidden),
            grad_out=values(num_tokens, hidden),
            grad_rows=values(rows, hidden),
            grad_row_weights=torch.randn(rows, generator=gen),
        )
        for name in ("expert_output", "grad_rows", "grad_row_weights"):
            getattr(step, name)[padding] = torch.nan
        inputs.append(step)
    return inputs


def expected_step(
    plan: list[reference.Layout],
    topk_idx: list[list[list[int]]],
    num_experts: int,
    inputs: list[StepInputs],
    apply_weights: bool,
    dispatch_mxfp8: str | None = None,
    combine_mxfp8: str | None = None,
) -> list[StepResult]:
    """What the reference says; ``*_mxfp8`` name the scale rounding of a direction that travels as MXFP8."""
    w = [i.topk_weights for i in inputs]
    y = [i.expert_output for i in inputs]
    g = [i.grad_out for i in inputs]
    rows, row_weights = reference.dispatch(plan, [i.tokens for i in inputs], w, dispatch_mxfp8)
    out = reference.combine(plan, y, w, apply_weights)
    grad_y = reference.combine_grad_outputs(plan, g, w, apply_weights, combine_mxfp8)
    grad_tokens = reference.dispatch_grad_tokens(plan, [i.grad_rows for i in inputs], w)
    grad_w = reference.dispatch_grad_weights(plan, [i.grad_row_weights for i in inputs], w)
    dots = reference.combine_grad_weights(plan, y, g, w, combine_mxfp8)
    sent = reference.tokens_sent(topk_idx, num_experts)
    return [
        StepResult(
            tokens_per_expert=layout.tokens_per_expert,
            expert_offsets=layout.expert_offsets,
            required_rows=layout.required_rows,
            tokens_sent=sent[r],
            rows=rows[r],
            weights=row_weights[r],
            out=out[r],
            grad_expert_output=grad_y[r],
            grad_tokens=grad_tokens[r],
            grad_topk_weights=grad_w[r],
            grad_topk_weights_combine=dots[r] if apply_weights else torch.zeros(0),
        )
        for r, layout in enumerate(plan)
    ]


def run_step(dispatcher: Any, step: StepInputs, apply_weights: bool) -> StepResult:
    """Dispatch, combine and every gradient on this rank; row tensors come back cut to the required rows."""
    tokens = step.tokens.clone().requires_grad_()
    topk_weights = step.topk_weights.clone().requires_grad_()
    sent_before = dispatcher.tokens_sent
    d = dispatcher.dispatch(tokens, step.topk_idx, topk_weights)
    required, buffer_rows = dispatcher.required_rows, d.tokens.shape[0]

    def fill(rows: Tensor) -> Tensor:
        full = torch.full((buffer_rows, *rows.shape[1:]), torch.nan, dtype=rows.dtype, device=rows.device)
        full[: rows.shape[0]] = rows
        return full

    expert_output = fill(step.expert_output).requires_grad_()
    out = dispatcher.combine(expert_output, d.handle, apply_weights=apply_weights)
    inputs = [expert_output, topk_weights] if apply_weights else [expert_output]
    grads = torch.autograd.grad(out, inputs, step.grad_out, retain_graph=True)
    grad_tokens, grad_topk_weights = torch.autograd.grad(
        [d.tokens, d.weights], [tokens, topk_weights], [fill(step.grad_rows), fill(step.grad_row_weights)]
    )
    tails = (d.tokens[required:], d.weights[required:], grads[0][required:])
    return StepResult(
        tokens_per_expert=d.tokens_per_expert.tolist(),
        expert_offsets=d.expert_offsets.tolist(),
        required_rows=required,
        tokens_sent=dispatcher.tokens_sent - sent_before,
        rows=d.tokens.detach()[:required],
        weights=d.weights.detach()[:required],
        out=out.detach(),
        grad_expert_output=grads[0][:required],
        grad_tokens=grad_tokens,
        grad_topk_weights=grad_topk_weights,
        grad_topk_weights_combine=grads[1] if apply_weights else torch.zeros(0),
        tail_is_zero=all(not tail.any() for tail in tails),
    )


def differences(got: StepResult, want: StepResult, exact_dots: bool | None = None) -> list[str]:
    """The fields that differ in any bit.

    The order in which a dot product is summed is free: with ``exact_dots=True`` these compare as numbers,
    with False within a tolerance, with None bit for bit as well.
    """
    names = []
    for f in fields(StepResult):
        a, b = getattr(got, f.name), getattr(want, f.name)
        if f.name == "grad_topk_weights_combine" and exact_dots is not None:
            tolerance = 0.0 if exact_dots else 1e-5
            same = a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance)
        else:
            same = same_bits(a, b) if isinstance(a, Tensor) else a == b
        if not same:
            names.append(f"{f.name}: got {a}, expected {b}")
    return names


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Same shape, dtype and bits, the sign of zero included; NaNs are equal whatever their payload."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    equal = a.contiguous().view(bits) == b.contiguous().view(bits)
    if a.is_floating_point():
        equal |= a.isnan() & b.isnan()
    return bool(equal.all())
