"""A small MoE model for tests of the step runner: everything that a step can change is in it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ep_comm import Dispatcher, EPConfig

HIDDEN, EXPERTS, TOP_K, TOKENS = 32, 8, 2, 12


class Layer(nn.Module):
    """Router with a load-balancing bias, dispatcher, one matrix an expert, dropout."""

    def __init__(self, config: EPConfig, group: dist.ProcessGroup | None, index: int) -> None:
        super().__init__()
        self.dispatcher = Dispatcher(config, group)
        dispatcher = self.dispatcher
        make = torch.Generator().manual_seed(100 + index)
        self.gate = nn.Parameter(torch.randn(EXPERTS, HIDDEN, generator=make))
        weights = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=make) / HIDDEN**0.5
        first = dispatcher.rank * dispatcher.num_local_experts
        self.experts = nn.Parameter(weights[first : first + dispatcher.num_local_experts].clone())
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("load", torch.zeros(EXPERTS))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x_TH: Tensor) -> Tensor:
        scores_TE = (x_TH @ self.gate.T).float().sigmoid()
        topk_idx = (scores_TE + self.bias).topk(TOP_K).indices
        weights = scores_TE.gather(1, topk_idx)
        rows = self.dispatcher.dispatch(x_TH, topk_idx, weights)
        starts = rows.expert_offsets.tolist()
        out = torch.zeros_like(rows.tokens)
        for expert, (lo, hi) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
            out = torch.cat([out[:lo], torch.tanh(rows.tokens[lo:hi] @ self.experts[expert]), out[hi:]])
        y_TH = x_TH + self.dropout(self.dispatcher.combine(out, rows.handle, apply_weights=True))
        if torch._C._current_graph_task_id() == -1:
            self.load.index_add_(0, topk_idx.flatten(), torch.ones(topk_idx.numel()))
        return y_TH

    @torch.no_grad()
    def update_bias(self) -> None:
        """Move the bias towards balance. After the backward pass: recomputation must see the old one."""
        if dist.is_initialized():
            dist.all_reduce(self.load)
        self.bias += 0.05 * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Model(nn.Module):
    """``depth`` layers; with ``recompute`` every layer is checkpointed."""

    def __init__(
        self, config: EPConfig, depth: int = 2, recompute: bool = False, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, group, index) for index in range(depth))
        self.recompute = recompute

    def forward(self, x_TH: Tensor) -> Tensor:
        for layer in self.layers:
            if self.recompute:
                x_TH = checkpoint(layer, x_TH, use_reentrant=False)
            else:
                x_TH = layer(x_TH)
        return x_TH


def batch(rank: int, step: int, micro_batches: int = 1, tokens: int = TOKENS) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets; the number of tokens varies, and so does how lopsided the routing is."""
    make = torch.Generator().manual_seed(1000 * step + rank)
    out = []
    for _ in range(micro_batches):
        count = int(torch.randint(0, tokens + 1, (), generator=make))
        lean = torch.randn(HIDDEN, generator=make) * (step % 3)
        out.append((torch.randn(count, HIDDEN, generator=make) + lean, torch.randn(count, HIDDEN, generator=make)))
    return out


def step_fn(model: Model) -> Any:
    """Forward, backward over the micro-batches, and the average of the replicated gradients."""

    def step(micro_batches: list[tuple[Tensor, Tensor]]) -> float:
        total = 0.0
        for x, target in micro_batches:
            loss = (model(x) - target).square().sum()
            loss.backward()
            total += float(loss.detach())
        for layer in model.layers:
            if dist.is_initialized():
                dist.all_reduce(layer.gate.grad)
            layer.update_bias()
        return total

    return step


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of model and optimizer, cloned."""
    tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            tensors[f"optimizer {index} {key}"] = torch.as_tensor(value).clone()
    return tensors


def assert_same_state(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Bit equality of two states, NaN included."""
    assert a.keys() == b.keys()
    for name in a:
        same = [tensors[name].contiguous().view(-1).view(torch.uint8) for tensors in (a, b)]
        assert torch.equal(*same), name


def config(mode: str, **changes: Any) -> EPConfig:
    """The configuration that fits :class:`Layer`."""
    values = {
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "hidden_size": HIDDEN,
        "max_tokens_per_rank": TOKENS,
        "alignment": 4,
        "mode": mode,
    }
    return EPConfig(**{**values, **changes})
