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
from ..gloo import end_well_with
from ..mxfp8 import MXFP8Tensor
from ..plan import CountedPlan, Sizing
from ..rows import pick_from_rows, place_in_rows, sum_rows, take_rows
from .base import Route, RowFormat, Transport
from .hop import Hop, ReceiveTables
from .wire import WireBuffers, WireLayout, wire_layout

__all__ = ["CollectiveTransport"]

# Newer PyTorch renamed the function and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class CollectiveRoute(Route):
    """Send positions of this rank's tokens; receive tables after the first scatter."""

    plan: CountedPlan
    sizing: Sizing
    hop: Hop
    """From this rank to the ranks of the group."""
    slot_places_TK: Tensor
    """int64: destination of the hop that owns the slot, -1 for none."""
    slot_rows_TK: Tensor
    """int64: row of the slot on its rank, -1 for none."""
    receive: ReceiveTables | None = None


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
        end_well_with(group)
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
        if sizing.pair_tokens is not None:
            send_splits = sizing.pair_tokens[self._rank]
            recv_splits = [row[self._rank] for row in sizing.pair_tokens]
            hop = Hop.exact(plan.needs_TP, plan.pair_tokens_PP[self._rank], send_splits, recv_splits)
        else:
            hop = Hop.fixed(plan.needs_TP, sizing.pair_rows)
        return CollectiveRoute(plan, sizing, hop, plan.slot_rank_TK, plan.slot_rows_TK)

    def scatter_rows(
        self,
        route: CollectiveRoute,
        rows_TH: Tensor,
        scalars_TK: Tensor | None,
        row_format: RowFormat,
        operation: str,
    ) -> tuple[Tensor | MXFP8Tensor, Tensor | None]:
        first = route.receive is None
        wire = self._wire(rows_TH.shape[1], route.plan.top_k, row_format, scalars=scalars_TK is not None, tables=first)
        received_NW = self._send(route, rows_TH, scalars_TK, wire, operation)
        scalars_R = None
        arrived_NK = None if scalars_TK is None else wire.scalar_view(received_NW[:-1])
        if first:
            wire_NK = wire.row_view(received_NW[:-1])
            route.receive, scalars_R = ReceiveTables.build(wire_NK, route.sizing.rows, arrived_NK)
        elif arrived_NK is not None:
            scalars_R = place_in_rows(arrived_NK, route.receive.rows_NK, route.sizing.rows, missing=0.0)
        # The row behind the received ones is zero: padding and tail copy it.
        return _take(wire.unpack(received_NW), route.receive.source_R), scalars_R

    def gather_sum(
        self,
        route: CollectiveRoute,
        rows_RH: Tensor,
        weights_R: Tensor | None,
        scalars_R: Tensor | None,
        operation: str,
    ) -> tuple[Tensor, Tensor | None]:
        plan, receive = route.plan, route.receive
        hidden_size, dtype, device = rows_RH.shape[1], rows_RH.dtype, rows_RH.device
        partial_format = RowFormat(self._partial_dtype(dtype))
        wire = wire_layout(hidden_size, plan.top_k, partial_format, scalars=scalars_R is not None)
        partial_NW = self._buffers.take("sent", receive.rows_NK.shape[0], wire.row_bytes, device)
        sum_rows(rows_RH, receive.sums, weights_R, wire.payload(partial_NW))
        if scalars_R is not None:
            pick_from_rows(scalars_R, receive.rows_NK, wire.scalar_view(partial_NW))
        returned_SW, wire = self._bring_back(route, partial_NW, wire, dtype, operation)
        out_TH = torch.empty(plan.num_tokens, hidden_size, dtype=dtype, device=device)
        sum_rows(wire.payload(returned_SW), route.hop.sums, None, out_TH)
        scalars_TK = None
        if scalars_R is not None:
            returned_SK = wire.scalar_view(returned_SW)
            scalars_TK = route.hop.slot_scalars(route.slot_places_TK, route.slot_rows_TK, returned_SK)
        return out_TH, scalars_TK

    def wire_row_bytes(
        self, hidden_size: int, top_k: int, row_format: RowFormat, *, scalars: bool, tables: bool
    ) -> int:
        return self._wire(hidden_size, top_k, row_format, scalars=scalars, tables=tables).row_bytes

    # -- what a transport with another way between the same ends replaces ------------------------------

    def _wire(self, hidden_size: int, top_k: int, row_format: RowFormat, *, scalars: bool, tables: bool) -> WireLayout:
        """Wire row of a scatter; ``tables``: the receiving half of the tables travels along."""
        return wire_layout(hidden_size, top_k, row_format, scalars=scalars, rows=tables)

    def _partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """To what the sums of one rank are rounded, for rows of ``dtype``."""
        return dtype

    def _send(
        self, route: CollectiveRoute, rows_TH: Tensor, scalars_TK: Tensor | None, wire: WireLayout, operation: str
    ) -> Tensor:
        """Take token rows to the ranks of their experts, with the tables if ``wire`` has room for them.

        Returns:
            the received rows and one zero row, ``[N + 1, W]``.
        """
        sent_SW = self._pack(route, rows_TH, scalars_TK, wire)
        return self._all_to_all(sent_SW, route.hop, operation, zero_row=True)

    def _bring_back(
        self, route: CollectiveRoute, partial_NW: Tensor, wire: WireLayout, dtype: torch.dtype, operation: str
    ) -> tuple[Tensor, WireLayout]:
        """Take the sums of one rank back towards the tokens' owners.

        Returns:
            what came back, ``[S, W]``, one row for each of the positions that were sent from, and its layout, with
            a payload of ``dtype``.
        """
        return self._all_to_all(partial_NW, route.hop, operation, reverse=True), wire

    # -- shared with it ---------------------------------------------------------------------------------

    def _pack(self, route: CollectiveRoute, rows_TH: Tensor, scalars_TK: Tensor | None, wire: WireLayout) -> Tensor:
        """The send buffer of the first hop, ``[S, W]``: payload, scalars and, if ``wire`` has room for them, rows."""
        hop, row_bytes, device = route.hop, wire.row_bytes, rows_TH.device
        sent_SW = self._buffers.take("sent", hop.num_sent, row_bytes, device)
        if len(rows_TH) == 0:
            sent_SW.zero_()
        elif wire.row_format.mxfp8:
            # Quantised once for each token, not once for each destination.
            tokens_TW = self._buffers.take("tokens", len(rows_TH), row_bytes, device)
            wire.pack(rows_TH, tokens_TW)
            take_rows(tokens_TW, hop.tokens_S, sent_SW)
        else:
            take_rows(rows_TH.to(wire.row_format.dtype), hop.tokens_S, wire.payload(sent_SW))
        out_scalars_SK = None if scalars_TK is None else wire.scalar_view(sent_SW)
        if wire.rows:
            rows_SK = wire.row_view(sent_SW)
            hop.write_slots(route.slot_places_TK, route.slot_rows_TK, rows_SK, scalars_TK, out_scalars_SK)
        elif scalars_TK is not None and len(rows_TH):
            take_rows(scalars_TK, hop.tokens_S, out_scalars_SK)
        return sent_SW

    def _all_to_all(
        self, rows_XW: Tensor, hop: Hop, operation: str, *, reverse: bool = False, zero_row: bool = False
    ) -> Tensor:
        """Exchange rows along the hop, or back along it; ``zero_row``: one of zeros follows the received ones."""
        out_splits, in_splits = hop.recv_splits, hop.send_splits
        count = hop.num_received
        if reverse:
            out_splits, in_splits, count = in_splits, out_splits, hop.num_sent
        out_XW = self._buffers.take("received", count + zero_row, rows_XW.shape[1], rows_XW.device)
        if zero_row:
            out_XW[count].zero_()
        if self._ep_size == 1:
            out_XW[:count].copy_(rows_XW)
            return out_XW
        arriving_XW = out_XW[:count] if zero_row else out_XW
        with self._naming(operation):
            dist.all_to_all_single(arriving_XW, rows_XW, out_splits, in_splits, group=self._group)
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


def _take(rows: Tensor | MXFP8Tensor, index_R: Tensor) -> Tensor | MXFP8Tensor:
    if isinstance(rows, MXFP8Tensor):
        return MXFP8Tensor(*(take_rows(part, index_R) for part in rows))
    return take_rows(rows, index_R)
