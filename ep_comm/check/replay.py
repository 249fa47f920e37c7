"""Overflow and replay: a few training steps from far too small budgets must give the bits of eager mode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..config import EPConfig
from ..dispatcher import Dispatcher
from ..distributed import Env
from ..moe import MoELayer
from ..runner import StepRunner

__all__ = ["check_replay"]

_HIDDEN_SIZE, _FFN_SIZE, _TOKENS, _LAYERS, _STEPS = 64, 64, 32, 2, 5


def check_replay(
    env: Env, transport: str, capture: str, prepare: Callable[[Dispatcher], None] | None = None
) -> dict[str, Any]:
    """Train twice, in static mode from one row and in eager mode. Collective.

    Returns:
        ``steps``, ``replays``, ``captures``, and in ``wrong`` what differs on this rank, empty if nothing does.
    """
    with _deterministic(env):
        static, runner = _train(env, transport, "static", capture, prepare)
        eager, _ = _train(env, transport, "eager", "never", prepare)
    differing = [name for name in eager if not _same_bits(static[name], eager[name])]
    wrong = ""
    if differing:
        wrong = f"{len(differing)} of {len(eager)} tensors differ from eager mode, first {differing[0]}"
    elif runner.replays == 0:
        wrong = "no step overflowed, although budgets began at one segment"
    return {
        "transport": transport,
        "steps": runner.steps,
        "replays": runner.replays,
        "captures": runner.captures,
        "wrong": wrong,
    }


def _train(
    env: Env, transport: str, mode: str, capture: str, prepare: Callable[[Dispatcher], None] | None
) -> tuple[dict[str, Tensor], StepRunner]:
    num_experts = 2 * env.world_size
    config = EPConfig(
        num_experts=num_experts,
        top_k=2,
        hidden_size=_HIDDEN_SIZE,
        max_tokens_per_rank=_TOKENS,
        mode=mode,
        budget_rows=1,
        dispatch_forward_dtype="mxfp8",
        combine_backward_dtype="mxfp8",
        transport=transport,
    )
    dtype = torch.bfloat16 if env.device.type == "cuda" else torch.float32
    layers = [
        MoELayer(
            _HIDDEN_SIZE,
            _FFN_SIZE,
            num_experts,
            2,
            config,
            env.group,
            dtype=dtype,
            device=env.device,
            seed=index,
            name=f"{transport} {mode} layer {index}",
        )
        for index in range(_LAYERS)
    ]
    if prepare is not None:
        for layer in layers:
            prepare(layer.dispatcher)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x_TH: Tensor) -> Tensor:
        loss = (model(x_TH) - x_TH).float().square().mean()
        loss.backward()
        return loss.detach()

    runner = StepRunner(step, model=model, optimizer=optimizer, group=env.group, capture=capture)
    make = torch.Generator().manual_seed(env.rank)
    for _ in range(_STEPS):
        runner(torch.randn(_TOKENS, _HIDDEN_SIZE, generator=make).to(env.device, dtype))
    state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    runner.close()
    for layer in layers:
        layer.dispatcher.close()
    return state, runner


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


@contextmanager
def _deterministic(env: Env) -> Any:
    """Some GPU kernels sum in an order that changes from run to run."""
    if env.device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill
