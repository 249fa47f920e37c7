"""Megatron-Core: MoE layers whose tokens travel through ep_comm.

    from ep_comm.integrations import megatron
    megatron.use(config)                       # a TransformerConfig, before the model is built
    megatron.use(model)                        # or a model, or one MoELayer, that is built already

What happens in one MoE layer, 2 ranks, 4 experts:

    rank                  0                                   1
    routing map           a: experts 0 2    b: experts 2 3    c: experts 1 3    d: experts 0 1
    dispatch_preprocess   slots 0 2 | 2 3, their weights      slots 1 3 | 0 1, their weights
    token_dispatch        rows a d | c d                      rows a b | b c
    experts               Megatron's own, times weights       Megatron's own, times weights
    token_combine         a' b'                               c' d'

With experts split over the ranks of an expert tensor-parallel group, each of these ranks gets the token, and the parts
of the result are summed on the way back.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ..devices import to_host
from ..dispatcher import Dispatched, Dispatcher
from ..errors import ConfigError, RoutingError
from ..extras import install_hint
from .lazy import LazyDispatcher
from .megatron_config import read_settings
from .megatron_state import MegatronStepState
from .optional import require
from .routing_map import expert_slots, on_all_tensor_ranks

__all__ = ["EPTokenDispatcher", "MegatronStepState", "use"]

MIN_VERSION = "0.16.1"
"""The oldest release that was tested."""

_HINT = install_hint("megatron")
_dispatchers = require("megatron-core", MIN_VERSION, "megatron.core.transformer.moe.token_dispatcher", hint=_HINT)
_layers = require("megatron-core", MIN_VERSION, "megatron.core.transformer.moe.moe_layer", hint=_HINT)
_utils = require("megatron-core", MIN_VERSION, "megatron.core.transformer.moe.moe_utils", hint=_HINT)
_core = require("megatron-core", MIN_VERSION, "megatron.core.utils", hint=_HINT)
_groups = require("megatron-core", MIN_VERSION, "megatron.core.process_groups_config", hint=_HINT)
_config = require("megatron-core", MIN_VERSION, "megatron.core.transformer.transformer_config", hint=_HINT)

_MARK = "ep_comm_settings"


def use(target: Any, **settings: Any) -> Any:
    """Make MoE layers dispatch through ep_comm.

    Args:
        target: a ``TransformerConfig``: every ``MoELayer`` that is built with it, or with a copy of it, from now on; or
            a built ``MoELayer`` or a model that holds some: these layers. Leave ``moe_token_dispatcher_type`` at
            ``"alltoall"`` or ``"allgather"``: Megatron makes that dispatcher first, and it is put aside.
        settings: fields of :class:`ep_comm.EPConfig`, without sizes that come from the model. ``mode`` is ``"eager"``
            unless given. ``max_tokens_per_rank`` is the most tokens of a rank in one micro-batch; instead of it,
            ``seq_length`` and ``micro_batch_size`` may be given, and in eager mode nothing, as it then grows by itself.
            In static mode the initial budget is ``capacity_factor`` or ``budget_rows``, else the configuration's
            ``moe_expert_rank_capacity_factor``, else 1.25 times the mean load. ``alignment`` is 1 unless
            ``moe_router_padding_for_quantization`` asks for more. ``expert_counts="host"`` gives the experts just
            the rows in use and the counts on the host, which costs static mode one host sync a layer;
            ``"device"`` gives them the whole buffer and counts on the device, for experts that can take those
            (a single local expert, Transformer Engine's operation fuser; the default there is ``"device"``).

    Returns:
        ``target``.

    Raises:
        ConfigError: on every rank: a setting of the model excludes ep_comm, a field is unknown, missing or out of
            range, or there is no MoE layer.
    """
    if isinstance(target, _config.TransformerConfig):
        if target.num_moe_experts is None:
            raise ConfigError("target: the TransformerConfig has no experts (num_moe_experts is None)")
        _read(target, target.expert_tensor_parallel_size or target.tensor_model_parallel_size, settings)
        setattr(target, _MARK, dict(settings))
        _install_hook()
        return target
    layers = [m for m in target.modules() if isinstance(m, _layers.MoELayer)] if isinstance(target, nn.Module) else []
    if not layers:
        raise ConfigError(
            f"target must be a TransformerConfig, a MoELayer or a model that holds one, got {type(target).__name__}"
        )
    replacements = [_replacement(layer, settings) for layer in layers]
    for layer, dispatcher in zip(layers, replacements, strict=True):
        _put(layer, dispatcher)
    return target


class EPTokenDispatcher(_dispatchers.MoETokenDispatcher):
    """Megatron's ``MoETokenDispatcher`` on :class:`ep_comm.Dispatcher`.

    The routing map alone says where tokens go: a mapped expert gets its token although the probability is 0, an
    unmapped one never does. A token mapped to more experts than ``moe_router_topk`` is an error on every rank.

    Args:
        num_local_experts, local_expert_indices, config, pg_collection: as of Megatron's dispatchers.
        settings: see :func:`use`.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: Any,
        pg_collection: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection or _utils.get_default_pg_collection())
        self.num_local_experts = num_local_experts
        self.local_expert_indices = local_expert_indices
        group = self.tp_ep_group if self.tp_size > 1 else self.ep_group
        self._check_places(group)
        self.settings = _read(config, self.tp_size, settings)
        self.layer: nn.Module | None = None
        """The layer whose attribute ``ep_comm_dispatcher`` names the dispatcher in messages and budgets."""
        self._lazy = LazyDispatcher(
            group, self.settings.fields["num_experts"], self.settings.fields, opened=self._show_in_layer
        )
        self._rows: Dispatched | None = None

    @property
    def ep_dispatcher(self) -> Dispatcher | None:
        """The :class:`ep_comm.Dispatcher` in use; None before the first batch."""
        return self._lazy.dispatcher

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """``[S, B, H]`` tokens, bool ``[T, E]`` map and ``[T, E]`` probabilities.

        Returns:
            ``[T, H]`` tokens and ``[T, K]`` weights.
        """
        self.hidden_shape = hidden_states.shape
        self.probs_dtype = probs.dtype
        idx_TK, weights_TK = expert_slots(routing_map.bool(), probs, self.settings.slots)
        self.topk_idx, weights_TK = on_all_tensor_ranks(idx_TK, weights_TK, self.num_local_experts, self.tp_size)
        return hidden_states.reshape(-1, self.hidden_shape[-1]), weights_TK

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange: ``[T, H]`` tokens, ``[T, K]`` weights -> rows ``[R, H]`` of this rank's experts, weights ``[R]``.

        Raises:
            RoutingError: on every rank, if the map gives a token more experts than there are slots.
        """
        try:
            self._rows = self._lazy.dispatch(hidden_states, self.topk_idx, probs)
        except RoutingError as error:
            # The slots come from a map, which has no other way to be wrong.
            raise RoutingError(
                f"routing_map: on some rank it gives a token more than {self.settings.slots} experts "
                f"(moe_router_topk={self.config.moe_router_topk}): {error}"
            ) from error
        return self._rows.tokens, self._rows.weights

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, rows of each local expert (int64 ``[L]``, padding included) and weights, as the experts want them."""
        probs = probs.to(self.probs_dtype)
        counts_L = self._rows.expert_offsets.diff()
        if self.settings.device_counts:
            return hidden_states, counts_L, probs
        counts_L = to_host(counts_L)
        used = int(counts_L.sum())
        return hidden_states[:used], counts_L, probs[:used]

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The experts' output, filled up to the rows of the buffer."""
        unused = self._rows.handle.num_rows - hidden_states.shape[0]
        if unused == 0:
            return hidden_states
        return torch.cat([hidden_states, hidden_states.new_zeros(unused, hidden_states.shape[1])])

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Exchange: ``[R, H]`` outputs -> ``[T, H]``, summed per token. The experts have applied the weights."""
        handle = self._rows.handle
        self._rows = None
        return handle.dispatcher.combine(hidden_states, handle)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """``[T, H]`` in the shape of the layer's input."""
        return hidden_states.view(self.hidden_shape)

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Overlapped shared experts, which :func:`use` refuses: never called."""
        raise ConfigError("moe_shared_expert_overlap must be False with ep_comm")

    def _show_in_layer(self, dispatcher: Dispatcher) -> None:
        if self.layer is not None:
            self.layer.ep_comm_dispatcher = dispatcher

    def _check_places(self, group: Any) -> None:
        """Rank ``ep * tp_size + tp`` of the group must hold part ``tp`` of the experts of ``ep``."""
        place = _core.get_pg_rank(self.ep_group) * self.tp_size + self.tp_rank
        first = _core.get_pg_rank(self.ep_group) * self.num_local_experts
        expected = list(range(first, first + self.num_local_experts))
        if _core.get_pg_rank(group) != place or list(self.local_expert_indices) != expected:
            raise ConfigError(
                f"rank {_core.get_pg_rank(group)} of {_core.get_pg_size(group)}: the expert-parallel groups must order "
                f"ranks by experts, then tensor parts, and experts by rank; this one is at place {place} with experts "
                f"{list(self.local_expert_indices)}, expected {expected}"
            )


def _read(config: Any, tensor_size: int, settings: dict[str, Any]) -> Any:
    return read_settings(config, tensor_size, align_size=_utils.get_align_size_for_quantization(config), **settings)


def _replacement(layer: Any, settings: dict[str, Any]) -> EPTokenDispatcher:
    """A dispatcher for a layer, in the groups of the one that it has."""
    old = layer.token_dispatcher
    groups = _groups.ProcessGroupCollection(ep=old.ep_group, expt_tp=old.tp_group, tp_ep=old.tp_ep_group)
    return EPTokenDispatcher(layer.num_local_experts, layer.local_expert_indices, layer.config, groups, **settings)


def _put(layer: Any, dispatcher: EPTokenDispatcher) -> None:
    layer.token_dispatcher = dispatcher
    dispatcher.layer = layer


def _install_hook() -> None:
    """Make ``MoELayer`` look at its configuration's mark; once for the process."""
    build = _layers.MoELayer.__init__
    if hasattr(build, _MARK):
        return

    @functools.wraps(build)
    def with_ep_comm(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        settings = getattr(self.config, _MARK, None)
        if settings is not None:
            _put(self, _replacement(self, settings))

    setattr(with_ep_comm, _MARK, True)
    _layers.MoELayer.__init__ = with_ep_comm
