"""MoELayer: against a loop over experts in float64, over ranks, in both modes, recomputed, masked, empty."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ep_comm
from ep_comm.errors import ArgumentError, ConfigError
from ep_comm.moe import MoELayer, update_expert_biases
from tests.harness import run_ranks

H, FFN, E, K, TOKENS = 32, 24, 8, 2, 40


def make_config(mode: str = "eager", **options: Any) -> ep_comm.EPConfig:
    if mode == "static":
        options = {"budget_rows": 400, **options}
    fields = {"num_experts": E, "top_k": K, "hidden_size": H, "max_tokens_per_rank": TOKENS, **options}
    return ep_comm.EPConfig(mode=mode, **fields)


def make_layer(mode: str = "eager", config: dict[str, Any] | None = None, **options: Any) -> MoELayer:
    return MoELayer(H, FFN, E, K, make_config(mode, **(config or {})), **{"seed": 3, **options})


def random_tokens(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(tokens, H, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass
class Pass:
    """What one forward and backward pass gave."""

    y: torch.Tensor
    x_grad: torch.Tensor
    grads: dict[str, torch.Tensor]

    def tensors(self) -> list[torch.Tensor]:
        return [self.y, self.x_grad, *self.grads.values()]


def forward_backward(
    layer: MoELayer, x: torch.Tensor, mask: torch.Tensor | None = None, recompute: bool | None = None
) -> Pass:
    """A pass with a fixed incoming gradient; ``recompute`` is checkpoint's use_reentrant, None: without."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x, mask) if recompute is None else checkpoint(layer, x, mask, use_reentrant=recompute)
    y.backward(random_tokens(x.numel() // H, seed=77, dtype=y.dtype).view(y.shape))
    return Pass(y.detach(), x.grad, {name: p.grad.clone() for name, p in layer.named_parameters()})


def assert_equal(first: Pass, second: Pass) -> None:
    names = ["y", "x", *first.grads]
    for name, a, b in zip(names, first.tensors(), second.tensors(), strict=True):
        assert torch.equal(a, b), name


def loop_in_float64(layer: MoELayer, x: torch.Tensor, score: str, normalize: bool, scale: float) -> Pass:
    """The layer written out token by token; only the choice of experts is taken from the router."""
    chosen = layer.router(x)[0].tolist()
    leaf = x.detach().double().requires_grad_()
    weights = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}

    def swiglu(row: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = (row @ gate_up).chunk(2)
        return (gate * torch.sigmoid(gate) * up) @ down

    tokens = []
    for t, row in enumerate(leaf):
        logits = weights["router.weight"] @ row
        scores = torch.exp(logits) / torch.exp(logits).sum() if score == "softmax" else torch.sigmoid(logits)
        total = sum(scores[e] for e in chosen[t]) if normalize else 1.0
        out = torch.zeros(H, dtype=torch.float64)
        for e in chosen[t]:
            y = swiglu(row, weights["experts.gate_up_proj"][e], weights["experts.down_proj"][e])
            out = out + scale * scores[e] / total * y
        if layer.shared is not None:
            out = out + swiglu(row, weights["shared.gate_up_proj"].T, weights["shared.down_proj"].T)
        tokens.append(out)
    y = torch.stack(tokens)
    y.backward(random_tokens(len(chosen), seed=77).to(x.dtype).double())
    return Pass(y.detach(), leaf.grad, {name: w.grad for name, w in weights.items()})


def assert_close(got: Pass, reference: Pass, tolerance: float) -> None:
    names = ["y", "x", *got.grads]
    for name, a, b in zip(names, got.tensors(), reference.tensors(), strict=True):
        error = float((a.double() - b).abs().max() / b.abs().max())
        assert error < tolerance, f"{name}: {error}"


ROUTERS = [
    {"score": "softmax", "normalize": True, "scale": 1.0},
    {"score": "softmax", "normalize": False, "scale": 1.0},
    {"score": "sigmoid", "normalize": True, "scale": 2.5},
]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("mode", ["eager", "static"])
def test_against_a_loop_in_float64(router: dict[str, Any], mode: str) -> None:
    layer = make_layer(mode, shared_ffn_size=16, **router)
    x = random_tokens(TOKENS)
    assert_close(forward_backward(layer, x), loop_in_float64(layer, x, **router), 1e-5)


def test_bf16_against_the_loop() -> None:
    layer = make_layer(dtype=torch.bfloat16, shared_ffn_size=16)
    assert layer.router.weight.dtype == torch.float32
    x = random_tokens(TOKENS, dtype=torch.bfloat16)
    got = forward_backward(layer, x)
    assert got.y.dtype == torch.bfloat16
    assert_close(got, loop_in_float64(layer, x, **ROUTERS[0]), 4e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config", [{}, {"alignment": 1}, {"alignment": 128, "budget_rows": 1024}, {"zero_tail": False}]
)
def test_static_is_eager_bit_for_bit(dtype: torch.dtype, config: dict[str, Any]) -> None:
    options = {"dtype": dtype, "shared_ffn_size": 16, "aux_loss_coeff": 0.1}
    eager_config = {name: value for name, value in config.items() if name != "budget_rows"}
    eager, static = make_layer("eager", eager_config, **options), make_layer("static", config, **options)
    for seed, tokens in enumerate((TOKENS, 7, 0, 1)):
        x = random_tokens(tokens, seed, dtype)
        assert_equal(forward_backward(eager, x), forward_backward(static, x))
    assert not static.dispatcher.overflowed


@pytest.mark.parametrize("mode", ["eager", "static"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_gives_the_same_gradients_and_counts_once(mode: str, use_reentrant: bool) -> None:
    plain, again = (make_layer(mode, aux_loss_coeff=0.1, shared_ffn_size=16) for _ in range(2))
    x = random_tokens(TOKENS)
    mask = torch.arange(TOKENS) % 5 != 0
    assert_equal(forward_backward(plain, x, mask), forward_backward(again, x, mask, recompute=use_reentrant))
    assert torch.equal(plain.router.tokens_per_expert, again.router.tokens_per_expert)
    assert again.router.tokens_per_expert.sum() == int(mask.sum()) * K


def test_masked_tokens_get_only_the_shared_expert() -> None:
    x = random_tokens(TOKENS)
    mask = torch.arange(TOKENS) % 3 != 0
    layer = make_layer(shared_ffn_size=16)
    y = layer(x, mask)
    assert torch.equal(y[~mask], layer.shared(x)[~mask])
    bare = make_layer()
    masked = forward_backward(bare, x, mask)
    assert (masked.y[~mask] == 0).all() and (masked.x_grad[~mask] == 0).all()
    # Garbage in the masked tokens changes no other token.
    other = torch.where(mask[:, None], x, 100.0)
    assert_equal(masked, forward_backward(bare, other, mask))
    assert (bare.router.tokens_per_expert.sum()) == 2 * int(mask.sum()) * K


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_no_tokens_and_leading_dimensions(mode: str) -> None:
    layer = make_layer(mode, shared_ffn_size=16, aux_loss_coeff=0.1)
    empty = forward_backward(layer, random_tokens(0).view(0, 5, H))
    assert empty.y.shape == empty.x_grad.shape == (0, 5, H)
    assert all((grad == 0).all() for grad in empty.grads.values())
    x = random_tokens(TOKENS)
    mask = torch.arange(TOKENS) % 3 != 0
    flat = forward_backward(layer, x, mask)
    folded = forward_backward(layer, x.view(2, 4, 5, H), mask.view(2, 4, 5))
    assert folded.y.shape == folded.x_grad.shape == (2, 4, 5, H)
    assert torch.equal(folded.y.view(-1, H), flat.y) and torch.equal(folded.x_grad.view(-1, H), flat.x_grad)
    assert all(torch.equal(flat.grads[name], grad) for name, grad in folded.grads.items())


def test_autocast_with_fp32_weights() -> None:
    layer, rounded = make_layer(shared_ffn_size=16), make_layer(shared_ffn_size=16, dtype=torch.bfloat16)
    x = random_tokens(TOKENS).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().square().mean().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())
    # The router sees the FP32 tokens, the experts the rounded ones.
    idx, weights = layer.router(x)
    d = rounded.dispatcher.dispatch(x.bfloat16(), idx, weights)
    reference = rounded.dispatcher.combine(rounded.experts(d.tokens, d.expert_offsets), d.handle, True)
    assert torch.equal(y, reference + rounded.shared(x.bfloat16()))


def test_bias_balancing_spreads_the_load() -> None:
    layer = make_layer("static", {"max_tokens_per_rank": 1024, "budget_rows": 2400}, bias_update_rate=0.01)
    x = random_tokens(1024) + 0.5
    imbalance = []
    for _ in range(80):
        layer(x)
        load = layer.router.tokens_per_expert
        imbalance.append(float(load.max() * E / load.sum()))
        update_expert_biases(layer)
    assert imbalance[0] > 1.8 and max(imbalance[-5:]) < 1.2


# -- two ranks ---------------------------------------------------------------------------------------


def tokens_of_ranks(counts: list[int]) -> list[torch.Tensor]:
    return list(random_tokens(sum(counts)).split(counts))


def two_ranks(
    rank: int, world_size: int, counts: list[int], options: dict[str, Any], config: dict[str, Any]
) -> dict[str, Any]:
    x = tokens_of_ranks(counts)[rank]
    eager, static = make_layer("eager", config, **options), make_layer("static", config, **options)
    start = {name: p.detach().clone() for name, p in eager.named_parameters()}
    first, second = forward_backward(eager, x), forward_backward(static, x)
    again = [forward_backward(layer, x, recompute=way) for layer in (eager, static) for way in (False, True)]
    for other in (second, *again):
        assert_equal(first, other)
    overflowed = static.dispatcher.overflowed
    loads = eager.router.tokens_per_expert
    eager.close()
    static.close()
    return {"pass": first, "start": start, "overflowed": overflowed, "load": loads.tolist()}


@pytest.mark.parametrize("counts", [[23, 17], [0, 40], [1, 0], [0, 0]])
def test_two_ranks_are_one_in_both_modes_and_recomputed(counts: list[int]) -> None:
    options = {"shared_ffn_size": 16, "score": "sigmoid", "scale": 2.5}
    results = run_ranks(two_ranks, 2, counts, options, {})
    whole = make_layer("eager", **options)
    for rank, result in enumerate(results):
        mine = slice(rank * E // 2, (rank + 1) * E // 2)
        for name, weight in whole.named_parameters():
            expected = weight[mine] if name.startswith("experts.") else weight
            assert torch.equal(result["start"][name], expected), name
        assert not result["overflowed"]
        # Counted by the first pass and by the two recomputed ones, once each.
        assert sum(result["load"]) == 3 * counts[rank] * K

    # The incoming gradient is drawn for each rank's token count, so the whole gets the ranks' side by side.
    x = torch.cat(tokens_of_ranks(counts)).requires_grad_()
    y = whole(x)
    y.backward(torch.cat([random_tokens(count, seed=77) for count in counts]))
    passes = [result["pass"] for result in results]
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.cat([p.y for p in passes]), y.detach(), **tolerance)
    torch.testing.assert_close(torch.cat([p.x_grad for p in passes]), x.grad, **tolerance)
    for name, parameter in whole.named_parameters():
        grads = [p.grads[name] for p in passes]
        if getattr(parameter, "ep_expert", False):
            torch.testing.assert_close(torch.cat(grads), parameter.grad, **tolerance)
        else:
            torch.testing.assert_close(grads[0] + grads[1], parameter.grad, **tolerance)


def test_two_ranks_with_mxfp8_on_the_wire() -> None:
    wire = {"dispatch_forward_dtype": "mxfp8", "combine_backward_dtype": "mxfp8"}
    counts = [23, 17]
    coded = [r["pass"] for r in run_ranks(two_ranks, 2, counts, {}, wire)]
    plain = [r["pass"] for r in run_ranks(two_ranks, 2, counts, {}, {})]
    for a, b in zip(coded, plain, strict=True):
        for got, exact in zip(a.tensors(), b.tensors(), strict=True):
            assert not torch.equal(got, exact)
            assert (got - exact).norm() < 0.06 * exact.norm()


# -- arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 16}, "num_experts must be the same.*num_experts=16 and config.num_experts=8"),
        ({"top_k": 3}, "top_k must be the same.*top_k=3 and config.top_k=2"),
        ({"hidden_size": 64}, "hidden_size must be the same.*hidden_size=64 and config.hidden_size=32"),
        ({"ffn_size": 12, "dtype": torch.bfloat16}, "ffn_size must be a multiple of 8.*got 12"),
        ({"config": {"top_k": 2}}, "config must be an ep_comm.EPConfig, got dict"),
        (
            {"config": make_config(dispatch_forward_dtype="mxfp8", recv_format="mxfp8")},
            "recv_format must be 'bf16'.*got 'mxfp8'",
        ),
        ({"score": "relu"}, "score must be 'softmax' or 'sigmoid'"),
    ],
)
def test_bad_configuration(change: dict[str, Any], message: str) -> None:
    arguments = {"hidden_size": H, "ffn_size": FFN, "num_experts": E, "top_k": K, "config": make_config()}
    with pytest.raises(ConfigError, match=message):
        MoELayer(**{**arguments, **change})


def test_bad_arguments() -> None:
    layer = make_layer()
    with pytest.raises(ArgumentError, match=r"rank 0: x must have.*hidden_size=32\], got \[4, 31\]"):
        layer(torch.zeros(4, 31))
    with pytest.raises(ArgumentError, match="rank 0: x must have.*experts, torch.float32, got"):
        layer(torch.zeros(4, H, dtype=torch.bfloat16))
    with pytest.raises(ArgumentError, match=r"rank 0: token_mask must have.* \(must be \[2, 4\], got \[8\]\)"):
        layer(torch.zeros(2, 4, H), torch.ones(8, dtype=torch.bool))
    with pytest.raises(ArgumentError, match="max_tokens_per_rank"):
        layer(torch.zeros(TOKENS + 1, H))


def test_which_parameters_are_experts() -> None:
    layer = make_layer(shared_ffn_size=16)
    marked = {name for name, p in layer.named_parameters() if getattr(p, "ep_expert", False)}
    assert marked == {"experts.gate_up_proj", "experts.down_proj"}


def test_layers_without_a_seed_differ_and_ranks_seeded_alike_agree() -> None:
    torch.manual_seed(11)
    one, two = make_layer(seed=None), make_layer(seed=None)
    torch.manual_seed(11)
    same = make_layer(seed=None)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name))
        assert not torch.equal(parameter, two.get_parameter(name))


def test_state_dict_round_trip() -> None:
    layer, other = make_layer(bias_update_rate=0.1), make_layer(seed=9, bias_update_rate=0.1)
    layer(random_tokens(TOKENS))
    layer.router.update_bias()
    other.load_state_dict(copy.deepcopy(layer.state_dict()))
    x = random_tokens(TOKENS, seed=1)
    assert torch.equal(layer(x), other(x))
    assert math.isclose(float(other.router.expert_bias.abs().max()), 0.1, rel_tol=1e-6)


def test_a_closed_layer_says_so() -> None:
    layer = make_layer()
    layer.close()
    layer.close()
    with pytest.raises(ep_comm.EPError, match="closed"):
        layer(random_tokens(4))
