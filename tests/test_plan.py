"""The routing plan by hand and against loops: counts, positions, offsets, required rows, caps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ep_comm.config import EPConfig, round_up, worst_case_rows
from ep_comm.plan import CountedPlan, CountMatrix, LocalRouting, make_plan, required_rows, segment_offsets
from ep_comm.status import FaultCode, Operation, Word


def plans(
    idx_by_rank: list[Tensor], config: EPConfig, budget: int = 10**6, pair_rows: int | None = None
) -> list[CountedPlan]:
    """The plan of every rank, with the exchange of counts replaced by stacking the messages."""
    ranks = len(idx_by_rank)
    layout = CountMatrix(config, ranks)
    routings = [LocalRouting.build(idx, config.num_experts, ranks) for idx in idx_by_rank]
    matrix = torch.stack(
        [
            layout.message(layout.header(Operation.DISPATCH, 0, len(idx), 0, budget), routing.fault, routing)
            for idx, routing in zip(idx_by_rank, routings, strict=True)
        ]
    )
    return [
        make_plan(routing, matrix, layout, rank=rank, alignment=config.alignment, pair_limit=pair_rows)
        for rank, routing in enumerate(routings)
    ]


def config(num_experts: int, top_k: int, alignment: int) -> EPConfig:
    return EPConfig(num_experts=num_experts, top_k=top_k, hidden_size=8, max_tokens_per_rank=64, alignment=alignment)


def test_two_ranks_by_hand() -> None:
    first, second = plans([torch.tensor([[0, 3], [3, -1]]), torch.tensor([[3, 0], [2, 2]])], config(4, 2, alignment=4))
    # Rank 0 owns experts 0 and 1, rank 1 owns 2 and 3.
    assert first.tokens_per_expert_L.tolist() == [2, 0]
    assert second.tokens_per_expert_L.tolist() == [2, 3]
    assert first.expert_offsets_L1.tolist() == [0, 4, 4]
    assert second.expert_offsets_L1.tolist() == [0, 4, 8]
    for plan in (first, second):
        assert plan.required_rows_P.tolist() == [4, 8]
        assert plan.pair_tokens_PP.tolist() == [[1, 2], [1, 2]]
        assert not plan.overflow
    layout = CountMatrix(config(4, 2, alignment=4), 2)
    assert [layout.rows_of(first.matrix_PX, rank, 4) for rank in range(2)] == [4, 8]
    assert layout.pair_tokens(first.matrix_PX).tolist() == [[1, 2], [1, 2]]
    assert first.slot_rows_TK.tolist() == [[0, 4], [5, -1]]
    assert second.slot_rows_TK.tolist() == [[6, 1], [0, 1]]
    assert first.slot_rank_TK.tolist() == [[0, 1], [1, -1]]
    assert first.needs_TP.tolist() == [[True, True], [False, True]]


def test_budget_caps_what_is_handed_out_but_not_what_is_required() -> None:
    idx = torch.zeros(5, 1, dtype=torch.int64)
    (plan,) = plans([idx], config(2, 1, alignment=2), budget=4)
    assert plan.overflow and plan.required_rows_P.tolist() == [6]
    assert plan.tokens_per_expert_L.tolist() == [4, 0]
    assert plan.expert_offsets_L1.tolist() == [0, 4, 4]
    assert plan.slot_rows_TK.flatten().tolist() == [0, 1, 2, 3, -1]


def test_pair_budget_is_part_of_the_verdict() -> None:
    idx = [torch.zeros(3, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)]
    assert not plans(idx, config(2, 1, 1), pair_rows=3)[1].overflow
    assert plans(idx, config(2, 1, 1), pair_rows=2)[0].overflow
    assert plans(idx, config(2, 1, 1), pair_rows=2)[1].overflow


@pytest.mark.parametrize("bad", [4, 99, -2, 2**40, -(2**40)])
def test_first_bad_id_is_reported_and_routed_nowhere(bad: int) -> None:
    idx = torch.tensor([[0, 1], [2, bad], [bad, 3]])
    routing = LocalRouting.build(idx, 4, 1)
    code, token, slot, low, high = routing.fault.tolist()
    assert (code, token, slot) == (FaultCode.EXPERT_ID, 1, 1)
    assert (high << 32) | (low & 0xFFFFFFFF) == bad
    assert routing.idx_TK.tolist() == [[0, 1], [2, -1], [-1, 3]]
    assert routing.counts_E.tolist() == [1, 1, 1, 1]


def test_message_layout() -> None:
    settings_ = config(4, 2, 1)
    layout = CountMatrix(settings_, 2)
    routing = LocalRouting.build(torch.tensor([[1, 3]]), 4, 2)
    message = layout.message(layout.header(Operation.DISPATCH, 5, 1, 2, 77), routing.fault, routing)
    header, pairs, counts = layout.split(torch.stack([message, message]))
    assert message.dtype == torch.int32 and message.numel() == layout.width
    assert header[0, Word.OPERATION] == Operation.DISPATCH and header[0, Word.AGREED] == 5
    assert header[0, Word.NUM_TOKENS] == 1 and header[0, Word.DTYPE] == 2 and header[0, Word.BUDGET_ROWS] == 77
    assert header[0, Word.FAULT :].tolist() == [0] * 5
    assert pairs.tolist() == [[1, 1]] * 2 and counts.tolist() == [[0, 1, 0, 1]] * 2
    status = layout.message(layout.header(Operation.COMBINE, 5, 1, 2, 77), [9, -1, 2, 3, 4], device=message.device)
    assert status.dtype == torch.int32
    assert status[0] == Operation.COMBINE and status.numel() == layout.width
    assert status[1:10].tolist() == [5, 1, 2, 77, 9, -1, 2, 3, 4] and not status[10:].any()
    assert layout.width == CountMatrix(config(256, 2, 1), 2).width  # ranks out of step read each other's words


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[Tensor], int, int, int]:
    """Routing of several ranks: (ids by rank, experts, top-k, alignment)."""
    ranks = draw(st.sampled_from([1, 2, 4]))
    experts = ranks * draw(st.integers(1, 4))
    top_k = draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**31))
    make = torch.Generator().manual_seed(seed)
    low = draw(st.sampled_from([-1, 0]))
    high = draw(st.sampled_from([1, experts]))
    ids = []
    for _ in range(ranks):
        tokens = draw(st.integers(0, 9))
        ids.append(torch.randint(low, high, (tokens, top_k), generator=make))
    return ids, experts, top_k, draw(st.sampled_from([1, 3, 16]))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(routings())
def test_every_slot_gets_the_row_of_its_place_in_the_order(case: tuple[list[Tensor], int, int, int]) -> None:
    """Rows are handed out in the order (expert, source rank, token, slot), each segment aligned."""
    ids, experts, top_k, alignment = case
    ranks = len(ids)
    per_rank = experts // ranks
    made = plans(ids, config(experts, top_k, alignment))
    for owner in range(ranks):
        next_row = 0
        for expert in range(owner * per_rank, (owner + 1) * per_rank):
            next_row = round_up(next_row, alignment)
            assert int(made[owner].expert_offsets_L1[expert - owner * per_rank]) == next_row
            for source, idx in enumerate(ids):
                for token, slot in (idx == expert).nonzero().tolist():
                    assert int(made[source].slot_rows_TK[token, slot]) == next_row
                    assert int(made[source].slot_rank_TK[token, slot]) == owner
                    assert bool(made[source].needs_TP[token, owner])
                    next_row += 1
        for plan in made:
            assert int(plan.required_rows_P[owner]) == round_up(next_row, alignment)
            for source, idx in enumerate(ids):
                here = ((idx >= owner * per_rank) & (idx < (owner + 1) * per_rank)).any(1).sum()
                assert int(plan.pair_tokens_PP[source, owner]) == int(here)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 40), st.integers(1, 5), st.sampled_from([1, 4, 16]), st.integers(0, 1000))
def test_worst_case_is_reached_and_never_passed(rows: int, experts: int, alignment: int, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    worst = worst_case_rows(rows, experts, alignment)
    spread = torch.bincount(torch.randint(0, experts, (rows,), generator=make), minlength=experts)
    assert int(segment_offsets(spread, alignment)[-1]) <= worst
    # One row for every expert but the first, which takes the rest, is one of the worst.
    extreme = torch.zeros(experts, dtype=torch.int64)
    extreme[: min(rows, experts)] = 1
    extreme[0] += max(0, rows - experts)
    assert int(segment_offsets(extreme, alignment)[-1]) == worst


def test_required_rows_of_many_steps_at_once() -> None:
    counts = torch.tensor([[[1, 0, 5, 4], [0, 0, 0, 0]], [[16, 1, 2, 2], [3, 3, 3, 3]]])
    assert required_rows(counts, 2, 4).tolist() == [[[4, 12], [0, 0]], [[20, 8], [8, 8]]]
