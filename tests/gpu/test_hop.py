"""The tables of an all-to-all by kernels: the tests of the torch version, and its results at larger sizes."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ep_comm.rows import pick_from_rows
from ep_comm.transport.hop import Hop, place_items, receive_rows
from tests import test_hop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
    pytest.mark.timeout(120),
]


@pytest.mark.parametrize(("items", "places", "top_k"), test_hop.SHAPES)
def test_sending(items: int, places: int, top_k: int) -> None:
    test_hop.check_sending(items, places, top_k, "cuda")


def test_receiving() -> None:
    test_hop.check_receiving("cuda")


@pytest.mark.parametrize(("items", "places"), [(31, 2), (8192, 8), (8193, 3), (40000, 64), (131072, 2)])
@pytest.mark.parametrize("counted", [torch.int32, torch.int64, None], ids=str)
def test_positions(items: int, places: int, counted: torch.dtype | None) -> None:
    make = torch.Generator().manual_seed(items)
    room = torch.zeros(items, places + 3, dtype=torch.bool)
    needs = room[:, 1 : 1 + places].copy_(
        torch.rand(items, places, generator=make) < torch.rand(places, generator=make)
    )
    counts = None if counted is None else needs.sum(0).to(counted)
    rows = items // 3
    sent = rows * places if counts is None else int(counts.sum())
    want = place_items(needs, counts, rows, sent)
    got = place_items(room.cuda()[:, 1 : 1 + places], None if counts is None else counts.cuda(), rows, sent)
    for here, there in zip(got, want, strict=True):
        assert here.dtype == there.dtype and torch.equal(here.cpu(), there)


def test_counts_that_do_not_fit_address_nothing() -> None:
    """Positions beyond the buffer, negative and huge counts: no item stands there, and every position has an item."""
    needs = torch.ones(100, 3, dtype=torch.bool, device="cuda")
    for counts in ([200, 100, 100], [-5, 100, 7], [2**40, 1, 1], [0, 0, 0]):
        position, tokens = place_items(needs, torch.tensor(counts, device="cuda"), 0, 150)
        assert position.max() < 150 and position.min() >= -1
        if min(counts) >= 0:
            assert tokens.min() >= 0 and tokens.max() < 100


def test_many_rows() -> None:
    make = torch.Generator().manual_seed(1)
    items, places, top_k = 5000, 8, 8
    needs, slot_places, slot_rows = test_hop.needs_and_slots(items, places, top_k)
    results = {}
    for device in ("cpu", "cuda"):
        hop = Hop.fixed(needs.to(device), 3000)
        out = torch.empty(hop.num_sent, top_k + 4, dtype=torch.int32, device=device)[:, 2 : 2 + top_k]
        hop.write_slots(slot_places.to(device), slot_rows.to(device), out)
        returned = torch.arange(hop.num_sent * top_k, dtype=torch.float32).view(-1, top_k)
        results[device] = out, hop.slot_scalars(slot_places.to(device), slot_rows.to(device), returned.to(device))
    wire = torch.where(
        torch.rand(5000, 8, generator=make) < 0.5, torch.randperm(40000, generator=make).view(5000, 8), -1
    )
    scalars = torch.rand(5000, 8, generator=make)
    for device, values in results.items():
        tables = receive_rows(wire.int().to(device), 41000, scalars.to(device))
        picked = torch.zeros(5000, 12, device=device)[:, 2:10]
        pick_from_rows(tables[2], tables[0], picked)
        results[device] = *values, *tables, picked
    for here, there in zip(results["cuda"], results["cpu"], strict=True):
        assert here.dtype == there.dtype and torch.equal(here.cpu(), there)
    assert torch.equal(results["cpu"][-1], scalars.masked_fill(wire < 0, 0.0))


def test_launches_from_other_threads() -> None:
    """A thread that has not used the GPU yet, and several at once."""
    needs = torch.rand(5000, 8, device="cuda") < 0.5
    want = place_items(needs, None, 3000, 24000)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: [place_items(needs, None, 3000, 24000) for _ in range(50)], range(4)))
    torch.cuda.synchronize()
    for position, tokens in itertools.chain(*results):
        assert torch.equal(position, want[0]) and torch.equal(tokens, want[1])
