"""torchtitan: a token dispatcher for its MoE layers, switched on from the command line.

    --override.imports 'ep_comm.integrations.torchtitan.token_dispatcher={"dispatch_forward_dtype": "mxfp8"}'

In torchtitan's MoE block, 2 ranks:

    router            x_TD, topk_scores_TK, topk_expert_ids_TK
    dispatch          routed_input_RD, expert by expert; rows of each local expert, padding included
    inner_experts     torchtitan's own grouped GEMMs
    combine           rows times scores, summed per token

Without expert parallelism it does what torchtitan's own local dispatcher does.

Dispatch and combine are operators of ``torch.library`` here, and importing this module adds them to those whose
results torchtitan's selective activation checkpointing keeps: tokens that have arrived are not sent again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import operators
from ..config import EPConfig
from ..dispatcher import DispatchHandle
from ..errors import ConfigError
from ..extras import install_hint
from .lazy import LazyDispatcher
from .optional import require

__all__ = ["EPCommTokenDispatcher", "token_dispatcher"]

MIN_VERSION = "0.3.0"
"""The first release whose dispatchers take tokens as ``[T, D]`` and whose configurations can be overridden."""

_HINT = install_hint("torchtitan")
_config = require("torchtitan", MIN_VERSION, "torchtitan.config", hint=_HINT)
_checkpointing = require("torchtitan", MIN_VERSION, "torchtitan.distributed.activation_checkpoint", hint=_HINT)
_titan = require("torchtitan", MIN_VERSION, "torchtitan.models.common.token_dispatcher", hint=_HINT)


def _keep_what_was_moved() -> None:
    """Add the operators to the list of torchtitan, which names those of its own dispatchers and takes no others."""
    theirs = _checkpointing.SelectiveAC.get_save_ops

    def get_save_ops(self: Any) -> set[Any]:
        return {*theirs(self), torch.ops.ep_comm.dispatch.default, torch.ops.ep_comm.combine.default}

    _checkpointing.SelectiveAC.get_save_ops = get_save_ops


_keep_what_was_moved()


class EPCommTokenDispatcher(_titan.BaseEPTokenDispatcher):
    """torchtitan's ``BaseEPTokenDispatcher`` on :class:`ep_comm.Dispatcher`.

    Eager mode unless told otherwise. In static mode torchtitan's trainer has nothing that replays an overflow: run
    the step in an :class:`ep_comm.StepRunner`, or look at ``ep_dispatcher.overflowed``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_titan.BaseEPTokenDispatcher.Config):
        """Sizes as in torchtitan's other dispatchers.

        Attributes:
            settings: fields of :class:`ep_comm.EPConfig`. ``max_tokens_per_rank`` and ``hidden_size`` are taken from
                the first batch if they are missing.
        """

        settings: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._settings = {"top_k": config.top_k, **config.settings}
        self._lazy: LazyDispatcher | None = None

    @property
    def ep_dispatcher(self) -> Any:
        """The :class:`ep_comm.Dispatcher` in use; None before the first batch and without expert parallelism."""
        return None if self._lazy is None else self._lazy.dispatcher

    def init_buffer(self) -> None:
        """Take the expert-parallel group; called by ``wire_meshes``. Buffers are made by the first batch."""
        self._lazy = None
        if self.ep_mesh is not None:
            self._lazy = LazyDispatcher(
                self.ep_mesh.get_group(), self.num_experts, self._settings, dispatch=operators.dispatch
            )

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, Any]:
        """Bring tokens to the ranks of their experts.

        Args:
            x_TD: ``[T, D]`` tokens of this rank.
            topk_scores_TK: ``[T, K]`` routing scores; combine multiplies by them.
            topk_expert_ids_TK: ``[T, K]`` global expert ids, -1 for none.
            num_local_tokens_per_expert_E: not used: the dispatcher counts for itself.

        Returns:
            Rows ``[R, D]``, the rows of each local expert with its padding ``[L]`` (their sum is below R where a static
            buffer has room left), and what :meth:`combine` needs.
        """
        if self._lazy is None:
            return _titan.LocalTokenDispatcher.dispatch(
                self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
        rows = self._lazy.dispatch(x_TD, topk_expert_ids_TK, topk_scores_TK.float())
        return rows.tokens, rows.expert_offsets.diff(), rows.handle

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        """``[R, D]`` outputs of the experts -> ``[T, D]``: times scores in FP32, summed per token."""
        if not isinstance(metadata, DispatchHandle):
            return _titan.LocalTokenDispatcher.combine(self, routed_output_RD, metadata, x_TD)
        return metadata.dispatcher.combine(routed_output_RD, metadata, apply_weights=True).to(x_TD.dtype)


@_config.override(target=_titan.LocalTokenDispatcher.Config, description="ep_comm moves the tokens")
def token_dispatcher(cfg: Any, **settings: Any) -> Any:
    """The override: every MoE layer's dispatcher becomes an :class:`EPCommTokenDispatcher`.

    Args:
        cfg: the configuration in the model, of any of torchtitan's dispatchers.
        settings: fields of :class:`ep_comm.EPConfig`, without sizes that come from the model.

    Raises:
        ConfigError: a field is unknown or out of range, or ``recv_format`` asks for rows that the experts do not take.
    """
    for name in ("num_experts", "top_k"):
        if name in settings:
            raise ConfigError(f"{name} cannot be given: it comes from the model")
    if settings.get("recv_format", "bf16") != "bf16":
        raise ConfigError(f"recv_format must be 'bf16' for torchtitan's experts, got {settings['recv_format']!r}")
    sizes = {"hidden_size": 32, "max_tokens_per_rank": 1, **settings}
    try:
        EPConfig(num_experts=cfg.num_experts, top_k=cfg.top_k, **sizes)
    except TypeError as error:
        raise ConfigError(f"the override takes fields of ep_comm.EPConfig: {error}") from None
    return EPCommTokenDispatcher.Config(num_experts=cfg.num_experts, top_k=cfg.top_k, settings=settings)
