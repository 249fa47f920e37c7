"""Megatron-Core's all-to-all token dispatcher, as its MoE layer calls it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..options import DIRECTIONS
from ..routing import RoutingSet
from ..work import Item, expert_output
from .base import Contender, Place, Plan, Session, import_problem, pair_bytes

__all__ = ["Megatron"]

_MODULE = "megatron.core.transformer.moe.token_dispatcher"


class Megatron(Contender):
    """``MoEAlltoAllTokenDispatcher`` without tensor parallelism and without fused permutation."""

    name = "Megatron-Core"
    origin = "Megatron-Core: MoEAlltoAllTokenDispatcher, permutation not fused; its router's dense map is made untimed"
    directions = DIRECTIONS

    def problem(self, place: Place) -> str | None:
        return import_problem(_MODULE, place)

    def open(self, plan: Plan) -> Session:
        return _MegatronSession(plan, self.place)


class _MegatronSession(Session):
    def __init__(self, plan: Plan, place: Place) -> None:
        from megatron.core.transformer.transformer_config import TransformerConfig

        self._shape, self._place = plan.shape, place
        self._local = plan.shape.experts // place.ep_size
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._config = TransformerConfig(
                num_layers=1,
                hidden_size=plan.shape.hidden,
                num_attention_heads=1,
                num_moe_experts=plan.shape.experts,
                moe_router_topk=plan.shape.top_k,
                moe_token_dispatcher_type="alltoall",
                add_bias_linear=False,
                bf16=True,
                params_dtype=torch.bfloat16,
            )

    def wire_bytes(self, direction: str, routing: RoutingSet) -> int:
        row = self._shape.hidden * torch.bfloat16.itemsize
        return pair_bytes(routing, row + (4 if direction.startswith("dispatch") else 0))

    def operation(self, direction: str, item: Item) -> Callable[[], tuple[Any, Tensor | None]]:
        dispatcher, (map_TE, probs_TE) = self._dispatcher(), self._routing(item)
        if direction == "dispatch":

            def dispatch() -> tuple[Tensor, Tensor]:
                with torch.no_grad():
                    rows, _, weights = self._dispatch(dispatcher, item.tokens_TH, map_TE, probs_TE)
                    return rows, weights

            return dispatch
        tokens, probs = item.tokens_TH.detach().requires_grad_(), probs_TE.requires_grad_()
        rows, counts_L, weights = self._dispatch(dispatcher, tokens, map_TE, probs)
        output_RH = self._expert_output(rows.detach(), counts_L)
        if direction == "combine":

            def combine() -> tuple[Tensor, None]:
                with torch.no_grad():
                    return self._combine(dispatcher, output_RH), None

            return combine
        if direction == "dispatch_backward":
            grads = (output_RH, weights.detach().clone())

            def dispatch_backward() -> tuple[Tensor, Tensor]:
                grad_TH, grad_TE = torch.autograd.grad((rows, weights), (tokens, probs), grads, retain_graph=True)
                return grad_TH, grad_TE.gather(1, item.topk_idx_TK)

            return dispatch_backward
        output_RH.requires_grad_()
        combined_TH = self._combine(dispatcher, output_RH)

        def combine_backward() -> tuple[Tensor, None]:
            return torch.autograd.grad(combined_TH, output_RH, item.grad_TH, retain_graph=True)[0], None

        return combine_backward

    def _dispatcher(self) -> Any:
        """One for each input set: it keeps the splits of its latest dispatch."""
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

        place = self._place
        experts = list(range(place.rank * self._local, (place.rank + 1) * self._local))
        groups = SimpleNamespace(ep=place.group, expt_tp=None, tp_ep=place.group)
        return MoEAlltoAllTokenDispatcher(self._local, experts, self._config, groups)

    def _routing(self, item: Item) -> tuple[Tensor, Tensor]:
        """The map and the weights that Megatron's router hands out, bool and fp32 ``[T, E]``."""
        idx_TK, shape = item.topk_idx_TK, (self._shape.tokens, self._shape.experts)
        map_TE = torch.zeros(shape, dtype=torch.bool, device=idx_TK.device).scatter_(1, idx_TK, True)
        return map_TE, torch.zeros(shape, device=idx_TK.device).scatter_(1, idx_TK, item.topk_weights_TK)

    def _dispatch(self, dispatcher: Any, tokens: Tensor, map_TE: Tensor, probs_TE: Tensor) -> tuple[Any, Any, Any]:
        sent, weights = dispatcher.dispatch_preprocess(tokens, map_TE, probs_TE)
        return dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(sent, weights))

    def _combine(self, dispatcher: Any, output_RH: Tensor) -> Tensor:
        returned = dispatcher.token_combine(dispatcher.combine_preprocess(output_RH))
        return dispatcher.combine_postprocess(returned)

    def _expert_output(self, rows_RH: Tensor, counts_L: Tensor) -> Tensor:
        expert_L = torch.arange(self._local, device=rows_RH.device) + self._place.rank * self._local
        expert_R = expert_L.repeat_interleave(counts_L.to(rows_RH.device))
        return expert_output(rows_RH, expert_R)
