"""The hierarchical transport: several ranks on each of several hosts, and the network crossed as little as can be.

A token crosses the network once per (token, destination host), not once per (token, destination rank). With two
hosts of two ranks, and a token of rank 0 that is wanted by both ranks of host 1:

        host 0                     host 1
    rank 0 ───── the rail ─────▶ rank 2 ──▶ itself      dispatch: one row on the network, two inside host 1
                                    └─────▶ rank 3
    rank 0 ◀──── the rail ────── rank 2 ◀── itself      combine: two FP32 sums inside host 1, added by rank 2,
                                    ▲────── rank 3                 one rounded row on the network

So there are two hops: along the *rail* (the ranks with the same place on every host), then inside the host. The
rank where they meet forwards for its rail. Rows travel as they are, MXFP8 included, and every rank receives the
very token rows that the collective transport brings it, so all that comes after is inherited from there.

Both hops are all-to-alls over the dispatcher's own process group in which the other ranks get nothing, so no further
groups or communicators are needed. What a hop moves follows from the counts that all ranks exchange anyway: inside
the host the tokens of each pair of ranks, on the rail the tokens for each host, which ride along with them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import EPConfig
from ..plan import CountedPlan, Sizing
from ..rows import count_along, sum_rows, take_rows
from .base import RowFormat
from .collective import CollectiveRoute, CollectiveTransport
from .hop import Hop
from .hosts import Hosts
from .wire import WireLayout, wire_layout

__all__ = ["HierarchicalTransport"]


@dataclass
class _Forwarding:
    """What the forwarding rank knows of the tokens that reached it on the rail."""

    hop: Hop
    """From here to the ranks of the host."""
    slot_places_NK: Tensor
    """int64: place of the rank that owns the slot, -1 where it is on another host or has no row."""
    slot_rows_NK: Tensor
    """int64: row of the slot on that rank."""


@dataclass
class HierarchicalRoute(CollectiveRoute):
    """``hop`` goes along the rail; a slot's place is the host of its rank."""

    slot_ranks_TK: Tensor | None = None
    """int64: place of the slot's rank on its host, -1 for none."""
    forward: _Forwarding | None = None


class HierarchicalTransport(CollectiveTransport):
    """All-to-all along the rail and inside the host.

    Args:
        config: the dispatcher's configuration.
        group: the process group.
        hosts: where its ranks run.
        rank, ep_size: this rank's place in the group.
    """

    def __init__(self, config: EPConfig, group: dist.ProcessGroup, hosts: Hosts, rank: int, ep_size: int) -> None:
        super().__init__(group, rank, ep_size)
        self.name = "hierarchical"
        self.hosts = hosts
        self._max_tokens = config.max_tokens_per_rank

    def open_route(self, plan: CountedPlan, sizing: Sizing) -> HierarchicalRoute:
        hosts, needs_TP = self.hosts, plan.needs_TP
        if sizing.pair_tokens is None:
            # What exceeds a pair's budget stays here, as on the collective transport: then no later hop can overflow.
            needs_TP = needs_TP & (count_along(needs_TP) <= sizing.pair_rows)
        needs_TG = hosts.needed(needs_TP)
        if sizing.pair_tokens is None:
            hop = Hop.fixed(needs_TG, min(self._max_tokens, hosts.ranks_per_host * sizing.pair_rows))
        else:
            recv_splits = [sizing.host_tokens[other][hosts.host] for other in hosts.rail]
            hop = Hop.exact(needs_TG, needs_TG.sum(0), sizing.host_tokens[self._rank], recv_splits)
        rank_TK = plan.slot_rank_TK.clamp_min(0)
        kept_TK = (plan.slot_rank_TK >= 0) & needs_TP.gather(1, rank_TK)
        return HierarchicalRoute(
            plan=plan,
            sizing=sizing,
            hop=hop.within(hosts.rail, self._ep_size),
            slot_places_TK=torch.where(kept_TK, hosts.host_P[rank_TK], -1),
            slot_rows_TK=torch.where(kept_TK, plan.slot_rows_TK, -1),
            slot_ranks_TK=torch.where(kept_TK, hosts.place_P[rank_TK], -1),
        )

    def _wire(self, hidden_size: int, top_k: int, row_format: RowFormat, *, scalars: bool, tables: bool) -> WireLayout:
        return wire_layout(hidden_size, top_k, row_format, scalars=scalars, rows=tables, places=tables)

    def _partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # Rounded once for each crossing, not once for each rank: inside a host the bytes are cheap.
        return torch.float32

    def _send(
        self, route: HierarchicalRoute, rows_TH: Tensor, scalars_TK: Tensor | None, wire: WireLayout, operation: str
    ) -> Tensor:
        sent_SW = self._pack(route, rows_TH, scalars_TK, wire)
        if wire.rows:
            route.hop.write_slots(route.slot_places_TK, route.slot_ranks_TK, wire.place_view(sent_SW))
        crossed_NW = self._all_to_all(sent_SW, route.hop, operation, zero_row=True)
        if wire.rows:
            route.forward = self._forwarding(route, wire, crossed_NW[:-1])
        forward = route.forward
        # The zero row behind the received ones is what positions without a token point at when there are none.
        forwarded_SW = self._buffers.take("sent", forward.hop.num_sent, wire.row_bytes, crossed_NW.device)
        take_rows(crossed_NW, forward.hop.tokens_S, forwarded_SW)
        if wire.rows:
            forward.hop.write_slots(forward.slot_places_NK, forward.slot_rows_NK, wire.row_view(forwarded_SW))
        return self._all_to_all(forwarded_SW, forward.hop, operation, zero_row=True)

    def _bring_back(
        self, route: HierarchicalRoute, partial_NW: Tensor, wire: WireLayout, dtype: torch.dtype, operation: str
    ) -> tuple[Tensor, WireLayout]:
        forward = route.forward
        inside_SW = self._all_to_all(partial_NW, forward.hop, operation, reverse=True)
        crossing = replace(wire, row_format=RowFormat(dtype))
        sums_NW = self._buffers.take("sent", route.hop.num_received, crossing.row_bytes, partial_NW.device)
        sum_rows(wire.payload(inside_SW), forward.hop.sums, None, crossing.payload(sums_NW))
        if wire.scalars:
            scalars_SK = wire.scalar_view(inside_SW)
            crossing.scalar_view(sums_NW).copy_(
                forward.hop.slot_scalars(forward.slot_places_NK, forward.slot_rows_NK, scalars_SK)
            )
        return self._all_to_all(sums_NW, route.hop, operation, reverse=True), crossing

    def _forwarding(self, route: HierarchicalRoute, wire: WireLayout, crossed_NW: Tensor) -> _Forwarding:
        """Derive from the tables that crossed with the rows which rank of the host gets which of them."""
        hosts, sizing = self.hosts, route.sizing
        num_ranks = hosts.ranks_per_host
        # Whatever arrives must not address memory outside the tables.
        places_NK = wire.place_view(crossed_NW).long().clamp(-1, num_ranks - 1)
        rows_NK = wire.row_view(crossed_NW).long()
        needs_NX = torch.zeros(len(places_NK), num_ranks + 1, dtype=torch.bool, device=places_NK.device)
        needs_NJ = needs_NX.scatter_(1, places_NK.remainder(num_ranks + 1), True)[:, :num_ranks]
        if sizing.pair_tokens is None:
            # Each source of the rail sends at most pair_rows to each rank of this host.
            hop = Hop.fixed(needs_NJ, hosts.num_hosts * sizing.pair_rows)
        else:
            mine, here = hosts.ranks_GJ[:, hosts.place], hosts.ranks_GJ[hosts.host]
            counts_J = route.plan.pair_tokens_PP.index_select(0, mine).index_select(1, here).sum(0)
            hop = Hop.exact(needs_NJ, counts_J, *self._host_splits(sizing.pair_tokens))
        return _Forwarding(hop.within(hosts.ranks[hosts.host], self._ep_size), places_NK, rows_NK)

    def _host_splits(self, pair_tokens: list[list[int]]) -> tuple[list[int], list[int]]:
        """Rows that this rank forwards to every rank of its host, and those that these forward to it."""
        hosts = self.hosts
        here = hosts.ranks[hosts.host]
        sent = [sum(pair_tokens[source][rank] for source in hosts.rail) for rank in here]
        rails = zip(*hosts.ranks, strict=True)
        return sent, [sum(pair_tokens[source][self._rank] for source in rail) for rail in rails]
