"""Megatron-Core on gloo ranks without a GPU: what it asks of CUDA, its parallel state, small MoE layers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from importlib import metadata
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from ep_comm.extras import install_hint

EXPERTS, TOP_K, HIDDEN, SEQUENCE, BATCH = 4, 2, 32, 8, 2


def missing() -> str:
    """Why the tests cannot run here, or nothing."""
    try:
        metadata.version("megatron-core")  # not imported here: that takes seconds
    except metadata.PackageNotFoundError:
        return f"needs megatron-core >= 0.16.1: {install_hint('megatron')}"
    return ""


class _NoStream:
    """Stands for a CUDA stream: work on a CPU is in order anyway."""

    def wait_stream(self, other: Any) -> None: ...

    def record_event(self) -> Any:
        return mock.Mock()

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *error: Any) -> None: ...


def _on_host(tensor: Tensor | None, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and tensor is not None else tensor


@contextlib.contextmanager
def parallel_state(
    world_size: int, *, tensor: int = 1, expert_tensor: int = 1, expert: int | None = None
) -> Iterator[None]:
    """Megatron's process groups. Without a GPU, its calls for the current device and for streams are answered."""
    from megatron.core import parallel_state as state
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")))
            stack.enter_context(mock.patch("torch.cuda.Stream", lambda *args, **kwargs: _NoStream()))
            stack.enter_context(mock.patch("torch.cuda.current_stream", lambda *args: None))
            stack.enter_context(mock.patch("torch.cuda.stream", lambda stream: _NoStream()))
            # Splits that were on a CPU all the time stay tensors, which all_to_all does not take.
            stack.enter_context(mock.patch(f"{token_dispatcher.__name__}.maybe_move_tensor_to_cpu", _on_host))
        # Without Transformer Engine release 0.16.1 forgets to define this name, which its router then looks at.
        stack.enter_context(mock.patch(f"{moe_utils.__name__}.te_general_gemm", None, create=True))
        state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            expert_model_parallel_size=world_size // expert_tensor if expert is None else expert,
            expert_tensor_parallel_size=expert_tensor,
            create_gloo_process_groups=False,
        )
        try:
            yield
        finally:
            state.destroy_model_parallel()
            token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = None


def make_config(**changes: Any) -> Any:
    """A small ``TransformerConfig``, in the parallel sizes of the parallel state."""
    from megatron.core import parallel_state as state
    from megatron.core.transformer.transformer_config import TransformerConfig

    tensor = state.get_tensor_model_parallel_world_size()
    fields: dict[str, Any] = dict(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=48,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_token_dispatcher_type="alltoall",
        moe_aux_loss_coeff=0.0,
        moe_router_load_balancing_type="none",
        moe_grouped_gemm=False,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        expert_model_parallel_size=state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=state.get_expert_tensor_parallel_world_size(),
    )
    return TransformerConfig(**{**fields, **changes})


def make_layer(config: Any) -> Any:
    """The layer that Megatron's own layer specification describes, with weights that depend on the rank alone."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    if isinstance(spec, functools.partial):  # since release 0.17 or so
        layer = spec(config=config)
    else:
        layer = MoELayer(config=config, submodules=spec.submodules)
    layer.set_layer_number(1)
    for index, (name, parameter) in enumerate(layer.named_parameters()):
        own = 0 if "router" in name or "shared" in name else 100 * dist.get_rank()
        make = torch.Generator().manual_seed(7 + index + own)
        parameter.data = (torch.randn(parameter.shape, generator=make) / 4).to(parameter.dtype)
    return layer


def make_input(rank: int, dtype: torch.dtype = torch.float32, sequence: int = SEQUENCE) -> Tensor:
    make = torch.Generator().manual_seed(rank)
    return torch.randn(sequence, BATCH, HIDDEN, generator=make).to(dtype)


def run_layer(layer: Any, x: Tensor) -> dict[str, Tensor]:
    """Output and all gradients of one forward and backward pass, named."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y, _ = layer(x)
    (y.float() * torch.linspace(-1.0, 1.0, y.numel(), device=y.device).view_as(y)).sum().backward()
    results = {"output": y.detach(), "input gradient": x.grad}
    # An expert without tokens may have a gradient of zeros or none.
    grads = {name: p.new_zeros(p.shape) if p.grad is None else p.grad.clone() for name, p in layer.named_parameters()}
    return results | grads
