"""ep_comm's own transports, called as a user calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ...config import EPConfig
from ...dispatcher import Direction, Dispatcher
from ...errors import ConfigError
from ...handle import Dispatched
from ...mxfp8 import MXFP8Tensor
from ..options import DIRECTIONS, DTYPES, MODES
from ..routing import RoutingSet
from ..work import Item, expert_output
from .base import Contender, Place, Plan, Session, token_bytes

__all__ = ["OwnTransport"]

_DIRECTION_NAMES: dict[str, Direction] = {
    "dispatch": "dispatch_forward",
    "combine": "combine_forward",
    "dispatch_backward": "dispatch_backward",
    "combine_backward": "combine_backward",
}


class OwnTransport(Contender):
    """A transport of :class:`ep_comm.EPConfig`."""

    directions = DIRECTIONS
    dtypes = DTYPES
    modes = MODES

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.name = f"own {transport}"
        self.origin = f"this library, transport={transport!r}"

    def problem(self, place: Place) -> str | None:
        if place.ep_size == 1 and self.transport not in ("auto", "collective"):
            return "one rank sends nothing to others: every transport is the same"
        return None

    def start(self, place: Place) -> None:
        super().start(place)
        options = place.options
        # Shared by all sessions: the window of the symmetric transport is as large as its largest user.
        self._keeper = Dispatcher(
            EPConfig(
                num_experts=max(options.experts),
                top_k=options.top_k,
                hidden_size=max(options.hidden),
                max_tokens_per_rank=max(options.tokens),
                transport=cast(Any, self.transport),
                timeout_seconds=options.timeout,
            ),
            place.group,
        )
        # The others leave it to NCCL.
        self.sms = self._keeper.transport == "symmetric"
        # Its sums are made inside each host first, which rounds elsewhere.
        self.exact = self._keeper.transport != "hierarchical"
        if self.transport == "auto":
            self.origin += f", which chose {self._keeper.transport}"

    def stop(self) -> None:
        self._keeper.close()

    def open(self, plan: Plan) -> Session:
        return _OwnSession(self.transport, plan, self.place)

    def multiprocessors(self, plan: Plan) -> str:
        if not self.sms:
            return super().multiprocessors(plan)
        return str(plan.num_sms or torch.cuda.get_device_properties(self.place.device).multi_processor_count)


class _OwnSession(Session):
    def __init__(self, transport: str, plan: Plan, place: Place) -> None:
        self._plan, self._place = plan, place
        copied = "bf16" if plan.dtype == "bf16" else "mxfp8"
        shape = plan.shape
        static = plan.mode != "eager"
        self.dispatcher = Dispatcher(
            EPConfig(
                num_experts=shape.experts,
                top_k=shape.top_k,
                hidden_size=shape.hidden,
                max_tokens_per_rank=shape.tokens,
                mode="static" if static else "eager",
                capacity_factor=(place.options.capacity_factor or 1.0) if static else None,
                dispatch_forward_dtype=cast(Any, copied),
                combine_backward_dtype=cast(Any, copied),
                recv_format="mxfp8" if plan.dtype == "mxfp8-kept" else "bf16",
                transport=cast(Any, transport),
                num_sms=plan.num_sms,
                # A peer that fails must not keep the others longer than the benchmark's own limit.
                timeout_seconds=place.options.timeout,
            ),
            place.group,
            name=f"bench {transport} {plan.mode}",
        )
        self.alignment = self.dispatcher.config.alignment

    def prepare(self, items: Sequence[Item]) -> None:
        if self.dispatcher.config.mode == "eager":
            return
        # Growing for one set may not be enough for another; the second round then finds nothing left to do.
        for item in (*items, *items):
            self._dispatch(item)
            if self.dispatcher.overflowed:
                self.dispatcher.grow(self.dispatcher.required_rows)
        for item in items:
            self._dispatch(item)
            if self.dispatcher.overflowed:
                raise ConfigError(f"the budget of {self.dispatcher.budget_rows} rows does not fit the routing")

    def prepare_capture(self) -> None:
        self.dispatcher.prepare_capture()

    def operation(self, direction: str, item: Item) -> Callable[[], tuple[Any, Tensor | None]]:
        return getattr(self, f"_{direction}_call")(item)

    def wire_bytes(self, direction: str, routing: RoutingSet) -> int:
        if self.dispatcher.transport == "hierarchical":
            return 0  # a token crosses hosts once and is copied on inside the host: no one link carries its bytes
        return token_bytes(routing, self.dispatcher.wire_row_bytes(_DIRECTION_NAMES[direction]))

    def raise_errors(self) -> None:
        status = self.dispatcher.device_status()
        if status is not None:
            self.dispatcher.raise_device_error(status.tolist())

    def close(self) -> None:
        self.dispatcher.close()

    def _dispatch(self, item: Item) -> Dispatched:
        with torch.no_grad():
            return self.dispatcher.dispatch(item.tokens_TH, item.topk_idx_TK, item.topk_weights_TK)

    def _dispatch_call(self, item: Item) -> Callable[[], tuple[Any, Tensor | None]]:
        def call() -> tuple[Tensor | MXFP8Tensor, Tensor]:
            got = self._dispatch(item)
            return got.tokens, got.weights

        return call

    def _combine_call(self, item: Item) -> Callable[[], tuple[Any, Tensor | None]]:
        got = self._dispatch(item)
        output_RH = self._expert_output(got)

        def call() -> tuple[Tensor, None]:
            with torch.no_grad():
                return self.dispatcher.combine(output_RH, got.handle), None

        return call

    def _dispatch_backward_call(self, item: Item) -> Callable[[], tuple[Any, Tensor | None]]:
        tokens, weights = item.tokens_TH.detach().requires_grad_(), item.topk_weights_TK.detach().requires_grad_()
        got = self.dispatcher.dispatch(tokens, item.topk_idx_TK, weights)
        grads = (self._expert_output(got), got.weights.detach().clone())

        def call() -> tuple[Tensor, Tensor]:
            return torch.autograd.grad((got.tokens, got.weights), (tokens, weights), grads, retain_graph=True)

        return call

    def _combine_backward_call(self, item: Item) -> Callable[[], tuple[Any, Tensor | None]]:
        got = self._dispatch(item)
        output_RH = self._expert_output(got).requires_grad_()
        combined_TH = self.dispatcher.combine(output_RH, got.handle)

        def call() -> tuple[Tensor, None]:
            return torch.autograd.grad(combined_TH, output_RH, item.grad_TH, retain_graph=True)[0], None

        return call

    def _expert_output(self, got: Dispatched) -> Tensor:
        """Rows in the buffer's layout; the tail's experts do not matter, because nobody reads it."""
        rows_RH = got.tokens.detach()
        local = self.dispatcher.num_local_experts
        row_R = torch.arange(rows_RH.shape[0], device=rows_RH.device)
        expert_R = torch.searchsorted(got.expert_offsets[1:].contiguous(), row_R, right=True).clamp_max(local - 1)
        return expert_output(rows_RH, expert_R + self._place.rank * local)
