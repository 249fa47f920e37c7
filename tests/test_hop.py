"""The tables of an all-to-all against loops: send positions, what travels with a row, where it ends up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ep_comm.transport.hop import Hop, place_items, receive_rows

SHAPES = [(0, 3, 2), (1, 1, 1), (7, 2, 4), (40, 5, 3)]
"""Items, destinations, slots."""


def needs_and_slots(items: int, places: int, top_k: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """``needs_TD``, and place and row of every slot: a destination that the item goes to, or -1."""
    make = torch.Generator().manual_seed(seed)
    slot_places = torch.randint(-1, places, (items, top_k), generator=make)
    slot_rows = torch.where(slot_places >= 0, torch.randint(0, 10**6, (items, top_k), generator=make), -1)
    needs = torch.zeros(items, places + 1, dtype=torch.bool).scatter_(1, slot_places % (places + 1), True)
    return needs[:, :places], slot_places, slot_rows


def positions_by_loops(needs: Tensor, rooms: list[int]) -> tuple[list[list[int]], list[int]]:
    """What :func:`place_items` returns, with so many positions for every destination."""
    position, tokens = [[-1] * needs.shape[1] for _ in range(needs.shape[0])], []
    for place, room in enumerate(rooms):
        going = [item for item in range(needs.shape[0]) if needs[item, place]][:room]
        for item in going:
            position[item][place] = len(tokens)
            tokens.append(item)
        tokens += [0] * (room - len(going))
    return position, tokens


def check_sending(items: int, places: int, top_k: int, device: str) -> None:
    """Exact and fixed hops, with room for all items and for some of them."""
    needs, slot_places, slot_rows = needs_and_slots(items, places, top_k)
    scalars = torch.rand(items, top_k)
    counts = needs.sum(0)
    for rows in (None, 0, items // 2, items + 3):
        rooms = counts.tolist() if rows is None else [rows] * places
        position, tokens = positions_by_loops(needs, rooms)
        if rows is None:
            hop = Hop.exact(needs.to(device), counts.int().to(device), rooms, [1] * places)
            assert (hop.num_sent, hop.num_received) == (sum(rooms), places)
        else:
            hop = Hop.fixed(needs.to(device), rows)
            assert hop.num_sent == hop.num_received == rows * places
        assert hop.position_TD.tolist() == position and hop.tokens_S.tolist() == tokens
        # Two tables and the scalars in the rows of one buffer, with something around them.
        buffer = torch.full((hop.num_sent, 64), 0x55, dtype=torch.uint8, device=device)
        rows_SK, scalars_SK = (
            buffer[:, : 4 * top_k].view(torch.int32),
            buffer[:, 16 : 16 + 4 * top_k].view(torch.float32),
        )
        places_SK = buffer[:, 32 : 32 + 2 * top_k].view(torch.int16)
        on = [t.to(device) for t in (slot_places, slot_rows, scalars)]
        hop.write_slots(on[0], on[1], rows_SK, on[2], scalars_SK)
        hop.write_slots(on[0], on[0], places_SK)
        for at, item in enumerate(tokens):
            owned = [
                k
                for k in range(top_k)
                if items and slot_places[item, k] >= 0 and position[item][slot_places[item, k]] == at
            ]
            assert rows_SK[at].tolist() == [slot_rows[item, k] if k in owned else -1 for k in range(top_k)]
            assert places_SK[at].tolist() == [slot_places[item, k] if k in owned else -1 for k in range(top_k)]
            assert not items or scalars_SK[at].tolist() == scalars[item].tolist()
        assert (buffer[:, 32 + 2 * top_k :] == 0x55).all()
        # Scalars come back from where their slots went to.
        returned = torch.rand(hop.num_sent, top_k + 2)[:, :top_k]
        back = hop.slot_scalars(on[0], on[1], returned.to(device))
        want = torch.zeros(items, top_k)
        for item in range(items):
            for k, place in enumerate(slot_places[item].tolist()):
                if place >= 0 and position[item][place] >= 0:
                    want[item, k] = returned[position[item][place], k]
        assert torch.equal(back.cpu(), want)


def check_receiving(device: str) -> None:
    """Rows by their numbers; numbers that do not exist address nothing."""
    wire = torch.full((5, 7), 9, dtype=torch.int32)[:, 1:4]
    wire.copy_(torch.tensor([[3, -1, 0], [-1, -1, -1], [5, 1, -1], [-7, -(2**31), -1], [-1, 2, -1]]))
    scalars = torch.arange(20.0).view(5, 4)[:, :3]
    for given in (None, scalars):
        rows, source, values = receive_rows(wire.to(device), 8, None if given is None else given.to(device))
        assert rows.dtype == source.dtype == torch.int64
        assert rows.tolist() == [[3, -1, 0], [-1] * 3, [5, 1, -1], [-1] * 3, [-1, 2, -1]]
        assert source.tolist() == [0, 2, 4, 0, 5, 2, 5, 5]
        assert values is None if given is None else values.tolist() == [2.0, 9.0, 17.0, 0.0, 0.0, 8.0, 0.0, 0.0]
    rows, source, _ = receive_rows(torch.tensor([[2**31 - 1, 3]], dtype=torch.int32, device=device), 4, None)
    assert rows.tolist() == [[3, 3]] and source.tolist() == [1, 1, 1, 0]
    rows, source, _ = receive_rows(torch.tensor([[2, -1]], dtype=torch.int32, device=device), 0, None)
    assert rows.tolist() == [[-1, -1]] and source.numel() == 0
    rows, source, _ = receive_rows(torch.empty(0, 2, dtype=torch.int32, device=device), 3, None)
    assert rows.shape == (0, 2) and source.tolist() == [0, 0, 0]


@pytest.mark.parametrize(("items", "places", "top_k"), SHAPES)
def test_sending(items: int, places: int, top_k: int) -> None:
    check_sending(items, places, top_k, "cpu")


def test_receiving() -> None:
    check_receiving("cpu")


def test_positions_of_rows_that_are_apart() -> None:
    needs, _, _ = needs_and_slots(30, 4, 2)
    apart = torch.zeros(30, 9, dtype=torch.bool)[:, 2:6].copy_(needs)
    for here, there in zip(place_items(apart, None, 5, 20), place_items(needs, None, 5, 20), strict=True):
        assert torch.equal(here, there)
