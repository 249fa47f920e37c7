"""What frameworks want to know about the rows of a dispatch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatcher import Dispatched

__all__ = ["local_expert_ids"]


def local_expert_ids(rows: Dispatched) -> Tensor:
    """The local expert of every row, int64 ``[R]``; ``L``, one more than the last, on rows that hold no token.

    No host sync: such rows are the padding of a segment and, in static mode, the tail.
    """
    counts_L, offsets_L1 = rows.tokens_per_expert, rows.expert_offsets
    num_experts = counts_L.shape[0]
    row_R = torch.arange(rows.weights.shape[0], device=counts_L.device)
    expert_R = torch.searchsorted(offsets_L1[1:].contiguous(), row_R, right=True)
    # The extra last entry belongs to the tail and ends before it starts.
    ends_L1 = torch.cat([offsets_L1[:-1] + counts_L, offsets_L1.new_zeros(1)])
    return torch.where(row_R < ends_L1[expert_R], expert_R, num_experts)
