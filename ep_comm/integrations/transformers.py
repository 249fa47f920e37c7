"""Hugging Face Transformers: MoE models whose experts get their tokens through ep_comm.

    ep_comm.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(
        path, distributed_config=DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="ep_comm"))

or, for a model that is loaded whole on every rank, ``parallelize(model, group, config)``.

What happens in one MoE block, 2 ranks, 4 experts:

    rank                          0                              1
    tokens, global expert ids     a -> 0 2    b -> 2 3           c -> 1 3    d -> 0 1
    dispatch                      rows a d | c d                 rows a b | b c
    local ids for the experts     0 0 | 1 1                      0 0 | 1 1      (static mode: 2 on unused rows)
    experts_forward               the model's own, on those rows, with weight 1
    combine, routing weights      a' b'                          c' d'

Where all ranks of the group hold the same batch (``ep_size == tp_size``), each of them dispatches its own slice of
the tokens, and the slices of the result are gathered.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import EPConfig
from ..errors import ConfigError
from ..extras import install_hint
from .lazy import LazyDispatcher
from .optional import require
from .rows import local_expert_ids
from .shared_batch import gather_slices, slice_of_rank

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DispatcherEP", "ExpertExchange", "parallelize", "register"]

MIN_VERSION = "5.23.0"
"""The first release with ``EPImplementation`` and its registry."""

_hf = require(
    "transformers",
    MIN_VERSION,
    "transformers.distributed.expert_parallel",
    hint=install_hint("transformers"),
)

_FROM_MODEL = ("num_experts", "top_k", "hidden_size", "mode", "recv_format")


def register(*, max_tokens_per_rank: int | None = None, **fields: Any) -> None:
    """Make ``ep_implementation="ep_comm"`` (eager) and ``"ep_comm_static"`` known to Transformers.

    Call it before the model is loaded. Calling it again changes the settings of models that are loaded later.

    Args:
        max_tokens_per_rank: the most tokens of one rank in one forward pass (batch times sequence length; divided by
            ``tp_size`` where ranks share a batch). None takes what the first forward pass has: in eager mode
            the limit grows by itself later, in static mode it stays, so give it there if batches vary.
        fields: further fields of :class:`ep_comm.EPConfig`, such as ``dispatch_forward_dtype="mxfp8"`` or
            ``capacity_factor=1.5`` (the latter is for static mode). Sizes come from the model. ``alignment`` is
            1 unless given: the experts of Transformers pack their rows themselves.

    Raises:
        ConfigError: a field is unknown, out of range, or comes from the model.
    """
    for name in _FROM_MODEL:
        if name in fields:
            raise ConfigError(f"{name} cannot be given to register(): it comes from the model or from the name")
    try:
        EPConfig(num_experts=1, top_k=1, hidden_size=32, max_tokens_per_rank=max_tokens_per_rank or 1, **fields)
    except TypeError as error:
        raise ConfigError(f"register() takes fields of ep_comm.EPConfig: {error}") from None
    registry = _hf.EPImplementationInterface
    for name, mode in (("ep_comm", "eager"), ("ep_comm_static", "static")):
        settings = {"mode": mode, **fields}
        registry.register(
            name, functools.partial(DispatcherEP, settings=settings, max_tokens_per_rank=max_tokens_per_rank)
        )


def parallelize(
    model: nn.Module, group: dist.ProcessGroup | None, config: EPConfig | None = None, *, shared_batch: bool = False
) -> nn.Module:
    """Spread the experts of a Transformers model, held whole by every rank, over ``group``. In place.

    Afterwards every rank holds ``num_experts / group size`` experts of each MoE block, in order, and everything
    else as before. The experts' parameters are new ones that carry ``ep_expert = True``: make the optimizer
    after this call. With a batch of its own on each rank, the experts' gradients are sums over the group's
    batches and the others are of this rank's batch: to train on the mean loss, divide the former by the group's
    size and average the latter over it.

    Args:
        model: a ``PreTrainedModel`` whose configuration has an expert-parallel plan.
        group: of the expert-parallel ranks; None takes the default group.
        config: of the dispatchers, one for each MoE block; None makes an eager one from the first batch.
        shared_batch: all ranks pass the same batch to every forward pass, instead of one each.

    Returns:
        ``model``.

    Raises:
        ConfigError: the model has no experts to spread, they were spread before, or ``config`` does not suit them.
    """
    group = group if group is not None or not dist.is_initialized() else dist.group.WORLD
    blocks = _experts_modules(model)
    size = dist.get_world_size(group) if group is not None else 1
    rank = dist.get_rank(group) if group is not None else 0
    for path, experts, _ in blocks:
        _check_block(path, experts, config, size)
    for path, experts, parameters in blocks:
        num_local_experts = experts.num_experts // size
        for name in parameters:
            _keep_shard(experts, name, rank * num_local_experts, num_local_experts)
        experts.num_experts = num_local_experts
        experts._is_expert_parallel = True
        exchange = ExpertExchange(
            experts,
            experts.forward,
            group,
            shared_group=group if shared_batch and size > 1 else None,
            settings=None if config is None else config.to_dict(),
            name=path,
        )
        experts.forward = exchange
    return model


class ExpertExchange:
    """Calls the experts of one MoE block on the rows that a dispatcher brings, and brings back the results.

    The dispatcher is made by the first call, which knows the sizes, and becomes the attribute
    ``ep_comm_dispatcher`` of the experts module: :class:`ep_comm.StepRunner` then names the layer by its path.

    Args:
        experts: the module.
        experts_forward: its own forward, on local expert ids.
        group: of the expert-parallel ranks.
        shared_group: ranks that pass the same tokens, each of which dispatches a slice; None if there are none.
        settings: fields of :class:`ep_comm.EPConfig`; sizes that are missing are taken from the first call.
        name: of the dispatcher in messages.
    """

    def __init__(
        self,
        experts: nn.Module,
        experts_forward: Callable[[Tensor, Tensor, Tensor], Tensor],
        group: dist.ProcessGroup | None,
        *,
        shared_group: dist.ProcessGroup | None = None,
        settings: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        self.experts = experts
        self.experts_forward = experts_forward
        self.shared_group = shared_group
        self.num_local_experts: int = experts.num_experts
        size = dist.get_world_size(group) if group is not None else 1
        self.dispatcher = LazyDispatcher(
            group,
            self.num_local_experts * size,
            {"alignment": 1, **(settings or {})},
            name=name,
            opened=lambda dispatcher: setattr(experts, "ep_comm_dispatcher", dispatcher),
        )

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[T, H]`` tokens, ``[T, K]`` global expert ids (-1 = none) and weights -> ``[T, H]`` weighted sums."""
        tokens, num_tokens = hidden_states, hidden_states.shape[0]
        weights = top_k_weights.float()
        if self.shared_group is not None:
            tokens, top_k_index, weights = slice_of_rank(tokens, top_k_index, weights, self.shared_group)
        rows = self.dispatcher.dispatch(tokens, top_k_index, weights)
        output = self._run_experts(rows.tokens, local_expert_ids(rows))
        y_TH = rows.handle.dispatcher.combine(output, rows.handle, apply_weights=True)
        if self.shared_group is not None:
            y_TH = gather_slices(y_TH, num_tokens, self.shared_group)
        return y_TH.to(hidden_states.dtype)

    def _run_experts(self, rows_RH: Tensor, ids_R: Tensor) -> Tensor:
        if getattr(getattr(self.experts, "config", None), "_experts_implementation", None) != "eager":
            return self._call_experts(rows_RH, ids_R)
        # The model's own loop over its experts reads the device anyway, and not every model's knows the id that
        # stands for no expert: it gets just the rows that hold tokens.
        used = (ids_R < self.num_local_experts).nonzero().squeeze(1)
        packed = self._call_experts(rows_RH[used], ids_R[used])
        return packed.new_zeros(rows_RH.shape).index_copy(0, used, packed)

    def _call_experts(self, rows_RH: Tensor, ids_R: Tensor) -> Tensor:
        num_rows = rows_RH.shape[0]
        if num_rows == 0:
            # One row of zeros keeps the experts' parameters in the graph: whoever reduces their gradients finds them.
            rows_RH = torch.cat([rows_RH, rows_RH.new_zeros(1, rows_RH.shape[1])])
            ids_R = ids_R.new_zeros(1)
        weights_R1 = rows_RH.new_ones(rows_RH.shape[0], 1)
        return self.experts_forward(rows_RH, ids_R.unsqueeze(1), weights_R1)[:num_rows]


class DispatcherEP(_hf.EPImplementation):
    """The ``EPImplementation`` behind the names that :func:`register` makes known.

    Args:
        experts, ep_mesh, tp_mesh: see ``transformers.distributed.expert_parallel.EPImplementation``. The ranks of
            ``tp_mesh`` hold one batch; each dispatches its slice of it to the experts of ``ep_mesh``.
        settings: fields of :class:`ep_comm.EPConfig`, ``mode`` among them.
        max_tokens_per_rank: see :func:`register`.
    """

    def __init__(
        self,
        experts: nn.Module,
        ep_mesh: DeviceMesh,
        tp_mesh: DeviceMesh,
        *,
        settings: dict[str, Any],
        max_tokens_per_rank: int | None = None,
    ) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        if max_tokens_per_rank is not None:
            settings = {**settings, "max_tokens_per_rank": max_tokens_per_rank}
        self.exchange = ExpertExchange(
            experts,
            self.experts_forward,
            ep_mesh.get_group(),
            shared_group=tp_mesh.get_group() if tp_mesh.size() > 1 else None,
            settings=settings,
        )

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return self.exchange(hidden_states, top_k_index, top_k_weights)


def _experts_modules(model: nn.Module) -> list[tuple[str, nn.Module, list[str]]]:
    """Path, module and names of the parameters to shard of every experts module in the model's plan."""
    plan: dict[str, str] = getattr(model, "ep_plan", None) or {}
    modules = _matches(plan, "ep_dispatch_experts")
    weights = _matches(plan, "grouped_gemm")
    found = [
        (path, module, [n for n, _ in module.named_parameters(recurse=False) if weights(f"{path}.{n}")])
        for path, module in model.named_modules()
        if modules(path)
    ]
    if not found:
        raise ConfigError(
            f"model: {type(model).__name__} has no module that an expert-parallel plan (model.ep_plan) marks "
            f"'ep_dispatch_experts'; is it an MoE model of Transformers >= {MIN_VERSION}?"
        )
    return found


def _matches(plan: dict[str, str], style: str) -> Callable[[str], bool]:
    """Whether a path is named by a rule of that style; ``*`` in a rule stands for one part of the path."""
    rules = [re.escape(rule).replace(r"\*", r"[^.]+") for rule, of_rule in plan.items() if of_rule == style]
    pattern = re.compile("|".join(rules) or r"(?!)")
    return lambda path: pattern.fullmatch(path) is not None


def _check_block(path: str, experts: nn.Module, config: EPConfig | None, size: int) -> None:
    if getattr(experts, "_is_expert_parallel", False):
        raise ConfigError(f"model: the experts of {path} are spread over ranks already")
    if experts.num_experts % size:
        raise ConfigError(
            f"model: {path} has {experts.num_experts} experts, which do not divide evenly over {size} ranks"
        )
    if config is None:
        return
    if config.num_experts != experts.num_experts:
        raise ConfigError(
            f"config.num_experts must be {experts.num_experts}, the experts of {path}, got {config.num_experts}"
        )
    if config.recv_format != "bf16":
        raise ConfigError(
            f"config.recv_format must be 'bf16', since the experts of Transformers take plain rows, got "
            f"{config.recv_format!r}"
        )


def _keep_shard(experts: nn.Module, name: str, first: int, count: int) -> None:
    whole = experts._parameters[name]
    shard = nn.Parameter(whole.detach()[first : first + count].clone(), requires_grad=whole.requires_grad)
    shard.ep_expert = True
    experts._parameters[name] = shard
