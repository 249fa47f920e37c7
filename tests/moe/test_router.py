"""Router: choices and weights by hand, FP32 arithmetic, masks, load counts, balancing by bias and by loss."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ep_comm.errors import ArgumentError, ConfigError
from ep_comm.moe.router import TopKRouter, count_tokens_per_expert, in_backward, update_expert_biases
from tests.harness import run_ranks

PROBS = [[0.1, 0.2, 0.3, 0.4], [0.5, 0.125, 0.25, 0.125]]


def identity_router(num_experts: int, top_k: int, **options: object) -> TopKRouter:
    """A router whose logits are its input: what it should answer can be worked out by hand."""
    router = TopKRouter(num_experts, num_experts, top_k, seed=0, **options)
    with torch.no_grad():
        router.weight.copy_(torch.eye(num_experts))
    return router


def random_tokens(tokens: int, hidden: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed))


def explicit_balance_loss(
    x: torch.Tensor, weight: torch.Tensor, chosen: list[list[int]], score: str, keep: list[bool]
) -> torch.Tensor:
    """The auxiliary loss written out token by token from its definition, in float64."""
    num_experts = weight.shape[0]
    kept = [t for t in range(x.shape[0]) if keep[t]]
    slots = sum(len(chosen[t]) for t in kept)
    loss = torch.zeros((), dtype=torch.float64)
    for e in range(num_experts):
        fraction = sum(chosen[t].count(e) for t in kept) / slots
        mean = torch.zeros((), dtype=torch.float64)
        for t in kept:
            logits = weight.double() @ x[t].double()
            p = torch.exp(logits) if score == "softmax" else 1 / (1 + torch.exp(-logits))
            mean = mean + p[e] / p.sum() / len(kept)
        loss = loss + num_experts * fraction * mean
    return loss


@pytest.mark.parametrize(
    ("normalize", "scale", "expected"),
    [
        (False, 1.0, [[0.4, 0.3], [0.5, 0.25]]),
        (True, 1.0, [[4 / 7, 3 / 7], [2 / 3, 1 / 3]]),
        (True, 2.5, [[10 / 7, 7.5 / 7], [5 / 3, 2.5 / 3]]),
    ],
)
def test_softmax_by_hand(normalize: bool, scale: float, expected: list[list[float]]) -> None:
    router = identity_router(4, 2, normalize=normalize, scale=scale)
    idx, weights = router(torch.tensor(PROBS).log())
    assert idx.dtype == torch.int64 and weights.dtype == torch.float32
    assert idx.tolist() == [[3, 2], [0, 2]]
    torch.testing.assert_close(weights, torch.tensor(expected))


@pytest.mark.parametrize(
    ("normalize", "expected"), [(False, [[0.9, 0.8], [0.3, 0.2]]), (True, [[9 / 17, 8 / 17], [0.6, 0.4]])]
)
def test_sigmoid_by_hand(normalize: bool, expected: list[list[float]]) -> None:
    p = torch.tensor([[0.5, 0.9, 0.8], [0.3, 0.1, 0.2]])
    idx, weights = identity_router(3, 2, score="sigmoid", normalize=normalize)(torch.logit(p))
    assert idx.tolist() == [[1, 2], [0, 2]]
    torch.testing.assert_close(weights, torch.tensor(expected))


def test_bias_chooses_but_does_not_weigh() -> None:
    router = identity_router(4, 2, normalize=False)
    router.expert_bias.copy_(torch.tensor([0.35, 0.0, 0.0, -0.35]))
    idx, weights = router(torch.tensor(PROBS).log())
    assert idx.tolist() == [[0, 2], [0, 2]]
    torch.testing.assert_close(weights, torch.tensor([[0.1, 0.3], [0.5, 0.25]]))


def test_vanished_scores_do_not_divide_by_zero() -> None:
    router = identity_router(3, 2, score="sigmoid")
    x = torch.full((1, 3), -200.0, requires_grad=True)
    _, weights = router(x)
    weights.sum().backward()
    assert weights.isfinite().all() and x.grad.isfinite().all()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_arithmetic_is_fp32_for_bf16_models_and_under_autocast(score: str) -> None:
    router = TopKRouter(32, 8, 2, score=score, seed=1, dtype=torch.bfloat16)
    exact = TopKRouter(32, 8, 2, score=score, seed=1)
    with torch.no_grad():
        exact.weight.copy_(router.weight)
    x = random_tokens(16, 32).bfloat16()
    idx, weights = router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        idx_auto, weights_auto = router(x)
    idx_exact, weights_exact = exact(x.float())
    assert torch.equal(idx, idx_exact) and torch.equal(weights, weights_exact)
    assert torch.equal(idx_auto, idx_exact) and torch.equal(weights_auto, weights_exact)


def test_gradient_against_finite_differences() -> None:
    for options in ({}, {"score": "sigmoid", "scale": 2.5}, {"normalize": False}):
        router = TopKRouter(6, 5, 2, seed=3, **options)
        x = random_tokens(4, 6).requires_grad_()
        pull = random_tokens(4, 2, seed=9)
        (router(x)[1] * pull).sum().backward()
        step = 1e-2
        for t, h in [(0, 0), (2, 5), (3, 1)]:
            ends = []
            for sign in (1, -1):
                moved = x.detach().clone()
                moved[t, h] += sign * step
                ends.append(float((router(moved)[1] * pull).sum().detach()))
            assert math.isclose((ends[0] - ends[1]) / (2 * step), float(x.grad[t, h]), abs_tol=2e-4), options


def test_no_tokens() -> None:
    router = TopKRouter(8, 4, 2, seed=0, aux_loss_coeff=0.1)
    x = torch.zeros(0, 8, requires_grad=True)
    for mask in (None, torch.zeros(0, dtype=torch.bool)):
        idx, weights = router(x, mask)
        assert idx.shape == weights.shape == (0, 2) and idx.dtype == torch.int64
        weights.sum().backward()
    assert x.grad.shape == (0, 8)
    assert torch.equal(router.weight.grad, torch.zeros(4, 8))
    assert router.aux_loss == 0 and router.tokens_per_expert.tolist() == [0] * 4


def test_masked_tokens_go_nowhere_and_do_not_count() -> None:
    x = random_tokens(10, 8).requires_grad_()
    mask = torch.tensor([True, False] * 5)
    whole, part = (TopKRouter(8, 4, 2, seed=0, aux_loss_coeff=0.5) for _ in range(2))
    idx, weights = whole(x, mask)
    idx_part, weights_part = part(x[mask])
    assert (idx[~mask] == -1).all() and (weights[~mask] == 0).all()
    assert torch.equal(idx[mask], idx_part) and torch.equal(weights[mask], weights_part)
    assert torch.equal(whole.tokens_per_expert, part.tokens_per_expert)
    torch.testing.assert_close(whole.aux_loss, part.aux_loss)
    weights.square().sum().backward()
    assert (x.grad[~mask] == 0).all() and (x.grad[mask] != 0).any()
    all_masked = whole(x, torch.zeros(10, dtype=torch.bool))
    assert (all_masked[0] == -1).all() and whole.aux_loss == 0


def test_count_tokens_per_expert() -> None:
    idx = torch.tensor([[0, 2], [2, -1], [2, 2]], dtype=torch.int32)
    assert count_tokens_per_expert(idx.long(), 4).tolist() == [1, 0, 4, 0]


def test_loads_add_up_over_micro_batches_in_training_only() -> None:
    router = identity_router(4, 2)
    router(torch.tensor(PROBS).log())
    assert router.tokens_per_expert.tolist() == [1, 0, 2, 1]
    router(torch.tensor(PROBS).log())
    assert router.tokens_per_expert.tolist() == [2, 0, 4, 2]
    router.eval()
    router(torch.tensor(PROBS).log())
    assert router.tokens_per_expert.tolist() == [2, 0, 4, 2]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_counts_once_and_keeps_gradients(use_reentrant: bool) -> None:
    plain, again = (TopKRouter(8, 4, 2, seed=0, aux_loss_coeff=0.3) for _ in range(2))
    grads = []
    for router, recompute in ((plain, False), (again, True)):
        for seed in (1, 2):
            x = random_tokens(12, 8, seed).requires_grad_()
            if recompute:
                _, weights = checkpoint(router, x, use_reentrant=use_reentrant)
            else:
                _, weights = router(x)
            loss_before = router.aux_loss.clone()
            weights.square().sum().backward()
            assert torch.equal(router.aux_loss, loss_before)
            grads.append(x.grad)
        grads.append(router.weight.grad)
    assert plain.tokens_per_expert.sum() == 2 * 12 * 2
    assert torch.equal(plain.tokens_per_expert, again.tokens_per_expert)
    assert all(torch.equal(a, b) for a, b in zip(grads[:3], grads[3:], strict=True))
    assert not in_backward()


def test_update_bias_by_hand() -> None:
    router = TopKRouter(8, 4, 2, seed=0, bias_update_rate=0.01)
    loads, bias = router.tokens_per_expert, router.expert_bias
    router.tokens_per_expert.copy_(torch.tensor([5, 4, 0, 7]))  # mean 4
    router.update_bias()
    assert torch.equal(router.expert_bias, torch.tensor([-0.01, 0.0, 0.01, -0.01]))
    assert router.tokens_per_expert.tolist() == [0] * 4
    # In place: a captured graph and a roll-back both hold on to these tensors.
    assert router.expert_bias is bias and router.tokens_per_expert is loads


def test_update_bias_is_exact_for_huge_loads() -> None:
    router = TopKRouter(8, 2, 1, seed=0, bias_update_rate=1.0)
    router.tokens_per_expert.copy_(torch.tensor([2**53 + 1, 2**53]))
    router.update_bias()
    assert router.expert_bias.tolist() == [-1.0, 1.0]


def sum_loads_over_ranks(rank: int, world_size: int) -> tuple[list[float], list[float], list[float]]:
    import torch.distributed as dist

    model = torch.nn.ModuleList([TopKRouter(8, 2, 1, seed=0, bias_update_rate=rate) for rate in (0.5, 0.0, 0.25)])
    # Alone, rank 0 would push both biases one way and rank 1 the other.
    for router in model:
        router.tokens_per_expert.copy_(torch.tensor([3, 0] if rank == 0 else [0, 9]))
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    update_expert_biases(model)
    biases = [router.expert_bias.tolist() for router in model]
    model[0].tokens_per_expert.copy_(torch.tensor([3, 0] if rank == 0 else [0, 9]))
    model[0].update_bias(alone)
    return biases, model[0].expert_bias.tolist(), model[1].tokens_per_expert.tolist()


def test_update_bias_sums_over_the_group() -> None:
    results = run_ranks(sum_loads_over_ranks, 2)
    assert [biases for biases, _, _ in results] == [[[0.5, -0.5], [0.0, 0.0], [0.25, -0.25]]] * 2
    assert [alone for _, alone, _ in results] == [[0.0, 0.0], [1.0, -1.0]]
    assert [loads for _, _, loads in results] == [[3, 0], [0, 9]]


def test_bias_balances_a_skewed_router() -> None:
    router = TopKRouter(16, 8, 2, seed=0, bias_update_rate=0.01, score="sigmoid")
    tokens = random_tokens(4096, 16) + 0.7  # a common direction that some experts like much better
    imbalance = []
    for _ in range(60):
        router(tokens)
        imbalance.append(float(router.tokens_per_expert.max() * 8 / router.tokens_per_expert.sum()))
        router.update_bias()
    assert imbalance[0] > 1.8
    assert max(imbalance[-5:]) < 1.15


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("masked", [False, True])
def test_aux_loss_and_its_gradient_are_those_of_the_explicit_loss(score: str, masked: bool) -> None:
    coeff, scale = 0.7, 0.25
    router = TopKRouter(6, 5, 2, score=score, seed=2, aux_loss_coeff=coeff)
    router.aux_loss_scale.fill_(scale)
    keep = [t % 3 != 0 or not masked for t in range(9)]
    x = (random_tokens(9, 6) + 0.4).requires_grad_()
    idx, weights = router(x, torch.tensor(keep) if masked else None)
    (weights * 0).sum().backward()  # nothing but the auxiliary loss

    x_ref = x.detach().clone().requires_grad_()
    weight_ref = router.weight.detach().clone().requires_grad_()
    explicit = explicit_balance_loss(x_ref, weight_ref, idx.tolist(), score, keep)
    (coeff * scale * explicit).backward()
    torch.testing.assert_close(router.aux_loss, (coeff * explicit).float().detach())
    torch.testing.assert_close(x.grad, x_ref.grad, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(router.weight.grad, weight_ref.grad, rtol=1e-4, atol=1e-7)
    assert router.weight.grad.abs().max() > 1e-3


def test_aux_loss_of_even_loads_is_its_coefficient() -> None:
    router = identity_router(4, 1, aux_loss_coeff=0.1)
    router(torch.eye(4) * 3)
    assert math.isclose(float(router.aux_loss), 0.1, rel_tol=1e-6)
    router(torch.eye(4)[:1].expand(4, 4) * 100)  # all tokens to one expert: E times as much
    assert math.isclose(float(router.aux_loss), 0.4, rel_tol=1e-6)


def test_aux_loss_gradient_adds_up_over_micro_batches() -> None:
    router = TopKRouter(6, 4, 2, seed=2, aux_loss_coeff=0.5)
    x = random_tokens(8, 6)
    router.zero_grad()
    (router(x)[1] * 0).sum().backward()
    once = router.weight.grad.clone()
    for _ in range(2):
        (router(x)[1] * 0).sum().backward()
    torch.testing.assert_close(router.weight.grad, 3 * once)


def test_aux_loss_stays_out_of_evaluation() -> None:
    router = TopKRouter(6, 4, 2, seed=2, aux_loss_coeff=0.5).eval()
    (router(random_tokens(8, 6))[1] * 0).sum().backward()
    assert (router.weight.grad == 0).all() and router.aux_loss == 0


def test_dtype_changes_leave_the_bias_in_fp32() -> None:
    router = TopKRouter(8, 4, 2, seed=0, bias_update_rate=0.001)
    router.expert_bias.fill_(1.001)
    moved = router.to(torch.bfloat16)
    assert moved.weight.dtype == torch.bfloat16
    assert moved.expert_bias.dtype == torch.float32 and (moved.expert_bias == torch.tensor(1.001)).all()
    assert moved.tokens_per_expert.dtype == torch.int64
    assert set(router.state_dict()) == {"weight", "expert_bias"}


def test_initial_weight_depends_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = TopKRouter(8, 4, 2, seed=5)
    torch.manual_seed(2)
    assert torch.equal(first.weight, TopKRouter(8, 4, 2, seed=5).weight)
    assert not torch.equal(first.weight, TopKRouter(8, 4, 2, seed=6).weight)
    torch.manual_seed(3)
    one, two = TopKRouter(8, 4, 2), TopKRouter(8, 4, 2)
    torch.manual_seed(3)
    assert torch.equal(one.weight, TopKRouter(8, 4, 2).weight) and not torch.equal(one.weight, two.weight)
    on_meta = TopKRouter(8, 4, 2, seed=5, device="meta").to_empty(device="cpu")
    on_meta.reset_parameters()
    assert torch.equal(first.weight, on_meta.weight) and on_meta.aux_loss_scale == 1


def test_nothing_reads_the_device() -> None:
    # A tensor on the meta device has no values: whatever tried to read one would raise.
    router = TopKRouter(8, 4, 2, seed=0, aux_loss_coeff=0.1, bias_update_rate=0.1, device="meta")
    x = torch.empty(6, 8, device="meta", requires_grad=True)
    idx, weights = router(x, torch.empty(6, dtype=torch.bool, device="meta"))
    weights.sum().backward()
    router.update_bias()
    assert idx.shape == (6, 2) and x.grad.shape == (6, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 5}, "top_k must not exceed num_experts=4, got top_k=5"),
        ({"top_k": 0}, "top_k must be an integer above 0, got 0"),
        ({"score": "tanh"}, "score must be 'softmax' or 'sigmoid', got 'tanh'"),
        ({"bias_update_rate": -1.0}, "bias_update_rate must not be below 0, got -1.0"),
        ({"aux_loss_coeff": float("nan")}, "aux_loss_coeff must not be below 0, got nan"),
    ],
)
def test_bad_configuration(options: dict[str, object], message: str) -> None:
    arguments = {"hidden_size": 8, "num_experts": 4, "top_k": 2, **options}
    with pytest.raises(ConfigError, match=message):
        TopKRouter(**arguments)


def test_bad_arguments() -> None:
    router = TopKRouter(8, 4, 2, seed=0)
    with pytest.raises(ArgumentError, match=r"\[T, hidden_size=8\], got torch.float32 of shape \[3, 7\]"):
        router(torch.zeros(3, 7))
    with pytest.raises(ArgumentError, match=r"floating-point.*got torch.int64"):
        router(torch.zeros(3, 8, dtype=torch.int64))
    with pytest.raises(ArgumentError, match=r"token_mask must be a bool tensor of shape \[T=3\].*\[4\]"):
        router(torch.zeros(3, 8), torch.ones(4, dtype=torch.bool))
