"""A Transformers model on GPUs: its training step as a CUDA graph, through an overflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ep_comm import EPConfig, StepRunner
from tests.gpu.launch import needs_gpus, run_gpu_ranks

from . import hf_models
from .test_transformers import _missing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(280),
    pytest.mark.skipif(bool(_missing()), reason=_missing() or "Transformers is there"),
]

HIDDEN, STEPS = 64, 12


def train(rank: int, world_size: int, name: str) -> tuple[list[float], list[float], float, int, int, int]:
    """Losses in both modes, the largest difference of a weight, replays, captures and graph launches."""
    from ep_comm.integrations.transformers import parallelize

    losses: dict[str, list[float]] = {}
    weights: dict[str, dict[str, Tensor]] = {}
    for mode in ("eager", "static"):
        model = hf_models.build(name, hidden_size=HIDDEN, intermediate_size=128)
        model.set_experts_implementation("grouped_mm")
        model = model.bfloat16().cuda().train()
        config = EPConfig(
            hf_models.EXPERTS, hf_models.TOP_K, HIDDEN, max_tokens_per_rank=64, mode=mode,
            **({"budget_rows": 16} if mode == "static" else {}),
        )  # fmt: skip
        parallelize(model, dist.group.WORLD, config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)

        def step(ids: Tensor, model: Any = model) -> Tensor:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            for parameter in model.parameters():
                if parameter.grad is not None and not getattr(parameter, "ep_expert", False):
                    dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
            return loss.detach()

        run = StepRunner(step, model=model, optimizer=optimizer, capture="never" if mode == "eager" else "always")
        batches = [hf_models.batch(2 * index + rank, length=32).cuda() for index in range(STEPS)]
        losses[mode] = [float(run(ids)) for ids in batches]
        weights[mode] = {key: value.detach().float() for key, value in model.named_parameters()}
    apart = max(float((weights["static"][key] - value).abs().max()) for key, value in weights["eager"].items())
    run.close()
    return losses["eager"], losses["static"], apart, run.replays, run.captures, run.graph_replays


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@needs_gpus(2)
def test_a_captured_step_trains_as_eager_mode_does(name: str) -> None:
    for eager, static, apart, replays, captures, launches in run_gpu_ranks(train, 2, name):
        assert replays >= 1 and captures >= 1 and launches >= 5
        # BF16, and the order in which the grouped GEMM sums weight gradients depends on where rows stand.
        assert static == pytest.approx(eager, rel=1e-2)
        assert apart < 2e-2
