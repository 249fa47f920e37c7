"""What a Megatron-Core configuration says about dispatching, and which of its settings exclude ep_comm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config import EPConfig, round_up
from ..errors import ConfigError

__all__ = ["MegatronSettings", "read_settings"]

_FROM_MODEL = ("num_experts", "top_k", "hidden_size")

# Parts of a layer that Megatron's own CUDA graphs may hold while ep_comm dispatches.
_GRAPHS_BESIDE_DISPATCH = {"attn", "mlp", "mamba", "moe_router"}


@dataclass(frozen=True)
class MegatronSettings:
    """What an ``EPTokenDispatcher`` is made of.

    Attributes:
        fields: of :class:`ep_comm.EPConfig`; ``max_tokens_per_rank`` may be missing in eager mode.
        slots: the most experts that the routing map gives a token.
        device_counts: experts take all rows of the buffer and their counts on the device, without host sync.
    """

    fields: dict[str, Any]
    slots: int
    device_counts: bool


def read_settings(
    config: Any,
    tensor_size: int,
    *,
    align_size: int,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    expert_counts: str | None = None,
    **fields: Any,
) -> MegatronSettings:
    """Settings for the MoE layers of a model.

    Args:
        config: a ``TransformerConfig``.
        tensor_size: ranks that each expert is split over.
        align_size: the multiple of rows that Megatron's quantised experts ask for.
        seq_length, micro_batch_size, expert_counts, fields: see :func:`ep_comm.integrations.megatron.use`.

    Raises:
        ConfigError: a setting of the model excludes ep_comm, or a field is unknown, missing or out of range.
    """
    _refuse_unsupported(config)
    for name in _FROM_MODEL:
        if name in fields:
            raise ConfigError(f"{name} cannot be given: it comes from the model")
    if fields.get("recv_format", "bf16") != "bf16":
        raise ConfigError(f"recv_format must be 'bf16' for Megatron's experts, got {fields['recv_format']!r}")
    if expert_counts not in (None, "host", "device"):
        raise ConfigError(f"expert_counts must be 'host' or 'device', got {expert_counts!r}")
    static = fields.get("mode", "eager") == "static"
    if expert_counts == "device" and not static:
        raise ConfigError("expert_counts='device' needs mode='static': eager mode has the counts on the host")
    tokens = _tokens_per_rank(config, static, fields.pop("max_tokens_per_rank", None), seq_length, micro_batch_size)
    if tokens is not None:
        fields["max_tokens_per_rank"] = tokens
    fields.setdefault("alignment", _alignment(config, align_size))
    # Padding every expert to one capacity maps tokens to experts that they did not choose, to any number of them.
    pads = config.moe_pad_expert_input_to_capacity
    slots = config.num_moe_experts if pads else config.moe_router_topk
    if static and "budget_rows" not in fields:
        factor = fields.pop("capacity_factor", None)
        if factor is None:
            factor = getattr(config, "moe_expert_rank_capacity_factor", None)
        fields["budget_rows"] = _budget_rows(config, factor, tokens, tensor_size, fields["alignment"])
    fields |= {
        "num_experts": config.num_moe_experts * tensor_size,
        "top_k": slots * tensor_size,
        "hidden_size": getattr(config, "moe_latent_size", None) or config.hidden_size,
    }
    try:
        EPConfig(**{"max_tokens_per_rank": 1, **fields})
    except TypeError as error:
        raise ConfigError(f"the settings are fields of ep_comm.EPConfig: {error}") from None
    if expert_counts is None:
        # The only experts of Megatron-Core that do not read the counts on the host.
        fused = static and getattr(config, "use_transformer_engine_op_fuser", False) and config.moe_grouped_gemm
        expert_counts = "device" if fused else "host"
    return MegatronSettings(fields, slots, static and expert_counts == "device")


def _refuse_unsupported(config: Any) -> None:
    """Settings that hand parts of the dispatch to other code of Megatron, by name."""
    reasons = {
        "moe_shared_expert_overlap": "the shared experts run beside the routed ones, not inside the dispatcher",
        "overlap_moe_expert_parallel_comm": "ep_comm runs its exchange on the current stream",
        "moe_paged_stash": "ep_comm has budgets and replay of its own, see ep_comm.StepRunner",
    }
    for name, reason in reasons.items():
        if getattr(config, name, False):
            raise ConfigError(f"{name} must be False with ep_comm: {reason}")
    if getattr(config, "transformer_impl", None) == "inference_optimized":
        raise ConfigError("transformer_impl='inference_optimized' brings dispatchers of its own; ep_comm takes others")
    if getattr(config, "cuda_graph_impl", "none") not in (None, "none"):
        scopes = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", None) or []
        names = {str(getattr(scope, "name", scope)) for scope in scopes}
        if not names or not names <= _GRAPHS_BESIDE_DISPATCH:
            raise ConfigError(
                f"cuda_graph_impl={config.cuda_graph_impl!r} with scopes {sorted(names) or 'of the whole layer'} puts "
                f"the dispatch into Megatron's graph, where nothing replays an overflow; allowed are "
                f"{', '.join(sorted(_GRAPHS_BESIDE_DISPATCH))}, and ep_comm.StepRunner captures the whole step"
            )


def _tokens_per_rank(
    config: Any, static: bool, given: int | None, seq_length: int | None, micro_batch_size: int | None
) -> int | None:
    """The most tokens of a rank in one micro-batch, or None where eager mode is to find out."""
    if given is not None:
        return given
    if seq_length is not None and micro_batch_size is not None:
        split = config.context_parallel_size * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
        return -(-seq_length // split) * micro_batch_size
    if static:
        raise ConfigError(
            "mode='static' needs max_tokens_per_rank, the most tokens of a rank in one micro-batch, or seq_length and "
            f"micro_batch_size, got seq_length={seq_length!r} and micro_batch_size={micro_batch_size!r}"
        )
    return None


def _alignment(config: Any, align_size: int) -> int:
    fused = getattr(config, "use_transformer_engine_op_fuser", False)
    if config.moe_router_padding_for_quantization or fused:
        return max(align_size, 1)
    return 1


def _budget_rows(config: Any, factor: float | None, tokens: int, tensor_size: int, alignment: int) -> int:
    """``ceil(tokens * top_k * factor)``, 1.0 being the mean load, whatever the number of slots is."""
    probe = EPConfig(
        num_experts=config.num_moe_experts * tensor_size,
        top_k=config.moe_router_topk * tensor_size,
        hidden_size=1,
        max_tokens_per_rank=tokens,
        capacity_factor=factor,
        alignment=alignment,
    )
    return round_up(probe.initial_budget_rows(), alignment)
