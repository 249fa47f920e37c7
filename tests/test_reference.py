"""The reference against the hand-checked routing cases and sums small enough to do on paper."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import reference
from tests.cases import CASES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_layouts_match_the_routing_cases(case: dict[str, Any]) -> None:
    for call in case["calls"]:
        plan = reference.layouts(call["topk_idx"], case["num_experts"], case["alignment"])
        expected = call["expected"]
        assert [p.tokens_per_expert for p in plan] == expected["tokens_per_expert"]
        assert [p.expert_offsets for p in plan] == expected["expert_offsets"]
        assert [p.required_rows for p in plan] == expected["required_rows"]
        sources = [[None if s is None else list(s) for s in p.row_source] for p in plan]
        assert sources == expected["row_source"]


# Two ranks, two experts, one token on rank 0 that uses both slots of expert 0 and one of expert 1.
TOPK_IDX = [[[0, 0, 1]], []]
WEIGHTS = [torch.tensor([[0.5, 2.0, 3.0]]), torch.zeros(0, 3)]


def test_dispatch_copies_rows_and_weights() -> None:
    plan = reference.layouts(TOPK_IDX, 2, 2)
    tokens = [torch.tensor([[7.0, -8.0]]), torch.zeros(0, 2)]
    rows, weights = reference.dispatch(plan, tokens, WEIGHTS)
    assert rows[0].tolist() == [[7, -8], [7, -8]] and rows[1].tolist() == [[7, -8], [0, 0]]
    assert weights[0].tolist() == [0.5, 2.0] and weights[1].tolist() == [3.0, 0.0]


def test_combine_rounds_once_per_rank_and_once_at_the_end() -> None:
    plan = reference.layouts(TOPK_IDX, 2, 1)
    # bf16 has 8 significant bits: 256 + 1 is no bf16 number and ties to 256, 256 + 2 is one.
    y = [torch.tensor([[256.0], [1.0]]).bfloat16(), torch.tensor([[1.0]]).bfloat16()]
    # rank 0: round(256 + 1) = 256; then round(256 + 1) = 256. A single rounding would give 258.
    assert reference.combine(plan, y, WEIGHTS, False)[0].tolist() == [[256.0]]
    # weighted: rank 0: round(128 + 2) = 130; rank 1: 3; round(133) = 133
    assert reference.combine(plan, y, WEIGHTS, True)[0].tolist() == [[133.0]]
    assert reference.combine(plan, y, WEIGHTS, True)[1].shape == (0, 1)


def test_gradients_on_paper() -> None:
    plan = reference.layouts(TOPK_IDX, 2, 1)
    y = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0]])]
    g = [torch.tensor([[10.0, 1.0]]), torch.zeros(0, 2)]
    assert reference.combine_grad_outputs(plan, g, WEIGHTS, False)[0].tolist() == [[10, 1], [10, 1]]
    assert reference.combine_grad_outputs(plan, g, WEIGHTS, True)[0].tolist() == [[5, 0.5], [20, 2]]
    assert reference.combine_grad_weights(plan, y, g, WEIGHTS)[0].tolist() == [[12, 34, 56]]
    assert reference.dispatch_grad_tokens(plan, y, WEIGHTS)[0].tolist() == [[9, 12]]
    scalars = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    assert reference.dispatch_grad_weights(plan, scalars, WEIGHTS)[0].tolist() == [[1, 2, 3]]


def test_a_token_travels_once_per_destination_rank() -> None:
    # four ranks, eight experts, two experts a rank
    topk_idx = [[[2, 3, 4], [0, 1, 0], [-1, -1, 7]], [[2, 3, 2]], [], [[0, 2, 4]]]
    assert reference.tokens_sent(topk_idx, 8) == [3, 0, 0, 3]
