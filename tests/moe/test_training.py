"""MoE layers under StepRunner: after overflows and replays all state and losses are those of eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import ep_comm
from ep_comm.moe import MoELayer, update_expert_biases
from tests.harness import run_ranks

H, FFN, E, K, TOKENS, STEPS = 16, 24, 8, 2, 24, 6


class Model(nn.Module):
    """Two residual MoE layers with dropout; ``recompute`` checkpoints both."""

    def __init__(self, mode: str, recompute: bool, **options: Any) -> None:
        super().__init__()
        budget = {"budget_rows": 8} if mode == "static" else {}
        config = ep_comm.EPConfig(
            num_experts=E,
            top_k=K,
            hidden_size=H,
            max_tokens_per_rank=TOKENS,
            mode=mode,
            alignment=4,
            **budget,
        )
        self.layers = nn.ModuleList(MoELayer(H, FFN, E, K, config, seed=i, **options) for i in range(2))
        self.dropout = nn.Dropout(0.2)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            x = x + self.dropout(y)
        return x


def micro_batches(rank: int, step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    counts = torch.randint(0, TOKENS + 1, (2,), generator=draw).tolist()
    return [torch.randn(count, H, generator=draw) + 0.5 for count in counts]


def train(rank: int, world_size: int, mode: str, recompute: bool) -> dict[str, Any]:
    """A few steps of two micro-batches; returns all state and how often a step was replayed."""
    torch.manual_seed(5 + rank)
    model = Model(mode, recompute, score="sigmoid", bias_update_rate=0.02, aux_loss_coeff=0.05, shared_ffn_size=8)
    replicated = [p for p in model.parameters() if not getattr(p, "ep_expert", False)]

    def step_fn(batch: list[torch.Tensor]) -> torch.Tensor:
        losses = []
        for x in batch:
            loss = model(x).square().sum() / 100
            loss.backward()
            losses.append(loss.detach())
        for parameter in replicated:
            if world_size > 1:
                dist.all_reduce(parameter.grad)
        update_expert_biases(model)
        return torch.stack(losses)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    runner = ep_comm.StepRunner(step_fn, model=model, optimizer=optimizer)
    losses = [runner(micro_batches(rank, step)) for step in range(STEPS)]
    for layer in model.layers:
        layer.close()
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "state": {name: tensor.detach().clone() for name, tensor in state.items()},
        "losses": torch.stack(losses),
        "replays": runner.replays,
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_static_mode_with_overflows_trains_the_weights_of_eager_mode(world_size: int) -> None:
    runs = [(mode, recompute) for mode in ("eager", "static") for recompute in (False, True)]
    results = {run: run_ranks(train, world_size, *run) for run in runs}
    for rank in range(world_size):
        reference = results["eager", False][rank]
        assert reference["replays"] == 0
        bias = reference["state"]["layers.0.router.expert_bias"]
        assert bias.abs().max() > 0.03  # moved in more than one step
        for run in runs[1:]:
            got = results[run][rank]
            assert torch.equal(got["losses"], reference["losses"]), run
            for name, tensor in reference["state"].items():
                assert torch.equal(got["state"][name], tensor), (run, name)
            assert (got["replays"] > 0) == (run[0] == "static")
