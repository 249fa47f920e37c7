"""The tables of one all-to-all, and of the rank where the rows end up.

A *hop* takes token rows from a rank to some of ``D`` destinations, in equal or exact splits, and back along the
same way. The collective transport makes one hop, the hierarchical one makes two. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..cuda.kernels import cuda_kernels
from ..rows import SumTable, count_along, invert_table, place_in_rows

__all__ = ["Hop", "ReceiveTables", "place_items", "receive_rows"]


@dataclass(frozen=True)
class Hop:
    """Where the rows of this rank's items (tokens) stand in the send buffer. Made by :meth:`exact` or :meth:`fixed`."""

    send_splits: list[int] | None
    """Rows to every rank of the group; None where all splits are equal."""
    recv_splits: list[int] | None
    num_sent: int
    num_received: int
    position_TD: Tensor
    """int64: position of the item in the send buffer, -1 where it does not go to the destination."""
    tokens_S: Tensor
    """int64: item at each position of the send buffer; unused positions repeat item 0."""
    sums: SumTable
    """What came back for each item, destinations ascending."""

    @classmethod
    def exact(cls, needs_TD: Tensor, counts_D: Tensor, send_splits: list[int], recv_splits: list[int]) -> Hop:
        """Every destination gets what it needs.

        Args:
            needs_TD: bool, whether the item goes to the destination.
            counts_D: int32 or int64, ``send_splits`` on the device.
            send_splits, recv_splits: rows to and from every destination.
        """
        tables = place_items(needs_TD, counts_D, 0, sum(send_splits))
        return cls._of(tables, send_splits, recv_splits, sum(recv_splits))

    @classmethod
    def fixed(cls, needs_TD: Tensor, rows: int) -> Hop:
        """Every destination gets ``rows`` rows; items beyond them do not travel."""
        num_rows = needs_TD.shape[1] * rows
        return cls._of(place_items(needs_TD, None, rows, num_rows), None, None, num_rows)

    @classmethod
    def _of(
        cls,
        tables: tuple[Tensor, Tensor],
        send_splits: list[int] | None,
        recv_splits: list[int] | None,
        num_received: int,
    ) -> Hop:
        position_TD, tokens_S = tables
        num_sent = tokens_S.shape[0]
        return cls(
            send_splits=send_splits,
            recv_splits=recv_splits,
            num_sent=num_sent,
            num_received=num_received,
            position_TD=position_TD,
            tokens_S=tokens_S,
            sums=SumTable.build(position_TD, num_sent),
        )

    def within(self, ranks: Sequence[int], group_size: int) -> Hop:
        """The same hop among ``ranks`` (ascending, one a destination) of a larger group: the others get nothing."""
        equal = self.num_sent // len(ranks)

        def spread(splits: list[int] | None) -> list[int]:
            by_rank = dict(zip(ranks, splits or [equal] * len(ranks), strict=True))
            return [by_rank.get(rank, 0) for rank in range(group_size)]

        return replace(self, send_splits=spread(self.send_splits), recv_splits=spread(self.recv_splits))

    def write_slots(
        self,
        slot_places_TK: Tensor,
        values_TK: Tensor,
        out_SK: Tensor,
        scalars_TK: Tensor | None = None,
        out_scalars_SK: Tensor | None = None,
    ) -> None:
        """Give every position of the send buffer the values of those slots that its destination owns.

        Args:
            slot_places_TK: int64, destination that owns the slot, -1 for none.
            values_TK: int64, one value a slot.
            out_SK: int32 or int16, rows at any distance; -1 where the destination does not own the slot.
            scalars_TK: fp32; every position gets those of all slots of its item.
            out_scalars_SK: fp32, for them, in the rows of ``out_SK``'s buffer.
        """
        kernels = cuda_kernels(self.tokens_S.device)
        if kernels is not None:
            from ..cuda import hops

            return hops.write_slots(
                kernels, self.tokens_S, self.position_TD, slot_places_TK, values_TK, out_SK, scalars_TK, out_scalars_SK
            )
        if len(slot_places_TK) == 0:
            out_SK.fill_(-1)
            return None
        # A position without an item holds item 0, which stands elsewhere.
        position_TK = self.position_TD.gather(1, slot_places_TK.clamp_min(0)).masked_fill(slot_places_TK < 0, -1)
        position_S = torch.arange(self.num_sent, device=self.tokens_S.device)
        here_SK = position_TK.index_select(0, self.tokens_S) == position_S.unsqueeze(1)
        out_SK.copy_(torch.where(here_SK, values_TK.index_select(0, self.tokens_S), -1))
        if scalars_TK is not None:
            out_scalars_SK.copy_(scalars_TK.index_select(0, self.tokens_S))

    def slot_scalars(self, slot_places_TK: Tensor, slot_rows_TK: Tensor, returned_SK: Tensor) -> Tensor:
        """Bring the scalar of every (item, slot) back from the destination that owns the slot, ``[T, K]``.

        Slots without a row (-1 in ``slot_rows_TK``) get zero.
        """
        kernels = cuda_kernels(returned_SK.device)
        if kernels is not None:
            from ..cuda import hops

            return hops.slot_scalars(kernels, returned_SK, self.position_TD, slot_places_TK, slot_rows_TK)
        if returned_SK.numel() == 0:
            return returned_SK.new_zeros(slot_places_TK.shape)
        position_TK = self.position_TD.gather(1, slot_places_TK.clamp_min(0))
        slot_K = torch.arange(slot_places_TK.shape[1], device=position_TK.device)
        picked_TK = returned_SK[position_TK.clamp_min(0), slot_K]
        return torch.where((position_TK >= 0) & (slot_rows_TK >= 0), picked_TK, 0)


@dataclass(frozen=True)
class ReceiveTables:
    """Where the received token rows belong among this rank's expert rows."""

    rows_NK: Tensor
    """int64: rows of every received token, -1 where the slot is not on this rank."""
    source_R: Tensor
    """int64: received token of every row, N (a zero row) for padding and tail."""
    sums: SumTable

    @classmethod
    def build(cls, wire_NK: Tensor, num_rows: int, scalars_NK: Tensor | None) -> tuple[ReceiveTables, Tensor | None]:
        """From the rows and scalars as they arrived; also the scalar of every row. See :func:`receive_rows`."""
        rows_NK, source_R, scalars_R = receive_rows(wire_NK, num_rows, scalars_NK)
        return cls(rows_NK, source_R, SumTable.build(rows_NK, num_rows)), scalars_R


def place_items(needs_TD: Tensor, counts_D: Tensor | None, rows: int, num_sent: int) -> tuple[Tensor, Tensor]:
    """Positions of items in a send buffer that is ordered by destination, then by item.

    Args:
        needs_TD: bool, whether the item goes to the destination.
        counts_D: int32 or int64, positions of every destination; None gives each of them ``rows``.
        num_sent: S, positions of all destinations.

    Returns:
        int64 ``[T, D]``: position of the item, -1 where it does not go there or has no room; int64 ``[S]``: item of
        every position, 0 where there is none.
    """
    kernels = cuda_kernels(needs_TD.device)
    if kernels is not None:
        from ..cuda import hops

        return hops.place_items(kernels, needs_TD, counts_D, rows, num_sent)
    if counts_D is None:
        room_D: Tensor | int = rows
        base_D = torch.arange(needs_TD.shape[1], device=needs_TD.device) * rows
    else:
        room_D = counts_D.long()
        base_D = room_D.cumsum(0) - room_D
    order_TD = count_along(needs_TD) - 1
    position_TD = torch.where(needs_TD & (order_TD < room_D), base_D + order_TD, -1)
    return position_TD, invert_table(position_TD, num_sent, missing=0)


def receive_rows(wire_NK: Tensor, num_rows: int, scalars_NK: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tables of a receiver, from the rows that its senders told it.

    Args:
        wire_NK: int32, row of every slot as it arrived, -1 for none; rows at any distance. Whatever it says, no table
            addresses memory outside the ``num_rows`` rows.
        scalars_NK: fp32, one scalar a slot, rows at any distance, or None.

    Returns:
        int64 ``[N, K]`` rows; int64 ``[R]`` received token of every row, N where there is none; fp32 ``[R]`` scalar of
        every row, zero where there is none, or None.
    """
    kernels = cuda_kernels(wire_NK.device)
    if kernels is not None:
        from ..cuda import hops

        return hops.receive_rows(kernels, wire_NK, num_rows, scalars_NK)
    rows_NK = wire_NK.long().clamp(-1, num_rows - 1)
    source_R = invert_table(rows_NK, num_rows, missing=rows_NK.shape[0])
    return rows_NK, source_R, None if scalars_NK is None else place_in_rows(scalars_NK, rows_NK, num_rows, missing=0.0)
