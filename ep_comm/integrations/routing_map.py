"""Routing as a map of tokens and experts, turned into expert slots.

map    expert 0 1 2 3        slots, K = 2
token a       . x . x        a -> 1 3
token b       . . x .        b -> 2 -
token c       . . . .        c -> - -
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["expert_slots", "on_all_tensor_ranks"]


def expert_slots(map_TE: Tensor, probs_TE: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Expert ids and routing weights of every token. No host sync, and shapes that depend on shapes alone.

    Args:
        map_TE: bool ``[T, E]``, true where the token goes to the expert, whatever its probability is.
        probs_TE: ``[T, E]`` floating point. Gradients flow to mapped entries, and to no others.
        slots: K, the most experts of a token.

    Returns:
        int64 ``[T, K]`` ids in ascending order, then -1; float32 ``[T, K]`` weights, 0 beside -1. A token with more
        than K experts gets the id E, which no dispatcher accepts, in its last slot: nothing is dropped silently.
    """
    num_experts = map_TE.shape[1]
    # The lowest mapped expert has the highest score: top-k then finds them in ascending order.
    score_E = torch.arange(num_experts, 0, -1, dtype=torch.int32, device=map_TE.device)
    top_TK = (map_TE * score_E).topk(slots, dim=1).values.long()
    idx_TK = torch.where(top_TK > 0, num_experts - top_TK, -1)
    weights_TK = probs_TE.gather(1, idx_TK.clamp(min=0)).float()
    weights_TK = torch.where(top_TK > 0, weights_TK, 0.0)
    idx_TK[:, -1].masked_fill_(map_TE.sum(dim=1) > slots, num_experts)
    return idx_TK, weights_TK


def on_all_tensor_ranks(idx_TK: Tensor, weights_TK: Tensor, num_local_experts: int, size: int) -> tuple[Tensor, Tensor]:
    """Slots for experts that are each split over ``size`` ranks, all of which need the token.

    The ranks of one expert follow each other in the group, and the group counts the parts of an expert as experts:
    part ``j`` of expert ``e`` is ``((e // L) * size + j) * L + e % L``. What the parts give is summed by combine.

    Args:
        idx_TK: ids of whole experts, -1 for none.
        weights_TK: weights; every part gets that of its expert.
        num_local_experts: L, experts of one rank.
        size: ranks that an expert is split over.

    Returns:
        ``[T, size * K]`` ids and weights.
    """
    if size == 1:
        return idx_TK, weights_TK
    part_P1 = torch.arange(size, device=idx_TK.device).view(1, size, 1)
    whole_T1K = idx_TK.unsqueeze(1)
    block_T1K = whole_T1K.div(num_local_experts, rounding_mode="floor")
    ids_TPK = (block_T1K * size + part_P1) * num_local_experts + whole_T1K % num_local_experts
    ids_TPK = torch.where(whole_T1K >= 0, ids_TPK, -1)
    return ids_TPK.flatten(1), weights_TK.unsqueeze(1).expand(-1, size, -1).flatten(1)
