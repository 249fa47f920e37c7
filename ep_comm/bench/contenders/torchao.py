"""torchao's MXFP8 all-to-all: a quantised row for each (token, expert) pair; data and scales are two transfers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...mxfp8 import MXFP8Tensor
from ..routing import RoutingSet
from ..work import Item
from .base import Contender, Place, Plan, Session, import_problem, pair_bytes

__all__ = ["TorchAO"]

_MODULE = "torchao.prototype.moe_training.ep"
_SEGMENT = 32


class TorchAO(Contender):
    """``a2a_dispatch_mxfp8_fwd_hp_bwd``, ``permute_mxfp8_fwd_hp_bwd``, and the usual sort and exchange of counts."""

    name = "torchao MXFP8"
    origin = "torchao: sort, counts, .tolist(), MXFP8 all-to-all of (token, expert) rows, permute (and dequantise)"
    directions = ("dispatch",)
    dtypes = ("mxfp8", "mxfp8-kept")

    def problem(self, place: Place) -> str | None:
        return import_problem(_MODULE, place)

    def open(self, plan: Plan) -> Session:
        return _TorchAOSession(plan, self.place)


class _TorchAOSession(Session):
    alignment = _SEGMENT
    least_segment = _SEGMENT

    def __init__(self, plan: Plan, place: Place) -> None:
        from torchao.prototype.moe_training.ep import a2a_dispatch_mxfp8_fwd_hp_bwd, permute_mxfp8_fwd_hp_bwd

        self._send, self._permute = a2a_dispatch_mxfp8_fwd_hp_bwd, permute_mxfp8_fwd_hp_bwd
        self._plan, self._place = plan, place

    def wire_bytes(self, direction: str, routing: RoutingSet) -> int:
        return pair_bytes(routing, self._plan.shape.hidden * 33 // 32)

    def operation(self, direction: str, item: Item) -> Callable[[], tuple[Any, Tensor | None]]:
        def call() -> tuple[Any, None]:
            with torch.no_grad():
                return self._dispatch(item), None

        return call

    def _dispatch(self, item: Item) -> Tensor | MXFP8Tensor:
        place, experts, top_k = self._place, self._plan.shape.experts, self._plan.shape.top_k
        flat_S = item.topk_idx_TK.flatten()
        pair_S = torch.argsort(flat_S, stable=True)
        counts_E = torch.bincount(flat_S, minlength=experts)
        counts_PL = torch.empty_like(counts_E)
        dist.all_to_all_single(counts_PL, counts_E, group=place.group)
        send_splits = counts_E.view(place.ep_size, -1).sum(1).tolist()
        recv_splits = counts_PL.view(place.ep_size, -1).sum(1).tolist()
        received = self._send(
            item.tokens_TH[pair_S // top_k], recv_splits, send_splits, group_name=place.group.group_name
        )
        permuted = self._permute(received, counts_PL, place.ep_size, experts // place.ep_size, _SEGMENT)
        rows = permuted[1]
        if self._plan.dtype == "mxfp8":
            return rows.dequantize(torch.bfloat16)
        return MXFP8Tensor(rows.qdata, rows.scale.view(torch.uint8))
