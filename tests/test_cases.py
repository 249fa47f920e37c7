"""Every routing case of fixtures/cases.json, in both modes, as BF16 and as MXFP8.

The source of each row is read back from its contents: a token row holds (rank + 1, token + 1) over and over,
small whole numbers that MXFP8 carries exactly, and a weight holds its slot.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ep_comm
from tests.cases import CASES, by_name
from tests.harness import Caught, expect_error, run_ranks

Source = list[int] | None


def config_of(case: dict[str, Any], mode: str, dtype: str) -> ep_comm.EPConfig:
    return ep_comm.EPConfig(
        num_experts=case["num_experts"],
        top_k=case["top_k"],
        hidden_size=case["hidden_size"],
        max_tokens_per_rank=case["max_tokens_per_rank"],
        mode=mode,
        alignment=case["alignment"],
        dispatch_forward_dtype=dtype,
        combine_backward_dtype=dtype,
        # Not rounded up to what any routing may need, but enough for every case that expects no overflow.
        budget_rows=case.get("budget_rows", 64),
        pair_rows=case["max_tokens_per_rank"],
    )


def telling_tokens(rank: int, count: int, hidden: int) -> torch.Tensor:
    pairs = torch.tensor([[rank + 1, token + 1] for token in range(count)], dtype=torch.bfloat16)
    return pairs.reshape(count, 2).repeat(1, hidden // 2)


def read_source(row: torch.Tensor, weight: float) -> Source:
    if not row.any() and weight == 0.0:
        return None
    assert torch.equal(row, row[:2].repeat(len(row) // 2)), "a row mixes two tokens"
    return [int(row[0]) - 1, int(row[1]) - 1, int(weight) - 1]


def run_call(dispatcher: ep_comm.Dispatcher, rank: int, topk_idx: list[list[list[int]]]) -> dict[str, Any]:
    config = dispatcher.config
    count = len(topk_idx[rank])
    tokens = telling_tokens(rank, count, config.hidden_size)
    weights = torch.arange(1.0, config.top_k + 1).repeat(count, 1)
    d = dispatcher.dispatch(tokens, torch.tensor(topk_idx[rank]).reshape(count, config.top_k).long(), weights)
    result = {
        "tokens_per_expert": d.tokens_per_expert.tolist(),
        "expert_offsets": d.expert_offsets.tolist(),
        "required_rows": dispatcher.required_rows,
        "overflow": bool(dispatcher.overflowed),
        "buffer_rows": d.tokens.shape[0],
    }
    if not result["overflow"]:
        row_source = [read_source(*row) for row in zip(d.tokens, d.weights.tolist(), strict=True)]
        assert not any(row_source[result["required_rows"] :]), "the tail is not empty"
        result["row_source"] = row_source[: result["required_rows"]]
        # Rows go back as they came: every token is multiplied by the number of its experts.
        out = dispatcher.combine(d.tokens, d.handle)
        chosen = (torch.tensor(topk_idx[rank]).reshape(count, config.top_k) >= 0).sum(1)
        assert torch.equal(out, tokens * chosen[:, None].to(tokens.dtype))
    return result


def run_case(rank: int, world_size: int, case: dict[str, Any], mode: str, dtype: str) -> list[dict[str, Any]]:
    with ep_comm.Dispatcher(config_of(case, mode, dtype)) as dispatcher:
        return [run_call(dispatcher, rank, call["topk_idx"]) for call in case["calls"]]


@pytest.mark.parametrize("dtype", ["bf16", "mxfp8"])
@pytest.mark.parametrize("mode", ["eager", "static"])
@pytest.mark.parametrize("case", [c for c in CASES if c["calls"]], ids=lambda case: case["name"])
def test_routing_case(case: dict[str, Any], mode: str, dtype: str) -> None:
    results = run_ranks(run_case, case["ep_size"], case, mode, dtype)
    for rank, of_rank in enumerate(results):
        for number, (call, got) in enumerate(zip(case["calls"], of_rank, strict=True)):
            where = f"rank {rank}, call {number}"
            expected = call["expected"]
            overflow = mode == "static" and expected.get("overflow", False)
            budget = config_of(case, mode, dtype).initial_budget_rows()
            counts, offsets = expected["tokens_per_expert"][rank], expected["expert_offsets"][rank]
            if overflow:  # the demand is in required_rows; experts must never be sent beyond their buffer
                offsets = [min(offset, budget) for offset in offsets]
                counts = [min(n, budget - start) for n, start in zip(counts, offsets[:-1], strict=True)]
            assert got["tokens_per_expert"] == counts, where
            assert got["expert_offsets"] == offsets, where
            assert got["required_rows"] == expected["required_rows"][rank], where
            assert got["overflow"] == overflow, where
            if not overflow:
                assert got["row_source"] == expected["row_source"][rank], where
            assert got["buffer_rows"] == (budget if mode == "static" else expected["required_rows"][rank]), where


def bad_then_good(rank: int, world_size: int, mode: str) -> tuple[Caught, dict[str, Any]]:
    case = by_name("id_out_of_range")
    topk_idx = torch.tensor(case["bad_call"]["topk_idx"][rank])
    tokens = torch.ones(len(topk_idx), case["hidden_size"], dtype=torch.bfloat16)
    with ep_comm.Dispatcher(config_of(case, mode, "bf16"), name="layer") as dispatcher:
        if mode == "eager":
            bad = expect_error(dispatcher.dispatch, tokens, topk_idx, torch.ones(topk_idx.shape))
        else:
            dispatcher.dispatch(tokens, topk_idx, torch.ones(topk_idx.shape))
            bad = expect_error(dispatcher.check)
        good = run_call(dispatcher, rank, [[[0, 7]], [[4, 3], [-1, 2]]])
        dispatcher.check()
        return bad, good


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_an_id_out_of_range_is_an_error_on_every_rank(mode: str) -> None:
    case = by_name("id_out_of_range")
    results = run_ranks(bad_then_good, case["ep_size"], mode)
    for bad, good in results:
        assert bad.type == "RoutingError"
        for part in ("rank 1", "token 2", case["error"], "-1", "8"):
            assert part in bad.message, bad.message
        assert not good["overflow"]
    assert results[0][0] == results[1][0]
    assert results[0][1]["row_source"] == [[0, 0, 0], [1, 1, 1], [1, 0, 1]]
    assert results[1][1]["row_source"] == [[1, 0, 0], [0, 0, 1]]
