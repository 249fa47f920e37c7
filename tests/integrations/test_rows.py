"""Labels of rows."""

from __future__ import annotations

import pytest
import torch

from ep_comm import Dispatcher, EPConfig
from ep_comm.integrations.rows import local_expert_ids

NONE = 3


@pytest.mark.parametrize(
    ("topk_idx", "changes", "expected"),
    [
        ([[2, 0], [2, -1]], {"alignment": 1}, [0, 2, 2]),
        ([[2, 0], [2, -1]], {"alignment": 2}, [0, NONE, 2, 2]),
        ([[1, 1], [1, -1]], {"alignment": 4}, [1, 1, 1, NONE]),
        ([[-1, -1], [-1, -1]], {"alignment": 4}, []),
        ([[2, 0], [2, -1]], {"alignment": 2, "mode": "static", "budget_rows": 8}, [0, NONE, 2, 2, *[NONE] * 4]),
        ([[-1, -1], [-1, -1]], {"mode": "static", "budget_rows": 3, "alignment": 1}, [NONE] * 3),
    ],
)
def test_local_expert_ids(topk_idx: list[list[int]], changes: dict, expected: list[int]) -> None:
    config = EPConfig(num_experts=3, top_k=2, hidden_size=4, max_tokens_per_rank=4, **changes)
    with Dispatcher(config) as dispatcher:
        rows = dispatcher.dispatch(torch.ones(2, 4), torch.tensor(topk_idx), torch.ones(2, 2))
        assert local_expert_ids(rows).tolist() == expected
