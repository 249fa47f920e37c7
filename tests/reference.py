"""An independent dense reference of dispatch and combine: one process, all ranks' data at hand, plain loops.

It follows the written rules only and shares no code with ep_comm (but for the MXFP8 codec, which has an
oracle of its own). Lists are indexed by rank. `topk_idx[rank]` is a list of tokens, each a list of `top_k`
expert ids; tokens, weights and outputs are tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "Layout",
    "combine",
    "combine_grad_outputs",
    "combine_grad_weights",
    "dispatch",
    "dispatch_grad_tokens",
    "dispatch_grad_weights",
    "layouts",
    "tokens_sent",
]

TopkIdx = Sequence[Sequence[Sequence[int]]]
Source = tuple[int, int, int]


@dataclass
class Layout:
    """What one rank receives. ``row_source[row]`` is (source rank, token, slot), or None for padding."""

    tokens_per_expert: list[int]
    expert_offsets: list[int]
    row_source: list[Source | None]

    @property
    def required_rows(self) -> int:
        return len(self.row_source)

    def rows(self) -> Iterator[tuple[int, Source]]:
        """(row, source) of every row that is not padding."""
        return ((row, source) for row, source in enumerate(self.row_source) if source is not None)


def layouts(topk_idx: TopkIdx, num_experts: int, alignment: int) -> list[Layout]:
    """Rows by (local expert, source rank, token, slot); each segment padded to a multiple of alignment."""
    ep_size = len(topk_idx)
    num_local = num_experts // ep_size
    result = []
    for owner in range(ep_size):
        layout = Layout([], [0], [])
        for expert in range(owner * num_local, (owner + 1) * num_local):
            segment: list[Source | None] = [
                (rank, token, slot)
                for rank in range(ep_size)
                for token, slots in enumerate(topk_idx[rank])
                for slot, chosen in enumerate(slots)
                if chosen == expert
            ]
            layout.tokens_per_expert.append(len(segment))
            while len(segment) % alignment:
                segment.append(None)
            layout.row_source += segment
            layout.expert_offsets.append(len(layout.row_source))
        result.append(layout)
    return result


def tokens_sent(topk_idx: TopkIdx, num_experts: int) -> list[int]:
    """Tokens each rank sends to others: one for every other rank that owns an expert of the token."""
    num_local = num_experts // len(topk_idx)
    return [
        sum(len({e // num_local for e in slots if e >= 0} - {rank}) for slots in topk_idx[rank])
        for rank in range(len(topk_idx))
    ]


def on_the_wire(rows: Tensor, mxfp8: str | None) -> Tensor:
    """What a receiver sees of copied rows: themselves, or their MXFP8 image with the given scale rounding."""
    if mxfp8 is None:
        return rows
    import ep_comm

    return ep_comm.dequantize_mxfp8(ep_comm.quantize_mxfp8(rows, rounding=mxfp8), dtype=rows.dtype)


def dispatch(
    plan: list[Layout], tokens: list[Tensor], weights: list[Tensor], mxfp8: str | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Rows [R, H] and weights [R] of every rank; padding is zero."""
    hidden, dtype = tokens[0].shape[1], tokens[0].dtype
    seen = [on_the_wire(x, mxfp8) for x in tokens]
    rows, row_weights = [], []
    for layout in plan:
        x = torch.zeros(layout.required_rows, hidden, dtype=dtype)
        w = torch.zeros(layout.required_rows)
        for row, (rank, token, slot) in layout.rows():
            x[row] = seen[rank][token]
            w[row] = weights[rank][token, slot]
        rows.append(x)
        row_weights.append(w)
    return rows, row_weights


def combine(plan: list[Layout], outputs: list[Tensor], weights: list[Tensor], apply_weights: bool) -> list[Tensor]:
    """out[t] = round(sum over ranks r of round(sum over slots k on r of w[t,k] * y[row])), sums in FP32."""
    hidden, dtype = outputs[0].shape[1], outputs[0].dtype
    row_of = [{source: row for row, source in layout.rows()} for layout in plan]
    combined = []
    for rank, w in enumerate(weights):
        num_tokens, top_k = w.shape
        out = torch.zeros(num_tokens, hidden, dtype=dtype)
        for token in range(num_tokens):
            total = torch.zeros(hidden, dtype=torch.float32)
            for owner in range(len(plan)):
                partial = torch.zeros(hidden, dtype=torch.float32)
                for slot in range(top_k):
                    row = row_of[owner].get((rank, token, slot))
                    if row is None:
                        continue
                    term = outputs[owner][row].float()
                    if apply_weights:
                        term = w[token, slot] * term
                    partial = partial + term
                total = total + partial.to(dtype).float()
            out[token] = total.to(dtype)
        combined.append(out)
    return combined


def dispatch_grad_tokens(plan: list[Layout], grad_rows: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """Gradient of the tokens: the rows' gradients come back the way expert outputs do, unweighted."""
    return combine(plan, grad_rows, weights, apply_weights=False)


def dispatch_grad_weights(plan: list[Layout], grad_row_weights: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """Gradient of topk_weights: each row's scalar returns to its slot; a slot without an expert gets zero."""
    grads = [torch.zeros_like(w) for w in weights]
    for owner, layout in enumerate(plan):
        for row, (rank, token, slot) in layout.rows():
            grads[rank][token, slot] = grad_row_weights[owner][row]
    return grads


def combine_grad_outputs(
    plan: list[Layout],
    grad_out: list[Tensor],
    weights: list[Tensor],
    apply_weights: bool,
    mxfp8: str | None = None,
) -> list[Tensor]:
    """Gradient of the expert outputs: w[t,k] * g[t], rounded once, or a copy of g[t]; padding is zero."""
    grad_rows, row_weights = dispatch(plan, grad_out, weights, mxfp8)
    if not apply_weights:
        return grad_rows
    return [(w[:, None] * g.float()).to(g.dtype) for g, w in zip(grad_rows, row_weights, strict=True)]


def combine_grad_weights(
    plan: list[Layout],
    outputs: list[Tensor],
    grad_out: list[Tensor],
    weights: list[Tensor],
    mxfp8: str | None = None,
) -> list[Tensor]:
    """Gradient of topk_weights under apply_weights: dot(y[row], g[t] as received).

    Summed in float64: the order of an FP32 sum is the implementation's choice, so compare bit for bit only
    where every partial sum is exact.
    """
    grad_rows, _ = dispatch(plan, grad_out, weights, mxfp8)
    dots = []
    for layout, y, g in zip(plan, outputs, grad_rows, strict=True):
        dot = torch.zeros(layout.required_rows, dtype=torch.float32)
        for row, _ in layout.rows():
            dot[row] = (y[row].double() * g[row].double()).sum().float()
        dots.append(dot)
    return dispatch_grad_weights(plan, dots, weights)
