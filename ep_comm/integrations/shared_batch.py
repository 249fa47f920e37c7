"""Ranks that hold the same batch: each works on a slice of the tokens, and the slices are put together again.

    tokens on both ranks   t0 t1 t2 t3 t4          gradients   the same on both ranks
    slice of rank 0        t0 t1 t2                backward    slices gathered
    slice of rank 1        t3 t4
    result gathered        y0 y1 y2 y3 y4          backward    own slice of the gradient

All ranks compute the same loss from the gathered result, so each of them has its whole gradient and takes its
slice; nothing is summed. Shapes depend on the number of tokens alone, so this can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["gather_slices", "slice_of_rank"]


def slice_of_rank(
    tokens_TH: Tensor, idx_TK: Tensor, weights_TK: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's slice of tokens, expert ids and weights; the last slices may be shorter, or empty."""
    lo, hi = _bounds(tokens_TH.shape[0], group)
    tokens, weights = _Slice.apply(tokens_TH, weights_TK, group)
    return tokens, idx_TK[lo:hi], weights


def gather_slices(y_tH: Tensor, num_tokens: int, group: dist.ProcessGroup) -> Tensor:
    """All ranks' slices of the result, ``[num_tokens, H]``."""
    return _Gather.apply(y_tH, num_tokens, group)


def _bounds(num_tokens: int, group: dist.ProcessGroup) -> tuple[int, int]:
    rank, chunk = dist.get_rank(group), _chunk(num_tokens, group)
    return min(rank * chunk, num_tokens), min((rank + 1) * chunk, num_tokens)


def _chunk(num_tokens: int, group: dist.ProcessGroup) -> int:
    return -(-num_tokens // dist.get_world_size(group))


def _gather(slice_tX: Tensor, num_tokens: int, group: dist.ProcessGroup) -> Tensor:
    chunk = _chunk(num_tokens, group)
    padded = slice_tX.new_zeros(chunk, *slice_tX.shape[1:])
    padded[: slice_tX.shape[0]] = slice_tX
    whole = slice_tX.new_empty(chunk * dist.get_world_size(group), *slice_tX.shape[1:])
    dist.all_gather_into_tensor(whole, padded, group=group)
    return whole[:num_tokens]


class _Slice(torch.autograd.Function):
    """One function for tokens and weights, so that the two gathers of the backward pass keep their order."""

    @staticmethod
    def forward(ctx: Any, tokens_TH: Tensor, weights_TK: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        ctx.group, ctx.num_tokens = group, tokens_TH.shape[0]
        lo, hi = _bounds(tokens_TH.shape[0], group)
        return tokens_TH[lo:hi].clone(), weights_TK[lo:hi].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_tokens: Tensor, grad_weights: Tensor) -> tuple[Tensor, Tensor, None]:
        gathered = (_gather(grad, ctx.num_tokens, ctx.group) for grad in (grad_tokens, grad_weights))
        return *gathered, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_tH: Tensor, num_tokens: int, group: dist.ProcessGroup) -> Tensor:
        ctx.bounds = _bounds(num_tokens, group)
        return _gather(y_tH, num_tokens, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None, None]:
        lo, hi = ctx.bounds
        return grad_TH[lo:hi].contiguous(), None, None
