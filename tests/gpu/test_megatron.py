"""Megatron-Core's MoE layer on GPUs: against its all-to-all dispatcher, and a training step as one CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.integrations import megatron_models as models

from .launch import RANKS, needs_gpus, run_gpu_ranks

_WHY = models.missing()
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280), pytest.mark.skipif(bool(_WHY), reason=_WHY)]

# BF16 has 8 bits, and Megatron sums a token's outputs in BF16, where ep_comm does in FP32. In FP32 only the order of
# sums differs.
DTYPES = {torch.float32: ({}, 1e-5), torch.bfloat16: ({"bf16": True, "params_dtype": torch.bfloat16}, 2e-2)}


def compare(rank: int, world_size: int, transport: str) -> int:
    """Outputs and all gradients of one layer, with Megatron's dispatcher and with ep_comm in both modes."""
    from ep_comm.integrations import megatron

    tokens = models.SEQUENCE * models.BATCH
    modes = [{}, {"mode": "static", "max_tokens_per_rank": tokens, "capacity_factor": float(world_size)}]
    compared = 0
    # Once: every parallel state makes some twenty communicators, which NCCL takes its time to close.
    with models.parallel_state(world_size):
        for dtype, (changes, tolerance) in DTYPES.items():
            for settings in modes:
                layer = models.make_layer(models.make_config(num_moe_experts=2 * world_size, **changes)).cuda()
                x = models.make_input(rank, dtype).cuda()
                theirs = models.run_layer(layer, x)
                megatron.use(layer, transport=transport, **settings)
                ours = models.run_layer(layer, x)
                assert layer.ep_comm_dispatcher.transport == transport
                layer.ep_comm_dispatcher.close()
                for key, expected in theirs.items():
                    limit = tolerance * max(1.0, float(expected.abs().max()))
                    difference = float((ours[key] - expected).abs().max())
                    assert difference <= limit, f"{dtype} {settings} {key}: {difference} > {limit}"
                    compared += 1
    return compared


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
@needs_gpus(RANKS)
def test_layer_gives_what_it_gives_with_megatrons_dispatcher(transport: str) -> None:
    assert min(run_gpu_ranks(compare, RANKS, transport)) >= 4 * 6


def train(rank: int, world_size: int, capture: str, settings: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Eight steps of a layer with one expert on a rank, whose rows need no counts on the host."""
    from ep_comm import StepRunner
    from ep_comm.integrations import megatron

    layer = models.make_layer(models.make_config(num_moe_experts=world_size)).cuda()
    megatron.use(layer, **settings)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05, fused=True)

    def step(x: Tensor) -> Tensor:
        y, _ = layer(x)
        loss = y.square().mean()
        loss.backward()
        dist.all_reduce(layer.router.weight.grad)
        return loss.detach()

    runner = StepRunner(step, model=layer, optimizer=optimizer, capture=capture)
    for index in range(8):
        runner(models.make_input(rank + world_size * index).cuda())
    layer.ep_comm_dispatcher.close()
    return {name: p.detach().cpu().clone() for name, p in layer.named_parameters()}, runner


def capture_steps(rank: int, world_size: int) -> tuple[bool, int, int]:
    static = {"mode": "static", "max_tokens_per_rank": models.SEQUENCE * models.BATCH, "expert_counts": "device"}
    with models.parallel_state(world_size):
        plain, _ = train(rank, world_size, "never", {**static, "capacity_factor": float(world_size)})
        graph, runner = train(rank, world_size, "always", {**static, "capacity_factor": float(world_size)})
        same = all(torch.equal(plain[name], graph[name]) for name in plain)
        eager, _ = train(rank, world_size, "never", {})
        replayed, grown = train(rank, world_size, "auto", {**static, "capacity_factor": 0.3})
    for name, expected in eager.items():
        torch.testing.assert_close(replayed[name], expected, rtol=1e-3, atol=1e-4)
    return same, runner.graph_replays, grown.replays


@needs_gpus(RANKS)
def test_training_step_is_one_graph() -> None:
    for same, graph_replays, replays in run_gpu_ranks(capture_steps, RANKS):
        assert same
        assert graph_replays >= 4 and replays >= 1
