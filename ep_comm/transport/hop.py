"""The tables of one all-to-all, and of the rank where the rows end up.

A *hop* takes token rows from a rank to some of ``D`` destinations, in equal or exact splits, and back along the
same way. The collective transport makes one hop, the hierarchical one makes two. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..rows import SumTable, count_along, invert_table, place_in_rows

__all__ = ["Hop", "ReceiveTables"]


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
            counts_D: int64, ``send_splits`` on the device.
            send_splits, recv_splits: rows to and from every destination.
        """
        base_D = counts_D.cumsum(0) - counts_D
        return cls._place(needs_TD, counts_D, base_D, send_splits, recv_splits, sum(send_splits), sum(recv_splits))

    @classmethod
    def fixed(cls, needs_TD: Tensor, rows: int) -> Hop:
        """Every destination gets ``rows`` rows; items beyond them do not travel."""
        ranks = needs_TD.shape[1]
        base_D = torch.arange(ranks, device=needs_TD.device) * rows
        return cls._place(needs_TD, rows, base_D, None, None, ranks * rows, ranks * rows)

    @classmethod
    def _place(
        cls,
        needs_TD: Tensor,
        most: Tensor | int,
        base_D: Tensor,
        send_splits: list[int] | None,
        recv_splits: list[int] | None,
        num_sent: int,
        num_received: int,
    ) -> Hop:
        order_TD = count_along(needs_TD) - 1
        position_TD = torch.where(needs_TD & (order_TD < most), base_D + order_TD, -1)
        return cls(
            send_splits=send_splits,
            recv_splits=recv_splits,
            num_sent=num_sent,
            num_received=num_received,
            position_TD=position_TD,
            tokens_S=invert_table(position_TD, num_sent, missing=0),
            sums=SumTable.build(position_TD, num_sent),
        )

    def within(self, ranks: Sequence[int], group_size: int) -> Hop:
        """The same hop among ``ranks`` (ascending, one a destination) of a larger group: the others get nothing."""
        equal = self.num_sent // len(ranks)

        def spread(splits: list[int] | None) -> list[int]:
            by_rank = dict(zip(ranks, splits or [equal] * len(ranks), strict=True))
            return [by_rank.get(rank, 0) for rank in range(group_size)]

        return replace(self, send_splits=spread(self.send_splits), recv_splits=spread(self.recv_splits))

    def slots_at(self, slot_places_TK: Tensor, *values_TK: Tensor) -> list[Tensor]:
        """For every position of the send buffer, the values of those slots that its destination owns, ``[S, K]``.

        Args:
            slot_places_TK: destination that owns the slot, -1 for none.
            values_TK: one value a slot; -1 in the result where the destination does not own the slot.
        """
        num_items, top_k = slot_places_TK.shape
        if num_items == 0:
            return [self.tokens_S.new_full((self.num_sent, top_k), -1) for _ in values_TK]
        places_TD = torch.arange(self.position_TD.shape[1], device=self.tokens_S.device).expand_as(self.position_TD)
        # Positions without an item match no slot: slots without an owner have place -1.
        target_S = place_in_rows(places_TD, self.position_TD, self.num_sent, missing=-2)
        here_SK = slot_places_TK.index_select(0, self.tokens_S) == target_S.unsqueeze(1)
        return [torch.where(here_SK, v_TK.index_select(0, self.tokens_S), -1) for v_TK in values_TK]

    def slot_scalars(self, slot_places_TK: Tensor, slot_rows_TK: Tensor, returned_SK: Tensor) -> Tensor:
        """Bring the scalar of every (item, slot) back from the destination that owns the slot, ``[T, K]``.

        Slots without a row (-1 in ``slot_rows_TK``) get zero.
        """
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
    def build(cls, rows_NK: Tensor, num_rows: int) -> ReceiveTables:
        """From the rows as they arrived, any integer dtype."""
        # Whatever arrives must not address memory outside the buffer.
        rows_NK = rows_NK.long().clamp(-1, num_rows - 1)
        return cls(
            rows_NK=rows_NK,
            source_R=invert_table(rows_NK, num_rows, missing=rows_NK.shape[0]),
            sums=SumTable.build(rows_NK, num_rows),
        )
