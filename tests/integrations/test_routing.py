"""Routing replay: the recorded experts, the present weights and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ep_comm import ArgumentError, ConfigError, EPConfig, EPError
from ep_comm.integrations.routing import RoutingReplay
from ep_comm.moe import MoELayer, TopKRouter

HIDDEN, EXPERTS, TOP_K = 16, 8, 3


def make(**changes: Any) -> tuple[TopKRouter, RoutingReplay]:
    router = TopKRouter(HIDDEN, EXPERTS, TOP_K, seed=1, **changes)
    return router, RoutingReplay({"r": router}, num_experts=EXPERTS, top_k=TOP_K)


def tokens(seed: int, count: int = 5) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def change(router: TopKRouter) -> None:
    with torch.no_grad():
        router.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(9)))


def test_replayed_experts_with_present_weights() -> None:
    router, routing = make()
    with routing.record():
        first, second = router(tokens(0))[0], router(tokens(1))[0]
    change(router)
    assert not torch.equal(router(tokens(0))[0], first)
    with routing.replay():
        (idx_a, weights_a), (idx_b, _) = router(tokens(0)), router(tokens(1))
    assert torch.equal(idx_a, first) and torch.equal(idx_b, second)
    probabilities = (tokens(0) @ router.weight.T).softmax(-1).gather(1, first)
    torch.testing.assert_close(weights_a, probabilities / probabilities.sum(-1, keepdim=True))
    weights_a[:, 0].sum().backward()
    assert router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("replaying", [False, True])
def test_recomputation_gets_the_choice_of_its_forward_pass(replaying: bool) -> None:
    router, routing = make()
    with routing.record():
        first = router(tokens(0))[0]
    change(router)
    seen: list[Tensor] = []

    def watched(x: Tensor) -> Tensor:
        idx, weights = router(x)
        seen.append(idx)
        return weights * torch.arange(1.0, TOP_K + 1)

    with routing.replay() if replaying else routing.record():
        for _ in range(1 if replaying else 2):
            checkpoint(watched, tokens(0), use_reentrant=False).sum().backward()
    assert len(seen) == 2 * (1 if replaying else 2)
    assert all(torch.equal(idx, seen[0]) for idx in seen)
    assert torch.equal(seen[0], first) == replaying
    assert len(routing.choices["r"]) == (1 if replaying else 2)


def test_layer_replays_to_the_bit_and_moves_between_models() -> None:
    config = EPConfig(num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, max_tokens_per_rank=8)

    def build() -> tuple[MoELayer, RoutingReplay]:
        layer = MoELayer(HIDDEN, 32, EXPERTS, TOP_K, config, seed=2)
        return layer, RoutingReplay({"l": layer.router}, num_experts=EXPERTS, top_k=TOP_K)

    (rollout, recorded), (training, replayed) = build(), build()
    with recorded.record():
        expected = rollout(tokens(0))
    training.router.expert_bias.fill_(0.0)[EXPERTS // 2 :] = 10.0
    assert not torch.equal(training(tokens(0)), expected)
    replayed.load_state_dict(recorded.state_dict())
    with replayed.replay():
        assert torch.equal(training(tokens(0)), expected)
    replayed.close()
    assert not torch.equal(training(tokens(0)), expected)


@pytest.mark.parametrize(
    ("error", "match", "use"),
    [
        (EPError, "router r: call 2 cannot be replayed, 1 were recorded", lambda r: (r(tokens(0)), r(tokens(0)))),
        (ArgumentError, "router r: call 1 has scores of shape \\[4, 8\\]", lambda r: r(tokens(0, 4))),
    ],
)
def test_what_cannot_be_replayed(error: type[Exception], match: str, use: Callable[[TopKRouter], Any]) -> None:
    router, routing = make()
    with routing.record():
        router(tokens(0))
    with pytest.raises(error, match=match), routing.replay():
        use(router)


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        RoutingReplay({}, num_experts=4, top_k=2)
    with pytest.raises(ConfigError, match="top_k must be from 1 to num_experts=4"):
        RoutingReplay({"r": torch.nn.Identity()}, num_experts=4, top_k=5)
    other = torch.nn.Identity()
    routing = RoutingReplay({"other": other}, num_experts=4, top_k=2)
    with pytest.raises(EPError, match="router other: no torch.topk over 4 experts with k=2"), routing.record():
        other(torch.ones(1))
    with pytest.raises(ConfigError, match=r"routers \['x'\], here are \['other'\]"):
        routing.load_state_dict({"x": []})
    with pytest.raises(EPError, match="nested"), routing.record(), routing.replay():
        pass
