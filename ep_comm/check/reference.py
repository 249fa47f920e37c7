"""What dispatch and combine must give, computed densely: every rank has the inputs of all ranks at hand.

Nothing is exchanged and nothing of ep_comm is called, so that a fault in transport, plan or codec cannot hide in
both. The rules are those of docs/architecture.md. Inputs are made from random integers, the same bits on every machine;
P ranks, T token places a rank (``num_tokens`` of them used), K slots, H columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Expected", "Inputs", "Layout", "expected", "layout", "make_inputs", "mxfp8_image"]

_E4M3_MAX = 448.0


@dataclass(frozen=True)
class Inputs:
    """The inputs of all ranks. Places beyond a rank's ``num_tokens`` have no experts."""

    num_experts: int
    num_tokens: list[int]
    tokens: Tensor  # [P, T, H]
    topk_idx: Tensor  # [P, T, K] int64
    topk_weights: Tensor  # [P, T, K] float32
    outputs: Tensor  # [P, T, K, H], what the slot's expert answers
    grad_out: Tensor  # [P, T, H]
    grad_rows: Tensor  # [P, T, K, H]
    grad_row_weights: Tensor  # [P, T, K] float32

    @property
    def ep_size(self) -> int:
        return len(self.num_tokens)

    def owner(self) -> Tensor:
        """Rank of every slot's expert ``[P, T, K]``, -1 where there is none."""
        return torch.where(self.topk_idx >= 0, self.topk_idx // (self.num_experts // self.ep_size), -1)


@dataclass(frozen=True)
class Layout:
    """The rows of one rank: source rank, token and slot of every row, -1 in padding."""

    tokens_per_expert: Tensor
    expert_offsets: Tensor
    source: Tensor  # int64 [R, 3]

    def fill(self, values: Tensor, rows: int, missing: float) -> Tensor:
        """``values[P, T, K, ...]`` laid out by row; padding and tail hold ``missing``."""
        out = torch.full((rows, *values.shape[3:]), missing, dtype=values.dtype)
        used = (self.source[:, 0] >= 0).nonzero().flatten()
        out[used] = values[tuple(self.source[used].unbind(1))]
        return out


@dataclass(frozen=True)
class Expected:
    """What one rank must get from one dispatch and combine with all gradients."""

    layout: Layout
    rows: Tensor  # [R, H], padding zero
    weights: Tensor  # [R]
    out: Tensor  # [num_tokens, H]
    grad_outputs: Tensor  # [R, H]
    grad_tokens: Tensor  # [num_tokens, H]
    grad_weights: Tensor  # [num_tokens, K], through the rows' weights
    grad_dots: Tensor  # [num_tokens, K], through combine(apply_weights=True)
    grad_dots_scale: Tensor  # [num_tokens, K], sum of the products' magnitudes: the order of this sum is free


def make_inputs(
    ep_size: int, num_experts: int, top_k: int, hidden_size: int, tokens: int, dtype: torch.dtype, seed: int
) -> Inputs:
    """Random inputs: uneven token counts (0 on some rank in odd seeds), slots without expert, repeated experts."""
    make = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> Tensor:
        mantissa = torch.randint(-255, 256, shape, generator=make).float()
        return torch.ldexp(mantissa, torch.randint(-12, -4, shape, generator=make)).to(dtype)

    def fractions(*shape: int) -> Tensor:
        return torch.randint(1, 1 << 16, shape, generator=make).float() / (1 << 16)

    num_tokens = [tokens - (rank + seed) % 3 * (tokens // 4) for rank in range(ep_size)]
    if seed % 2 and ep_size > 1:
        num_tokens[seed // 2 % ep_size] = 0
    topk_idx = torch.randint(0, num_experts, (ep_size, tokens, top_k), generator=make)
    topk_idx[torch.randint(0, 10, topk_idx.shape, generator=make) == 0] = -1
    for rank, count in enumerate(num_tokens):
        topk_idx[rank, count:] = -1
    return Inputs(
        num_experts=num_experts,
        num_tokens=num_tokens,
        tokens=values(ep_size, tokens, hidden_size),
        topk_idx=topk_idx,
        topk_weights=fractions(ep_size, tokens, top_k),
        outputs=values(ep_size, tokens, top_k, hidden_size),
        grad_out=values(ep_size, tokens, hidden_size),
        grad_rows=values(ep_size, tokens, top_k, hidden_size),
        grad_row_weights=fractions(ep_size, tokens, top_k),
    )


def layout(inputs: Inputs, rank: int, alignment: int) -> Layout:
    """Rows by (local expert, source rank, source token, slot), segments padded to ``alignment``."""
    local_experts = inputs.num_experts // inputs.ep_size
    counts, offsets, segments = [], [0], []
    for expert in range(rank * local_experts, (rank + 1) * local_experts):
        segment = (inputs.topk_idx == expert).nonzero()  # in lexicographic order
        padding = -len(segment) % alignment
        segments += [segment, torch.full((padding, 3), -1)]
        counts.append(len(segment))
        offsets.append(offsets[-1] + len(segment) + padding)
    return Layout(torch.tensor(counts), torch.tensor(offsets), torch.cat(segments))


def expected(
    inputs: Inputs,
    rank: int,
    *,
    alignment: int,
    mxfp8: bool,
    apply_weights: bool,
    hosts: Sequence[Sequence[int]] | None = None,
) -> Expected:
    """Everything one rank must get.

    Args:
        mxfp8: dispatch forward and combine backward travel as MXFP8 (scales rounded up).
        apply_weights: of the combine.
        hosts: the ranks of every host, for a transport that sums inside the host first; None sums over ranks.
    """
    where = layout(inputs, rank, alignment)
    num_rows, count = len(where.source), inputs.num_tokens[rank]
    top_k = inputs.topk_idx.shape[2]
    seen = mxfp8_image(inputs.tokens) if mxfp8 else inputs.tokens
    seen_grads = mxfp8_image(inputs.grad_out) if mxfp8 else inputs.grad_out
    row_weights = where.fill(inputs.topk_weights, num_rows, 0.0)
    grad_outputs = where.fill(_by_slot(seen_grads, top_k), num_rows, 0.0)
    if apply_weights:
        grad_outputs = (row_weights.unsqueeze(1) * grad_outputs.float()).to(grad_outputs.dtype)
    here = inputs.topk_idx[rank, :count] >= 0
    products = inputs.outputs[rank, :count].double() * seen_grads[rank, :count].unsqueeze(1).double()
    return Expected(
        layout=where,
        rows=where.fill(_by_slot(seen, top_k), num_rows, 0.0),
        weights=row_weights,
        out=_sums(inputs, rank, inputs.outputs, apply_weights, hosts),
        grad_outputs=grad_outputs,
        grad_tokens=_sums(inputs, rank, inputs.grad_rows, False, hosts),
        grad_weights=torch.where(here, inputs.grad_row_weights[rank, :count], 0.0),
        grad_dots=torch.where(here, products.sum(-1), 0.0),
        grad_dots_scale=torch.where(here, products.abs().sum(-1), 0.0),
    )


def _by_slot(values_PTH: Tensor, top_k: int) -> Tensor:
    return values_PTH.unsqueeze(2).expand(-1, -1, top_k, -1)


def _sums(inputs: Inputs, rank: int, values: Tensor, weighted: bool, hosts: Sequence[Sequence[int]] | None) -> Tensor:
    """Sum of a token's slots: on the experts' rank in order of the slots, rounded, then over ranks.

    With ``hosts`` the sums of a host's ranks are added up in FP32 and rounded, then those of the hosts.
    """
    count, dtype = inputs.num_tokens[rank], values.dtype
    owner = inputs.owner()[rank, :count]
    groups = [[one] for one in range(inputs.ep_size)] if hosts is None else hosts
    total = torch.zeros(count, values.shape[-1])
    for group in groups:
        on_host = torch.zeros_like(total)
        for owning in group:
            partial = torch.zeros_like(total)
            for slot in range(owner.shape[1]):
                term = values[rank, :count, slot].float()
                if weighted:
                    term = inputs.topk_weights[rank, :count, slot].unsqueeze(1) * term
                partial += torch.where((owner[:, slot] == owning).unsqueeze(1), term, 0.0)
            on_host += partial
        total += on_host.to(dtype).float()
    return total.to(dtype)


def mxfp8_image(rows: Tensor) -> Tensor:
    """What is left of finite rows ``[..., H]`` after MXFP8: E4M3 elements, a power-of-two scale for every 32.

    The scale is the smallest power of two ``s`` with ``amax <= 448 * s``; ``448 = 0.875 * 2^9`` turns that into a
    comparison of mantissas.
    """
    blocks = rows.float().unflatten(-1, (-1, 32))
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True))
    shift = (exponent - 9 + (mantissa > _E4M3_MAX / 512).int()).clamp_min(-127)
    elements = torch.ldexp(blocks, -shift).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).float()
    return torch.ldexp(elements, shift).flatten(-2).to(rows.dtype)
