"""Routing, counted bytes, and the plain-torch answers that results are compared with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ep_comm.bench.contenders import own
from ep_comm.bench.contenders.base import Place, pair_bytes, token_bytes
from ep_comm.bench.options import BenchOptions, Shape
from ep_comm.bench.routing import RoutingSet, draw_experts, draw_sets
from ep_comm.bench.run import Bench
from ep_comm.bench.timing import median_of_slowest
from ep_comm.bench.work import Work, expert_output, make_work
from tests import reference

SHAPE = Shape(tokens=40, hidden=32, experts=8, top_k=3, routing="skewed")
CPU = torch.device("cpu")


def test_routing_is_a_function_of_the_seed() -> None:
    first, again = (draw_experts(SHAPE, rank=1, number=0, seed=5, skew=1.0) for _ in range(2))
    assert torch.equal(first, again)
    for other in ({"rank": 0}, {"number": 1}, {"seed": 6}):
        assert not torch.equal(first, draw_experts(SHAPE, **{"rank": 1, "number": 0, "seed": 5, "skew": 1.0, **other}))
    assert all(len(set(slots)) == 3 for slots in first.tolist())


@pytest.mark.parametrize("chosen, times", [("symmetric", 2), ("hierarchical", 1), ("collective", 1)])
def test_multiprocessors_only_where_they_mean_something(
    chosen: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--num-sms 8,24`` with a transport that leaves it to NCCL is one measurement, and a dash in the table."""
    monkeypatch.setattr(own, "Dispatcher", lambda *_: SimpleNamespace(transport=chosen))
    options = BenchOptions(tokens=(8,), hidden=(32,), experts=(8,), top_k=2, num_sms=(8, 24))
    contender = own.OwnTransport("auto")
    contender.start(Place(0, 2, torch.device("cuda", 0), None, options))
    entrants = [SimpleNamespace(contender=contender)]
    plans = list(Bench._plans(SimpleNamespace(options=options, _entrants=entrants), SHAPE))
    assert len(plans) == times * len({(plan.dtype, plan.mode) for _, plan, _ in plans})
    assert {contender.multiprocessors(plan) for _, plan, _ in plans} == ({"8", "24"} if times == 2 else {"-"})


def test_skewed_experts_follow_the_zipf_law() -> None:
    """With one expert a token the n-th most popular of 4 gets a share of (1/n) / (1 + 1/2 + 1/3 + 1/4)."""
    shape = Shape(tokens=40_000, hidden=32, experts=4, top_k=1, routing="skewed")
    shares = [torch.bincount(draw_experts(shape, rank, 0, 3, 1.0).flatten(), minlength=4) / 40_000 for rank in range(2)]
    assert shares[0].argmax() == shares[1].argmax()
    expected = torch.tensor([12, 6, 4, 3]) / 25
    assert torch.allclose(shares[0].sort(descending=True).values, expected, atol=0.01)
    uniform = draw_experts(Shape(40_000, 32, 4, 1, "uniform"), 0, 0, 3, 1.0)
    assert torch.allclose(torch.bincount(uniform.flatten()) / 40_000, torch.full((4,), 0.25), atol=0.01)


def test_wire_bytes_equal_a_hand_count() -> None:
    # Four experts, two a rank. Rank 0 has three tokens; what crosses is written beside them.
    idx = torch.tensor(
        [
            [[0, 1], [0, 2], [2, 3]],  # stays; one pair, one token; two pairs, one token
            [[2, 3], [3, 0], [2, 3]],  # stays; one pair, one token; stays
        ]
    )
    routing = RoutingSet(idx, 4)
    assert routing.crossing_pairs_PP().tolist() == [[0, 3], [1, 0]]
    assert routing.crossing_tokens_PP().tolist() == [[0, 2], [1, 0]]
    assert pair_bytes(routing, 10) == 30 and token_bytes(routing, 10) == 20
    # Rank 0's experts 0 and 1 have 2 + 1 + 1 = 4 of the 12 pairs.
    assert routing.imbalance() == pytest.approx(8 / 6)


def test_median_is_that_of_the_slowest_rank() -> None:
    assert median_of_slowest([[1.0, 9.0, 3.0], [2.0, 1.0, 4.0]]) == 4.0


@pytest.fixture(scope="module")
def works() -> list[Work]:
    """Both ranks' views of one input set; what they would fetch from each other is put in by hand."""
    works = [make_work(SHAPE, rank, 2, CPU, None, seed=1, skew=1.0) for rank in range(2)]
    for work in works:
        for name in ("tokens_TH", "grad_TH", "topk_weights_TK"):
            work._everybody[0, name] = torch.stack([getattr(other.items[0], name) for other in works])
    return works


def dense(works: list[Work], alignment: int = 16):
    idx = works[0].items[0].routing.idx_PTK.tolist()
    plan = reference.layouts(idx, SHAPE.experts, alignment)
    tokens = [work.items[0].tokens_TH for work in works]
    weights = [work.items[0].topk_weights_TK for work in works]
    return plan, tokens, weights


@pytest.mark.parametrize("mxfp8", [False, True])
def test_rows_of_the_independent_reference_pass(works: list[Work], mxfp8: bool) -> None:
    plan, tokens, weights = dense(works)
    rows, row_weights = reference.dispatch(plan, tokens, weights, "rceil" if mxfp8 else None)
    for rank, work in enumerate(works):
        right = (0, "dispatch", "mxfp8" if mxfp8 else "bf16")
        assert work.check_rows(*right, rows[rank], row_weights[rank], 16) is None
        tail = torch.cat([rows[rank], torch.zeros(16, SHAPE.hidden, dtype=torch.bfloat16)])
        assert work.check_rows(*right, tail, None, 16) is None


def test_wrong_rows_are_seen(works: list[Work]) -> None:
    plan, tokens, weights = dense(works)
    rows, row_weights = (each[0] for each in reference.dispatch(plan, tokens, weights))
    padding = plan[0].row_source.index(None)
    swapped, dirty, minus, nan = (rows.clone() for _ in range(4))
    swapped[[0, 1]] = rows[[1, 0]]
    dirty[padding, 3] = 1e-6
    minus[padding, 3] = -0.0
    nan[0, 0] = float("nan")
    for bad in (swapped, dirty, minus, nan, rows[:-16]):
        assert works[0].check_rows(0, "dispatch", "bf16", bad, row_weights, 16) is not None
    assert works[0].check_rows(0, "dispatch", "mxfp8", rows, row_weights, 16) is not None
    assert works[0].check_rows(0, "combine_backward", "bf16", rows, None, 16) is not None
    assert works[0].check_rows(0, "dispatch", "bf16", rows, row_weights, 8) is not None
    row_weights[0] += 1e-6
    assert "weights" in works[0].check_rows(0, "dispatch", "bf16", rows, row_weights, 16)


def test_sums_of_the_independent_reference_pass_and_wrong_ones_are_seen(works: list[Work]) -> None:
    plan, tokens, weights = dense(works)
    rows, _ = reference.dispatch(plan, tokens, weights)
    outputs = []
    for rank, layout in enumerate(plan):
        bounds = torch.tensor(layout.expert_offsets[1:])
        expert = torch.searchsorted(bounds, torch.arange(len(rows[rank])), right=True) + rank * 4
        outputs.append(expert_output(rows[rank], expert))
    sums = reference.combine(plan, outputs, weights, apply_weights=False)
    for rank, work in enumerate(works):
        assert work.check_sums(0, sums[rank], weights[rank], exact=True) is None
        # In another order, and rounded to bf16 after every addition: allowed only where the sums are not exact.
        loose = (sums[rank].float() * (1 + 2.0**-8)).to(torch.bfloat16)
        assert work.check_sums(0, loose, None, exact=False) is None
        assert work.check_sums(0, loose, None, exact=True) is not None
        lost = sums[rank].clone()
        lost[7] -= outputs[0][0]
        assert "1 of 40 sums" in work.check_sums(0, lost, None, exact=False)
        assert "nan" not in str(work.check_sums(0, sums[rank] * float("nan"), None, exact=False))
        assert work.check_sums(0, sums[rank] * float("nan"), None, exact=False) is not None
        assert "gradients" in work.check_sums(0, sums[rank], weights[rank] + 1e-6, exact=True)


def test_sets_differ_but_share_the_popular_experts() -> None:
    sets = draw_sets(Shape(4000, 32, 8, 2, "skewed"), 2, 2, seed=0, skew=1.5)
    counts = [torch.bincount(each.idx_PTK.flatten(), minlength=8) for each in sets]
    assert not torch.equal(sets[0].idx_PTK, sets[1].idx_PTK)
    assert counts[0].topk(2).indices.tolist() == counts[1].topk(2).indices.tolist()
