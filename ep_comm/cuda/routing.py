"""The routing plan of :mod:`ep_comm.plan` in three kernels: this rank's counts and positions, and what all counts say.

Nothing here waits for the GPU, so everything may be captured in a CUDA graph. Letters as in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .kernels import CudaKernels

__all__ = ["derive_plan", "local_routing", "routing_fits", "write_message"]

_WARPS = 8
_ITEMS_PER_WARP = (128, 256, 512)
_DERIVE_SLOTS = 1024  # of one block


def routing_fits(kernels: CudaKernels, num_experts: int) -> bool:
    """Whether the kernels take so many experts: a block of place_slots keeps a count for each warp and expert."""
    return _WARPS * num_experts * 4 <= kernels.most_shared_bytes


def local_routing(
    kernels: CudaKernels, topk_idx_TK: Tensor, num_experts: int, ep_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of :class:`ep_comm.plan.LocalRouting`, in order; ``topk_idx`` contiguous."""
    (num_tokens, top_k), device = topk_idx_TK.shape, topk_idx_TK.device
    slots = num_tokens * top_k
    per_warp = next((n for n in _ITEMS_PER_WARP if slots <= n * _WARPS * kernels.num_sms), _ITEMS_PER_WARP[-1])
    blocks = max(1, -(-slots // (_WARPS * per_warp)))
    defines = {"IDX64": int(topk_idx_TK.dtype == torch.int64), "WARPS": _WARPS, "ITEMS_PER_WARP": per_warp}
    idx_TK, position_TK = torch.empty(2, num_tokens, top_k, dtype=torch.int64, device=device).unbind()
    # One piece of zeroed memory: the totals, and behind them the flags, eight in each number.
    flags = num_tokens * ep_size
    sizes = [num_experts, ep_size, 1, -(-flags // 8)]
    totals = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
    counts_E, pair_tokens_P, _, room = totals.split_with_sizes(sizes)
    needs_TP = room.view(torch.bool)[:flags].view(num_tokens, ep_size)
    block_counts = torch.empty(blocks, num_experts, dtype=torch.int32, device=device)
    fault = torch.empty(5, dtype=torch.int32, device=device)
    shape = (np.int64(slots), top_k, num_experts, ep_size)
    kernels.launch(
        "routing.cu", "count_slots", defines, blocks, _WARPS * 32,
        (topk_idx_TK, *shape, idx_TK, block_counts, needs_TP, totals),
        shared_bytes=(num_experts + ep_size) * 4,
    )  # fmt: skip
    kernels.launch(
        "routing.cu", "place_slots", defines, blocks, _WARPS * 32,
        (topk_idx_TK, *shape, block_counts, totals, position_TK, fault),
        shared_bytes=_WARPS * num_experts * 4,
    )  # fmt: skip
    return idx_TK, counts_E, position_TK, needs_TP, pair_tokens_P, fault


def write_message(
    kernels: CudaKernels, header: Sequence[int], fault: Tensor | Sequence[int], counts: Sequence[Tensor], width: int
) -> Tensor:
    """The message of :meth:`ep_comm.plan.CountMatrix.message`, int32 ``[width]``.

    Args:
        header: five status words.
        fault: five more; int32 if they are on the device.
        counts: tokens for each rank, slots of each expert and, if there are any, tokens for each host: int64; empty
            for a message without.
    """
    message = torch.empty(width, dtype=torch.int32, device=kernels.device)
    on_device = isinstance(fault, Tensor)
    parts: list[Tensor | int | None] = []
    for part in (*counts, None, None, None)[:3]:
        parts += [part, 0 if part is None else part.numel()]
    kernels.launch(
        "routing.cu", "write_message", {"WARPS": _WARPS}, -(-width // (_WARPS * 32)), _WARPS * 32,
        (*header, fault if on_device else None, *((0, 0, 0, 0, 0) if on_device else fault), *parts, message, width),
    )  # fmt: skip
    return message


def derive_plan(
    kernels: CudaKernels,
    matrix_PX: Tensor,
    idx_TK: Tensor,
    position_TK: Tensor,
    *,
    num_experts: int,
    rank: int,
    alignment: int,
    pair_limit: int | None,
) -> dict[str, Tensor]:
    """The fields of :class:`ep_comm.plan.RoutingPlan` that follow from the counts of all ranks, by name.

    Args:
        matrix_PX: int32, contiguous, the messages of all ranks.
        idx_TK, position_TK: of this rank's :class:`ep_comm.plan.LocalRouting`.
    """
    (ep_size, width), device = matrix_PX.shape, matrix_PX.device
    local = num_experts // ep_size
    slot_rank_TK, slot_rows_TK = torch.empty(2, *idx_TK.shape, dtype=torch.int64, device=device).unbind()
    sizes = [local, local + 1, ep_size]
    parts = torch.empty(sum(sizes), dtype=torch.int64, device=device)
    tokens_L, offsets_L1, required_P = parts.split_with_sizes(sizes)
    overflow = torch.empty((), dtype=torch.bool, device=device)
    blocks = max(1, -(-idx_TK.numel() // _DERIVE_SLOTS))
    kernels.launch(
        "routing.cu", "derive_plan", {"WARPS": _WARPS}, blocks, _WARPS * 32,
        (matrix_PX, np.int64(width), idx_TK, position_TK, np.int64(idx_TK.numel()), num_experts, ep_size, rank,
         np.int64(alignment), np.int64(-1 if pair_limit is None else pair_limit), slot_rank_TK, slot_rows_TK,
         tokens_L, offsets_L1, required_P, overflow),
        shared_bytes=2 * num_experts * 8,
    )  # fmt: skip
    return {
        "slot_rank_TK": slot_rank_TK,
        "slot_rows_TK": slot_rows_TK,
        "tokens_per_expert_L": tokens_L,
        "expert_offsets_L1": offsets_L1,
        "required_rows_P": required_P,
        "overflow": overflow,
    }
