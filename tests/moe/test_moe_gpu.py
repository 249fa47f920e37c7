"""MoE layer on a GPU: agreement with the CPU, poisoned tails, no host sync, a pass in a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import ep_comm
from ep_comm.moe import GroupedExperts, MoELayer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch.cuda sees none"),
]

H, FFN, E, K, TOKENS = 128, 96, 8, 2, 200
DEVICE = "cuda"


def make_layer(mode: str, device: str = DEVICE) -> MoELayer:
    budget = {"budget_rows": 1024} if mode == "static" else {}
    config = ep_comm.EPConfig(num_experts=E, top_k=K, hidden_size=H, max_tokens_per_rank=TOKENS, mode=mode, **budget)
    options = {"aux_loss_coeff": 0.1, "bias_update_rate": 0.01, "shared_ffn_size": 64}
    # Built on the CPU: random numbers of CPU and GPU differ.
    return MoELayer(H, FFN, E, K, config, seed=3, dtype=torch.bfloat16, **options).to(device)


def random_tokens(seed: int, tokens: int = TOKENS) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, H, generator=draw).bfloat16().to(DEVICE)


def forward_backward(layer: MoELayer, x: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    grads = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}


@contextmanager
def syncs_are_errors() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_gpu_agrees_with_cpu() -> None:
    x, grad = random_tokens(0), random_tokens(1)
    on_gpu = forward_backward(make_layer("eager"), x, grad)
    on_cpu = forward_backward(make_layer("eager", "cpu"), x.cpu(), grad.cpu())
    for name, tensor in on_cpu.items():
        error = (on_gpu[name].cpu().float() - tensor.float()).norm() / tensor.float().norm()
        assert error < 0.02, name


@pytest.mark.parametrize("tokens", [TOKENS, 16, 1, 0])
def test_static_is_eager_bit_for_bit(tokens: int) -> None:
    x, grad = random_tokens(0, tokens), random_tokens(1, tokens)
    eager, static = (forward_backward(make_layer(mode), x, grad) for mode in ("eager", "static"))
    for name, tensor in eager.items():
        assert torch.equal(tensor, static[name]), name


@pytest.mark.parametrize("garbage", [0.0, float("nan")])
def test_tail_rows_never_matter_whatever_they_hold(garbage: float) -> None:
    experts = GroupedExperts(5, H, FFN, seed=0, dtype=torch.bfloat16).to(DEVICE)
    offsets = torch.tensor([0, 0, 48, 48, 64, 64], device=DEVICE)
    used, exact = 64, None
    x, grad = random_tokens(0, used), random_tokens(1, used)
    for tail in (0, 1, 16, 300, 5000):
        poison = torch.full((tail, H), garbage, dtype=torch.bfloat16, device=DEVICE)
        experts.zero_grad()
        leaf = torch.cat([x, poison]).requires_grad_()
        y = experts(leaf, offsets)
        y.backward(torch.cat([grad, poison]))
        got = [y[:used].detach(), leaf.grad[:used], *(p.grad.clone() for p in experts.parameters())]
        for idle in (0, 2, 4):
            assert all((p.grad[idle] == 0).all() for p in experts.parameters())
        exact = exact or got
        assert all(torch.equal(a, b) for a, b in zip(got, exact, strict=True)), tail


def test_static_pass_and_bias_update_never_wait_for_the_device() -> None:
    layer = make_layer("static")
    x, grad = random_tokens(0).requires_grad_(), random_tokens(1)
    mask = torch.arange(TOKENS, device=DEVICE) % 3 != 0
    layer(x, mask).backward(grad)  # the first pass may compile kernels
    with syncs_are_errors():
        layer(x, mask).backward(grad)
        layer.router.update_bias()


def test_a_captured_pass_replays_with_new_tokens() -> None:
    layer, reference = make_layer("static"), make_layer("static")
    x, grad = random_tokens(0).requires_grad_(), random_tokens(1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            layer(x).backward(grad)
    torch.cuda.current_stream().wait_stream(stream)
    layer.zero_grad(set_to_none=True)
    x.grad = None
    layer.router.tokens_per_expert.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
        y.backward(grad)
        layer.router.update_bias()
    for seed in (10, 11, 12):
        with torch.no_grad():
            x.copy_(random_tokens(seed))
        graph.replay()
        expected = forward_backward(reference, random_tokens(seed), grad)
        reference.router.update_bias()
        assert torch.equal(y, expected["y"]) and torch.equal(x.grad, expected["x"])
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter.grad, expected[name]), name
        assert torch.equal(layer.router.expert_bias, reference.router.expert_bias)
    # Three updates of 0.01 in either direction leave an odd multiple of it where the load was never even.
    assert layer.router.expert_bias.abs().max() > 0.005
