"""The collective transport: ``torch.distributed`` all-to-all, on NCCL or gloo, in any topology.

Where the sizing says what every pair moves, the splits are exact; otherwise every pair moves ``pair_rows`` rows,
so that nothing depends on a host value and the calls can be captured in a graph.
A token travels once per destination rank.

With one rank, or without a process group, the same code runs and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import PeerLostError
from ..mxfp8 import MXFP8Tensor
from ..plan import CountedPlan, Sizing
from ..rows import SumTable, invert_table, pick_from_rows, place_in_rows, sum_rows
from .base import Route, RowFormat, Transport
from .wire import WireBuffers, WireLayout

__all__ = ["CollectiveTransport"]

# Newer PyTorch renamed the function and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class _Receive:
    """The receiving half of a route, known once the first rows have arrived."""

    rows_NK: Tensor
    """int64: rows of every received token, -1 where the slot is not on this rank."""
    source_R: Tensor
    """int64: received token of every row, N (a zero row) for padding and tail."""
    sums: SumTable


@dataclass
class CollectiveRoute(Route):
    """Send positions of this rank's tokens; receive tables after the first scatter."""

    plan: CountedPlan
    sizing: Sizing
    send_splits: list[int] | None
    recv_splits: list[int] | None
    num_sent: int
    num_received: int
    position_TP: Tensor
    """int64: position of the token in the send buffer, -1 where it does not go to the rank."""
    tokens_S: Tensor
    """int64: token at each position of the send buffer; unused positions repeat token 0."""
    sums: SumTable
    receive: _Receive | None = None


class CollectiveTransport(Transport):
    """All-to-all over a process group.

    Args:
        group: the process group, or None for a single process.
        rank, ep_size: this rank's place in it.
    """

    uses_pair_rows = True

    def __init__(self, group: dist.ProcessGroup | None, rank: int, ep_size: int) -> None:
        self.name = "collective" if ep_size > 1 else "local"
        self._group = group
        self._buffers = _buffers_of(group)
        self._rank = rank
        self._ep_size = ep_size

    def exchange_counts(self, message: Tensor, operation: str) -> Tensor:
        if self._ep_size == 1:
            return message.unsqueeze(0)
        matrix_PX = message.new_empty(self._ep_size, message.numel())
        with self._naming(operation):
            _all_gather(matrix_PX.view(-1), message, group=self._group)
        return matrix_PX

    def open_route(self, plan: CountedPlan, sizing: Sizing) -> CollectiveRoute:
        ranks = self._ep_size
        device = plan.needs_TP.device
        order_TP = plan.needs_TP.long().cumsum(0) - 1
        sent_TP = plan.needs_TP
        if sizing.pair_tokens is not None:
            send_splits = sizing.pair_tokens[self._rank]
            recv_splits = [row[self._rank] for row in sizing.pair_tokens]
            num_sent, num_received = sum(send_splits), sum(recv_splits)
            sent_P = plan.pair_tokens_PP[self._rank].long()
            base_P = sent_P.cumsum(0) - sent_P
        else:
            send_splits = recv_splits = None
            num_sent = num_received = ranks * sizing.pair_rows
            sent_TP = sent_TP & (order_TP < sizing.pair_rows)
            base_P = torch.arange(ranks, device=device) * sizing.pair_rows
        position_TP = torch.where(sent_TP, base_P + order_TP, -1)
        return CollectiveRoute(
            plan=plan,
            sizing=sizing,
            send_splits=send_splits,
            recv_splits=recv_splits,
            num_sent=num_sent,
            num_received=num_received,
            position_TP=position_TP,
            tokens_S=invert_table(position_TP, num_sent, missing=0),
            sums=SumTable.build(position_TP, num_sent),
        )

    def scatter_rows(
        self,
        route: CollectiveRoute,
        rows_TH: Tensor,
        scalars_TK: Tensor | None,
        row_format: RowFormat,
        operation: str,
    ) -> tuple[Tensor | MXFP8Tensor, Tensor | None]:
        plan, device = route.plan, rows_TH.device
        first = route.receive is None
        wire = WireLayout(rows_TH.shape[1], plan.top_k, row_format, scalars=scalars_TK is not None, rows=first)
        # One spare row: positions without a token have something to point at when there are no tokens.
        tokens_TW = self._buffers.take("tokens", max(plan.num_tokens, 1), wire.row_bytes, device)
        if plan.num_tokens == 0:
            tokens_TW.zero_()
        else:
            wire.pack(rows_TH, tokens_TW)
            if scalars_TK is not None:
                wire.scalar_view(tokens_TW).copy_(scalars_TK)
        sent_SW = self._buffers.take("sent", route.num_sent, wire.row_bytes, device)
        torch.index_select(tokens_TW, 0, route.tokens_S, out=sent_SW)
        if first:
            wire.row_view(sent_SW).copy_(self._destination_rows(route))
        received_NW = self._all_to_all(sent_SW, route, wire, operation, reverse=False)
        if first:
            route.receive = self._receive_tables(route, wire.row_view(received_NW[: route.num_received]))
        # The row behind the received ones is zero: padding and tail copy it.
        rows = _take_rows(wire.unpack(received_NW), route.receive.source_R)
        scalars_R = None
        if scalars_TK is not None:
            received_NK = wire.scalar_view(received_NW[: route.num_received])
            scalars_R = place_in_rows(received_NK, route.receive.rows_NK, route.sizing.rows, missing=0.0)
        return rows, scalars_R

    def gather_sum(
        self,
        route: CollectiveRoute,
        rows_RH: Tensor,
        weights_R: Tensor | None,
        scalars_R: Tensor | None,
        operation: str,
    ) -> tuple[Tensor, Tensor | None]:
        plan, receive, device = route.plan, route.receive, rows_RH.device
        hidden_size = rows_RH.shape[1]
        wire = WireLayout(hidden_size, plan.top_k, RowFormat(rows_RH.dtype), scalars=scalars_R is not None)
        partial_NW = self._buffers.take("sent", route.num_received, wire.row_bytes, device)
        sum_rows(rows_RH, receive.sums, weights_R, wire.payload(partial_NW))
        if scalars_R is not None:
            wire.scalar_view(partial_NW).copy_(pick_from_rows(scalars_R, receive.rows_NK))
        returned_SW = self._all_to_all(partial_NW, route, wire, operation, reverse=True)[: route.num_sent]
        out_TH = torch.empty(plan.num_tokens, hidden_size, dtype=rows_RH.dtype, device=device)
        sum_rows(wire.payload(returned_SW), route.sums, None, out_TH)
        scalars_TK = None
        if scalars_R is not None:
            scalars_TK = self._slot_scalars(route, wire.scalar_view(returned_SW))
        return out_TH, scalars_TK

    def wire_row_bytes(
        self, hidden_size: int, top_k: int, row_format: RowFormat, *, scalars: bool, tables: bool
    ) -> int:
        return WireLayout(hidden_size, top_k, row_format, scalars=scalars, rows=tables).row_bytes

    def _destination_rows(self, route: CollectiveRoute) -> Tensor:
        """For every position of the send buffer the token's rows on the rank it goes to, ``[S, K]``."""
        plan = route.plan
        if plan.num_tokens == 0:
            return route.tokens_S.new_full((route.num_sent, plan.top_k), -1)
        ranks_TP = torch.arange(self._ep_size, device=route.tokens_S.device).expand_as(route.position_TP)
        # Positions without a token match no slot: slots without a row have rank -1.
        target_S = place_in_rows(ranks_TP, route.position_TP, route.num_sent, missing=-2)
        here_SK = plan.slot_rank_TK.index_select(0, route.tokens_S) == target_S.unsqueeze(1)
        return torch.where(here_SK, plan.slot_rows_TK.index_select(0, route.tokens_S), -1)

    def _receive_tables(self, route: CollectiveRoute, rows_NK: Tensor) -> _Receive:
        plan = route.plan
        # Whatever arrives must not address memory outside the buffer.
        rows_NK = rows_NK.long().clamp(-1, route.sizing.rows - 1)
        if route.sizing.pair_tokens is None:
            place_M = torch.arange(route.sizing.pair_rows, device=rows_NK.device)
            filled_PM = place_M < plan.pair_tokens_PP[:, self._rank].unsqueeze(1)
            rows_NK = torch.where(filled_PM.flatten().unsqueeze(1), rows_NK, -1)
        return _Receive(
            rows_NK=rows_NK,
            source_R=invert_table(rows_NK, route.sizing.rows, missing=route.num_received),
            sums=SumTable.build(rows_NK, route.sizing.rows),
        )

    def _slot_scalars(self, route: CollectiveRoute, returned_SK: Tensor) -> Tensor:
        """Bring the scalar of every (token, slot) home from the rank that has the slot's row."""
        plan = route.plan
        if returned_SK.numel() == 0:
            return returned_SK.new_zeros(plan.num_tokens, plan.top_k)
        position_TK = route.position_TP.gather(1, plan.slot_rank_TK.clamp_min(0))
        slot_K = torch.arange(plan.top_k, device=position_TK.device)
        picked_TK = returned_SK[position_TK.clamp_min(0), slot_K]
        return torch.where((position_TK >= 0) & (plan.slot_rows_TK >= 0), picked_TK, 0)

    def _all_to_all(
        self, rows_XW: Tensor, route: CollectiveRoute, wire: WireLayout, operation: str, *, reverse: bool
    ) -> Tensor:
        """Exchange rows along the route, or back along it; one zero row follows the received ones."""
        splits = (route.recv_splits, route.send_splits) if not reverse else (route.send_splits, route.recv_splits)
        count = route.num_sent if reverse else route.num_received
        out_XW = self._buffers.take("received", count + 1, wire.row_bytes, rows_XW.device)
        out_XW[count].zero_()
        if self._ep_size == 1:
            out_XW[:count].copy_(rows_XW)
            return out_XW
        with self._naming(operation):
            dist.all_to_all_single(out_XW[:count], rows_XW, splits[0], splits[1], group=self._group)
        return out_XW

    @contextmanager
    def _naming(self, operation: str) -> Iterator[None]:
        """Turn a backend's failure into an error that says what was going on."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise PeerLostError(
                f"rank {self._rank}: {operation} failed; a rank of the group died or did not arrive within the "
                f"process group's timeout: {reason}"
            ) from error


_shared_buffers: WeakValueDictionary[str, WireBuffers] = WeakValueDictionary()


def _buffers_of(group: dist.ProcessGroup | None) -> WireBuffers:
    """The buffers that all transports of a group share; they go with the last of them."""
    name = group.group_name if group is not None else ""
    buffers = _shared_buffers.get(name)
    if buffers is None:
        buffers = _shared_buffers[name] = WireBuffers()
    return buffers


def _take_rows(rows: Tensor | MXFP8Tensor, index_R: Tensor) -> Tensor | MXFP8Tensor:
    if isinstance(rows, MXFP8Tensor):
        # index_select has no fp8 kernel; bytes are bytes.
        data = rows.data.view(torch.uint8).index_select(0, index_R).view(rows.data.dtype)
        return MXFP8Tensor(data, rows.scales.index_select(0, index_R))
    return rows.index_select(0, index_R)
