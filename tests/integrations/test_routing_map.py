"""Routing maps as slots, and experts that are split over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ep_comm import Dispatcher, EPConfig
from ep_comm.integrations.routing_map import expert_slots, on_all_tensor_ranks
from tests.harness import run_ranks

TENSOR, LOCAL, EXPERTS, TOP_K, HIDDEN, TOKENS = 2, 2, 4, 2, 8, 5


def test_slots_are_the_mapped_experts() -> None:
    mapped = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 1]]).bool()
    probs = torch.tensor([[0.9, 0.25, 0, 0.75], [0, 0, 0, 0.5], [1, 1, 1, 1], [0, 0, 0, 1]]).requires_grad_()
    idx, weights = expert_slots(mapped, probs, 2)
    # Expert 2 of the second token and expert 0 of the last have the probability 0 and stay.
    assert idx.tolist() == [[1, 3], [2, -1], [-1, -1], [0, 3]]
    assert weights.tolist() == [[0.25, 0.75], [0, 0], [0, 0], [0, 1]]
    weights.sum().backward()
    assert probs.grad.tolist() == mapped.float().tolist()


def test_a_token_with_too_many_experts_gets_an_id_that_does_not_exist() -> None:
    mapped = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 1]]).bool()
    idx, _ = expert_slots(mapped, torch.ones(2, 4), 2)
    assert idx.tolist() == [[0, 4], [0, 3]]


def test_no_tokens() -> None:
    idx, weights = expert_slots(torch.zeros(0, 4).bool(), torch.zeros(0, 4), 2)
    assert idx.shape == weights.shape == (0, 2)


def test_every_tensor_rank_gets_the_token() -> None:
    # Two ranks hold the halves of experts 0 and 1, the next two those of 2 and 3.
    idx, weights = on_all_tensor_ranks(torch.tensor([[1, 2], [3, -1]]), torch.tensor([[0.5, 0.25], [1.0, 0.0]]), 2, 2)
    assert idx.tolist() == [[1, 4, 3, 6], [5, -1, 7, -1]]
    assert weights.tolist() == [[0.5, 0.25, 0.5, 0.25], [1, 0, 1, 0]]


def test_split_experts_give_what_whole_experts_give() -> None:
    for rank, (y, grads) in enumerate(run_ranks(split_experts, 4)):
        x, mapped, probs = inputs(rank)
        x.requires_grad_(), probs.requires_grad_()
        w1, w2 = matrices()
        outputs = torch.stack([torch.relu(x @ w1[e]) @ w2[e] for e in range(EXPERTS)], dim=1)
        expected = (outputs * (probs * mapped).unsqueeze(-1)).sum(dim=1)
        torch.testing.assert_close(y, expected.detach(), rtol=1e-5, atol=1e-5)
        for got, want in zip(grads, torch.autograd.grad(expected.sum(), [x, probs]), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def split_experts(rank: int, world_size: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Each expert's inner dimension on two ranks, whose results combine adds up."""
    config = EPConfig(EXPERTS * TENSOR, TOP_K * TENSOR, HIDDEN, max_tokens_per_rank=TOKENS, alignment=1)
    dispatcher = Dispatcher(config, dist.group.WORLD)
    x, mapped, probs = inputs(rank)
    x.requires_grad_(), probs.requires_grad_()
    slots = on_all_tensor_ranks(*expert_slots(mapped, probs, TOP_K), LOCAL, TENSOR)
    rows = dispatcher.dispatch(x, *slots)
    w1, w2 = (w[rank // TENSOR * LOCAL :][:LOCAL] for w in matrices())
    half = slice(rank % TENSOR * HIDDEN // 2, (rank % TENSOR + 1) * HIDDEN // 2)
    parts = rows.tokens.split(rows.tokens_per_expert.tolist())
    output = torch.cat([torch.relu(part @ a[:, half]) @ b[half] for part, a, b in zip(parts, w1, w2, strict=True)])
    y = dispatcher.combine(output, rows.handle, apply_weights=True)
    return y.detach(), torch.autograd.grad(y.sum(), [x, probs])


def matrices() -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(9)
    return tuple(torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=make) for _ in range(2))


def inputs(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(rank)
    probs = torch.rand(TOKENS, EXPERTS, generator=make)
    mapped = torch.zeros(TOKENS, EXPERTS).scatter(1, probs.topk(TOP_K).indices, 1.0).bool()
    return torch.randn(TOKENS, HIDDEN, generator=make), mapped & (probs > 0.4), probs
