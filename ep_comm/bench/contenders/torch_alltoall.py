"""A dispatcher in plain torch, as users write it: sort by expert, exchange counts, all-to-all, sort again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..options import DIRECTIONS
from ..routing import RoutingSet
from ..work import Item, expert_output
from .base import Contender, Place, Plan, Session, pair_bytes

__all__ = ["TorchAllToAll"]


class TorchAllToAll(Contender):
    """One row for each (token, expert) pair over ``all_to_all_single``; sums with ``index_add_`` in FP32."""

    name = "torch all-to-all"
    origin = "plain torch: argsort, counts, .tolist(), all_to_all_single of (token, expert) rows, re-sort"
    directions = DIRECTIONS

    def problem(self, place: Place) -> str | None:
        return "one rank sends nothing to others" if place.ep_size == 1 else None

    def open(self, plan: Plan) -> Session:
        return _TorchSession(plan, self.place)


@dataclass
class _Route:
    """What a dispatch leaves for the other directions."""

    pair_S: Tensor
    """Flat (token, slot) of every sent row."""
    token_S: Tensor
    send_splits: list[int]
    recv_splits: list[int]
    order_R: Tensor
    """Received row that stands at each place of the experts' rows."""
    expert_R: Tensor
    """Local expert of each of the experts' rows."""


class _TorchSession(Session):
    def __init__(self, plan: Plan, place: Place) -> None:
        self._shape, self._place = plan.shape, place
        self._local = plan.shape.experts // place.ep_size

    def wire_bytes(self, direction: str, routing: RoutingSet) -> int:
        row = self._shape.hidden * torch.bfloat16.itemsize
        return pair_bytes(routing, row + (4 if direction.startswith("dispatch") else 0))

    def operation(self, direction: str, item: Item) -> Callable[[], tuple[Any, Tensor | None]]:
        if direction == "dispatch":
            return lambda: self._dispatch(item)[:2]
        rows_RH, weights_R, route = self._dispatch(item)
        if direction == "combine_backward":
            return lambda: (self._to_experts(item.grad_TH[route.token_S], route), None)
        output_RH = expert_output(rows_RH, route.expert_R + self._place.rank * self._local)
        if direction == "combine":
            return lambda: (self._sum(output_RH, route), None)
        return lambda: (self._sum(output_RH, route), self._to_slots(weights_R, route))

    def _dispatch(self, item: Item) -> tuple[Tensor, Tensor, _Route]:
        place, experts, top_k = self._place, self._shape.experts, self._shape.top_k
        flat_S = item.topk_idx_TK.flatten()
        pair_S = torch.argsort(flat_S, stable=True)
        counts_E = torch.bincount(flat_S, minlength=experts)
        counts_PL = torch.empty_like(counts_E)
        dist.all_to_all_single(counts_PL, counts_E, group=place.group)
        send_splits = counts_E.view(place.ep_size, -1).sum(1).tolist()
        recv_splits = counts_PL.view(place.ep_size, -1).sum(1).tolist()
        expert_R = torch.arange(experts, device=flat_S.device).remainder(self._local)
        expert_R = expert_R.repeat_interleave(counts_PL, output_size=sum(recv_splits))
        expert_R, order_R = torch.sort(expert_R, stable=True)
        route = _Route(pair_S, pair_S // top_k, send_splits, recv_splits, order_R, expert_R)
        rows_RH = self._to_experts(item.tokens_TH[route.token_S], route)
        weights_R = self._to_experts(item.topk_weights_TK.flatten()[pair_S], route)
        return rows_RH, weights_R, route

    def _to_experts(self, sent_SX: Tensor, route: _Route) -> Tensor:
        received_RX = sent_SX.new_empty(sum(route.recv_splits), *sent_SX.shape[1:])
        dist.all_to_all_single(received_RX, sent_SX, route.recv_splits, route.send_splits, group=self._place.group)
        return received_RX[route.order_R]

    def _to_owners(self, rows_RX: Tensor, route: _Route) -> Tensor:
        sent_RX = torch.empty_like(rows_RX)
        sent_RX[route.order_R] = rows_RX
        returned_SX = rows_RX.new_empty(sum(route.send_splits), *rows_RX.shape[1:])
        dist.all_to_all_single(returned_SX, sent_RX, route.send_splits, route.recv_splits, group=self._place.group)
        return returned_SX

    def _sum(self, rows_RH: Tensor, route: _Route) -> Tensor:
        returned_SH = self._to_owners(rows_RH, route)
        sums_TH = torch.zeros(self._shape.tokens, self._shape.hidden, device=rows_RH.device)
        return sums_TH.index_add_(0, route.token_S, returned_SH.float()).to(rows_RH.dtype)

    def _to_slots(self, scalars_R: Tensor, route: _Route) -> Tensor:
        returned_S = self._to_owners(scalars_R, route)
        scalars_S = torch.empty_like(returned_S)
        scalars_S[route.pair_S] = returned_S
        return scalars_S.view(self._shape.tokens, self._shape.top_k)
