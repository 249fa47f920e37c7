"""Training steps as CUDA graphs: bitwise eager's weights, silent under the sync watch, through overflows."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ep_comm import EPConfig, EPError, MoELayer, StepRunner, update_expert_biases

from .launch import RANKS, needs_gpus, run_gpu_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]

HIDDEN, TOKENS, EXPERTS = 256, 128, 8


class Model(nn.Module):
    def __init__(self, config: EPConfig) -> None:
        super().__init__()
        self.inp = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(
            MoELayer(HIDDEN, 128, EXPERTS, 2, config, bias_update_rate=0.02, seed=index) for index in range(2)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = x + self.dropout(layer(x))
        return x


def make_batch(rank: int, step: int) -> Tensor:
    """Every few steps the tokens are alike, so that most go to the same experts."""
    make = torch.Generator().manual_seed(100 * step + rank)
    lean = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(step)) * (3.0 if step % 7 == 5 else 0.1)
    return (torch.randn(TOKENS, HIDDEN, generator=make) + lean).bfloat16().cuda()


# A long run for a session at the machine: EP_COMM_TEST_STEPS=1000.
STEPS = int(os.environ.get("EP_COMM_TEST_STEPS", "40"))


def train(
    rank: int,
    steps: int,
    mode: str,
    capture: str,
    transport: str,
    fused: bool,
    check: str = "every_step",
    ragged: bool = False,
) -> tuple[dict[str, Tensor], StepRunner]:
    config = EPConfig(
        num_experts=EXPERTS,
        top_k=2,
        hidden_size=HIDDEN,
        max_tokens_per_rank=TOKENS,
        mode=mode,
        budget_rows=16 if mode == "static" else None,
        transport=transport,
        dispatch_forward_dtype="mxfp8",
        combine_backward_dtype="mxfp8",
    )
    torch.manual_seed(5)
    model = Model(config).bfloat16().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused, capturable=True)
    shared = [p for p in model.parameters() if not getattr(p, "ep_expert", False)]

    def step(x: Tensor) -> Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        for parameter in shared:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        update_expert_biases(model, dist.group.WORLD)
        return loss.detach()

    # No headroom: every new peak is another overflow.
    run = StepRunner(step, model=model, optimizer=optimizer, capture=capture, check=check, headroom=0.0)
    torch.manual_seed(77 + rank)
    small: dict[str, Any] = {}
    for index in range(steps):
        x = make_batch(rank, index)
        run(x[index % TOKENS :] if ragged and rank else x)
        if mode == "static" and index % 25 == 0:  # back to the budgets of the start: overflows again
            small = small or run.state_dict()["layers"]
            run.load_state_dict({**run.state_dict(), "layers": small})
    run.flush()
    state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    for number, values in optimizer.state_dict()["state"].items():
        state |= {f"{number} {key}": torch.as_tensor(value).cpu().clone() for key, value in values.items()}
    for layer in model.layers:
        layer.close()
    return state, run


def compare(
    rank: int,
    world_size: int,
    steps: int,
    transport: str,
    fused: bool,
    check: str = "every_step",
    ragged: bool = False,
) -> tuple[int, int, int]:
    want, _ = train(rank, steps, "eager", "never", transport, fused, ragged=ragged)
    got, run = train(rank, steps, "static", "auto", transport, fused, check, ragged)
    assert run.steps == steps and run.pending == 0
    assert want.keys() == got.keys()
    different = [name for name in want if not torch.equal(want[name], got[name])]
    assert not different, f"{len(different)} of {len(want)} differ: {different[:4]}; {run.replays} replays"
    return run.replays, run.captures, run.graph_replays


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
@pytest.mark.parametrize(("fused", "check"), [(True, "every_step"), (False, "every_step"), (True, "deferred")])
@needs_gpus(RANKS)
def test_captured_training_equals_eager(transport: str, fused: bool, check: str) -> None:
    results = run_gpu_ranks(compare, RANKS, STEPS, transport, fused, check)
    replays, captures, launches = results[0]
    assert len(set(results)) == 1, results
    assert replays >= 2 and captures >= 1 and launches >= 15, results


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
@pytest.mark.parametrize("check", ["every_step", "deferred"])
@needs_gpus(RANKS)
def test_ranks_with_and_without_a_graph_train_together(transport: str, check: str) -> None:
    """Batches of rank 0 have one shape; the others have a new one in every step, which is never captured."""
    first, *others = run_gpu_ranks(compare, RANKS, 40, transport, True, check, True)
    assert first[0] >= 2 and first[1] >= 1 and first[2] >= 15, first
    assert all(other == (first[0], 0, 0) for other in others), (first, others)


@needs_gpus(RANKS)
def test_captured_training_over_the_network() -> None:
    """NCCL's network path inside the graph."""
    env = {"NCCL_HOSTID": "host{rank}"}
    results = run_gpu_ranks(compare, RANKS, 40, "collective", True, "every_step", env=env)
    assert len(set(results)) == 1 and results[0][1] >= 1 and results[0][2] >= 15, results


@needs_gpus(4)
def test_captured_training_on_two_hosts() -> None:
    """Both hops of the hierarchical transport inside the graph."""
    env = {"NCCL_HOSTID": "host{half}"}
    results = run_gpu_ranks(compare, 4, 40, "hierarchical", True, "every_step", env=env)
    assert len(set(results)) == 1 and results[0][1] >= 1 and results[0][2] >= 15, results


@needs_gpus(1)
def test_captured_training_on_one_gpu() -> None:
    ((replays, captures, launches),) = run_gpu_ranks(compare, 1, 40, "auto", True, "deferred")
    assert captures >= 1 and launches >= 15


def silent(rank: int, world_size: int, transport: str, check: str) -> int:
    """Steps on budgets that fit, under the watch that turns every hidden wait into an error."""
    config = EPConfig(
        num_experts=EXPERTS,
        top_k=2,
        hidden_size=HIDDEN,
        max_tokens_per_rank=TOKENS,
        mode="static",
        capacity_factor=float(world_size),
        transport=transport,
    )
    model = Model(config).bfloat16().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)

    def step(x: Tensor) -> Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        return loss.detach()

    run = StepRunner(step, model=model, optimizer=optimizer, capture="always", check=check)
    batches = [make_batch(rank, index) for index in range(8)]
    for index, x in enumerate(batches):
        with contextlib.ExitStack() as stack:
            if index >= 4:
                torch.cuda.set_sync_debug_mode("error")
                stack.callback(torch.cuda.set_sync_debug_mode, "default")
            run(x)
    run.close()
    assert run.replays == 0
    for layer in model.layers:
        layer.close()
    return run.graph_replays


@pytest.mark.parametrize(("transport", "check"), [("collective", "every_step"), ("symmetric", "deferred")])
@needs_gpus(RANKS)
def test_captured_steps_never_wait_behind_the_scenes(transport: str, check: str) -> None:
    assert run_gpu_ranks(silent, RANKS, transport, check) == [6] * RANKS


def capture_eager(rank: int, world_size: int) -> str:
    config = EPConfig(num_experts=EXPERTS, top_k=2, hidden_size=HIDDEN, max_tokens_per_rank=TOKENS)
    model = Model(config).bfloat16().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)
    run = StepRunner(
        lambda x: model(x).float().square().mean().backward(), model=model, optimizer=optimizer, capture="always"
    )
    try:
        for index in range(4):
            run(make_batch(rank, index))
    except EPError as error:
        return str(error)
    return "no error"


@needs_gpus(1)
def test_eager_dispatchers_cannot_be_captured() -> None:
    (message,) = run_gpu_ranks(capture_eager, 1)
    assert "capture='always'" in message and "eager mode takes part; use mode='static' everywhere" in message


def other_shapes(rank: int, world_size: int) -> Any:
    """Batches of two shapes: each has its own graph, and the results are those of no graph."""
    config = EPConfig(
        num_experts=EXPERTS, top_k=2, hidden_size=HIDDEN, max_tokens_per_rank=TOKENS, mode="static", capacity_factor=2.0
    )
    losses: dict[str, list[float]] = {}
    for capture in ("never", "always"):
        torch.manual_seed(5)
        model = Model(config).bfloat16().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)

        def step(x: Tensor, model: Model = model) -> Tensor:
            loss = model(x).float().square().mean()
            loss.backward()
            return loss.detach()

        run = StepRunner(step, model=model, optimizer=optimizer, capture=capture)
        torch.manual_seed(6)
        losses[capture] = [float(run(make_batch(rank, index)[: 128 - 28 * (index % 2)])) for index in range(12)]
    return losses["never"] == losses["always"], run.captures


@needs_gpus(1)
def test_batches_of_another_shape_get_another_graph() -> None:
    assert run_gpu_ranks(other_shapes, 1) == [(True, 2)]
