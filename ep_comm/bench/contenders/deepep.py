"""DeepEP's intranode buffer, and in plain torch what it leaves to its caller: the expansion to expert rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..options import DIRECTIONS
from ..routing import RoutingSet
from ..work import Item, expert_output
from .base import Contender, Place, Plan, Session, import_problem, token_bytes

__all__ = ["DeepEP"]


class DeepEP(Contender):
    """``deep_ep.Buffer`` with its default configuration."""

    name = "DeepEP"
    origin = "DeepEP: Buffer, intranode, layout and notification included; expansion and local sums in plain torch"
    directions = DIRECTIONS

    def problem(self, place: Place) -> str | None:
        return import_problem("deep_ep", place)

    def start(self, place: Place) -> None:
        super().start(place)
        from deep_ep import Buffer

        row = max(place.options.hidden) * torch.bfloat16.itemsize
        configs = (Buffer.get_dispatch_config(place.ep_size), Buffer.get_combine_config(place.ep_size))
        size = max(config.get_nvl_buffer_size_hint(row, place.ep_size) for config in configs)
        self._buffer = Buffer(place.group, size, 0)
        self._sms = Buffer.num_sms

    def stop(self) -> None:
        self._buffer = None

    def open(self, plan: Plan) -> Session:
        return _DeepEPSession(plan, self.place, self._buffer)

    def multiprocessors(self, plan: Plan) -> str:
        return str(self._sms)


@dataclass
class _Route:
    handle: Any
    pair_R: Tensor
    """Flat (received token, slot) of every expert row."""
    token_R: Tensor
    expert_R: Tensor
    num_received: int


class _DeepEPSession(Session):
    def __init__(self, plan: Plan, place: Place, buffer: Any) -> None:
        self._shape, self._place, self._buffer = plan.shape, place, buffer
        self._local = plan.shape.experts // place.ep_size

    def wire_bytes(self, direction: str, routing: RoutingSet) -> int:
        tables = {"dispatch": 12, "dispatch_backward": 4}.get(direction, 0) * self._shape.top_k
        return token_bytes(routing, self._shape.hidden * torch.bfloat16.itemsize + tables)

    def operation(self, direction: str, item: Item) -> Callable[[], tuple[Any, Tensor | None]]:
        if direction == "dispatch":
            return lambda: self._dispatch(item)[:2]
        rows_RH, weights_R, route = self._dispatch(item)
        if direction == "combine_backward":
            return lambda: (self._buffer.dispatch(item.grad_TH, handle=route.handle)[0][route.token_R], None)
        output_RH = expert_output(rows_RH, route.expert_R + self._place.rank * self._local)
        if direction == "combine":
            return lambda: (self._buffer.combine(self._local_sums(output_RH, route), route.handle)[0], None)

        def dispatch_backward() -> tuple[Tensor, Tensor]:
            slots_NK = weights_R.new_zeros(route.num_received * self._shape.top_k)
            slots_NK[route.pair_R] = weights_R
            sums = self._local_sums(output_RH, route)
            back = self._buffer.combine(sums, route.handle, topk_weights=slots_NK.view(-1, self._shape.top_k))
            return back[0], back[1]

        return dispatch_backward

    def _dispatch(self, item: Item) -> tuple[Tensor, Tensor, _Route]:
        layout = self._buffer.get_dispatch_layout(item.topk_idx_TK, self._shape.experts)
        per_rank, _, per_expert, in_rank, _ = layout
        received_NH, idx_NK, weights_NK, counts, handle, _ = self._buffer.dispatch(
            item.tokens_TH,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=item.topk_idx_TK,
            topk_weights=item.topk_weights_TK,
        )
        key_S = torch.where(idx_NK >= 0, idx_NK, self._local).flatten()
        sorted_S = torch.sort(key_S, stable=True)
        rows = sum(counts)  # a list: the buffer has waited for the counts on the host
        pair_R = sorted_S.indices[:rows]
        token_R = pair_R // self._shape.top_k
        route = _Route(handle, pair_R, token_R, sorted_S.values[:rows], received_NH.shape[0])
        return received_NH[token_R], weights_NK.flatten()[pair_R], route

    def _local_sums(self, rows_RH: Tensor, route: _Route) -> Tensor:
        sums_NH = torch.zeros(route.num_received, self._shape.hidden, device=rows_RH.device)
        return sums_NH.index_add_(0, route.token_R, rows_RH.float()).to(rows_RH.dtype)
