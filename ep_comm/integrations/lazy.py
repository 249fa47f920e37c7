"""A dispatcher that learns its sizes from the first tokens, for frameworks that do not say them earlier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import EPConfig
from ..dispatcher import Dispatched, Dispatcher
from ..errors import ArgumentError

__all__ = ["LazyDispatcher"]


class LazyDispatcher:
    """Makes its :class:`ep_comm.Dispatcher` when it is first called, and in eager mode a larger one when needed.

    Args:
        group: of the expert-parallel ranks.
        num_experts: of the whole group.
        settings: fields of :class:`ep_comm.EPConfig`; sizes that are missing are taken from the first call. Without
            ``max_tokens_per_rank`` that is the most tokens of any rank; later calls may have more in eager mode only.
        name: of the dispatcher in messages.
        opened: called with every dispatcher that is made.
        dispatch: how to dispatch, ``Dispatcher.dispatch`` or :func:`ep_comm.operators.dispatch`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_experts: int,
        settings: dict[str, Any],
        *,
        name: str | None = None,
        opened: Callable[[Dispatcher], None] | None = None,
        dispatch: Callable[[Dispatcher, Tensor, Tensor, Tensor], Dispatched] = Dispatcher.dispatch,
    ) -> None:
        self.group = group
        self.settings = {"num_experts": num_experts, **settings}
        self.name = name
        self.dispatcher: Dispatcher | None = None
        self._opened = opened
        self._dispatch = dispatch

    def dispatch(self, tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
        """:meth:`ep_comm.Dispatcher.dispatch`. Combine with ``rows.handle.dispatcher``."""
        if self.dispatcher is None:
            self._open(tokens, topk_idx)
        try:
            return self._dispatch(self.dispatcher, tokens, topk_idx, topk_weights)
        except ArgumentError:
            # In eager mode all ranks raise together, so all of them get here.
            grows = self.dispatcher.config.mode == "eager" and "max_tokens_per_rank" not in self.settings
            if not grows or self._agreed_tokens(tokens) <= self.dispatcher.config.max_tokens_per_rank:
                raise
        self._open(tokens, topk_idx)
        return self._dispatch(self.dispatcher, tokens, topk_idx, topk_weights)

    def _open(self, tokens: Tensor, topk_idx: Tensor) -> None:
        """Make the dispatcher, or a larger one in its place; handles of the old one stay good."""
        fields = {"top_k": topk_idx.shape[1], "hidden_size": tokens.shape[1], **self.settings}
        if "max_tokens_per_rank" not in fields:
            most = max(self._agreed_tokens(tokens), 1)
            eager = fields.get("mode", "eager") == "eager"
            fields["max_tokens_per_rank"] = 1 << (most - 1).bit_length() if eager else most
        hooks = self.dispatcher.routing_hooks if self.dispatcher is not None else []
        self.dispatcher = Dispatcher(EPConfig(**fields), self.group, name=self.name)
        self.dispatcher.routing_hooks.extend(hooks)
        if self._opened is not None:
            self._opened(self.dispatcher)

    def _agreed_tokens(self, tokens: Tensor) -> int:
        """The most tokens that any rank of the group has now."""
        most = torch.tensor(tokens.shape[0], dtype=torch.int64, device=tokens.device)
        if self.group is not None and dist.get_world_size(self.group) > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        return int(most)
