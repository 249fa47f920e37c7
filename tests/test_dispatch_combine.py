"""Dispatch, combine and all their gradients against the reference, bit for bit, in both modes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, given, settings

import ep_comm
from tests import reference, steps
from tests.harness import run_ranks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROUTINGS = ("uniform", "masked", "one_expert", "one_rank", "repeated")


@dataclass(frozen=True)
class Spec:
    """One drawn example."""

    ep_size: int
    local_experts: int
    top_k: int
    alignment: int
    hidden: int
    dtype: str
    idx_dtype: str
    token_counts: tuple[int, ...]
    routing: str
    dispatch_mxfp8: bool
    combine_mxfp8: bool
    scale_rounding: str
    apply_weights: bool
    integers: bool
    tight_budget: bool
    seed: int

    @property
    def num_experts(self) -> int:
        return self.ep_size * self.local_experts

    def topk_idx(self) -> list[list[list[int]]]:
        rng = random.Random(self.seed)
        experts = range(self.num_experts)
        favourite = rng.choice(experts)
        owner = rng.randrange(self.ep_size)

        def token() -> list[int]:
            if self.routing == "uniform":
                return rng.sample(experts, min(self.top_k, len(experts))) + [-1] * (self.top_k - len(experts))
            if self.routing == "masked":
                return [rng.choice((-1, -1, *experts)) for _ in range(self.top_k)]
            if self.routing == "one_expert":
                return [favourite] * self.top_k
            if self.routing == "one_rank":
                return [owner * self.local_experts + rng.randrange(self.local_experts) for _ in range(self.top_k)]
            return [rng.choice(experts) for _ in range(self.top_k)]

        return [[token() for _ in range(count)] for count in self.token_counts]

    def config(self, mode: str, budget_rows: int) -> ep_comm.EPConfig:
        static: dict[str, Any] = {}
        most = max(1, *self.token_counts) if self.tight_budget else 8
        if mode == "static":
            static = dict(budget_rows=max(1, budget_rows if self.tight_budget else 2 * budget_rows), pair_rows=most)
        return ep_comm.EPConfig(
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_size=self.hidden,
            max_tokens_per_rank=most,
            mode=mode,
            alignment=self.alignment,
            dispatch_forward_dtype="mxfp8" if self.dispatch_mxfp8 else "bf16",
            combine_backward_dtype="mxfp8" if self.combine_mxfp8 else "bf16",
            scale_rounding=self.scale_rounding,
            **static,
        )


@st.composite
def specs(draw: st.DrawFn, ep_size: int) -> Spec:
    mxfp8 = draw(st.tuples(st.booleans(), st.booleans()))
    return Spec(
        ep_size=ep_size,
        local_experts=draw(st.integers(1, 4)),
        top_k=draw(st.integers(1, 4)),
        alignment=draw(st.sampled_from([1, 16, 32])),
        hidden=draw(st.sampled_from([32, 64, 96] if any(mxfp8) else [1, 7, 32, 50])),
        dtype=draw(st.sampled_from(list(DTYPES))),
        idx_dtype=draw(st.sampled_from(["int32", "int64"])),
        token_counts=tuple(draw(st.lists(st.integers(0, 8), min_size=ep_size, max_size=ep_size))),
        routing=draw(st.sampled_from(ROUTINGS)),
        dispatch_mxfp8=mxfp8[0],
        combine_mxfp8=mxfp8[1],
        scale_rounding=draw(st.sampled_from(["rceil", "floor"])),
        apply_weights=draw(st.booleans()),
        integers=draw(st.booleans()),
        tight_budget=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


Job = tuple[dict[str, ep_comm.EPConfig], list[steps.StepInputs], bool]


def run_jobs(rank: int, world_size: int, jobs: list[Job]) -> list[dict[str, tuple[steps.StepResult, bool]]]:
    """Every example in both modes, on a dispatcher of its own."""
    results = []
    for configs, inputs, apply_weights in jobs:
        by_mode = {}
        for mode, config in configs.items():
            with ep_comm.Dispatcher(config) as dispatcher:
                result = steps.run_step(dispatcher, inputs[rank], apply_weights)
                by_mode[mode] = (result, bool(dispatcher.overflowed))
        results.append(by_mode)
    return results


def check_specs(batch: list[Spec]) -> None:
    jobs, expected = [], []
    for spec in batch:
        topk_idx = spec.topk_idx()
        plan = reference.layouts(topk_idx, spec.num_experts, spec.alignment)
        inputs = steps.make_inputs(
            plan,
            topk_idx,
            spec.top_k,
            spec.hidden,
            DTYPES[spec.dtype],
            getattr(torch, spec.idx_dtype),
            spec.seed,
            spec.integers,
        )
        most = max(layout.required_rows for layout in plan)
        jobs.append(({m: spec.config(m, most) for m in ("eager", "static")}, inputs, spec.apply_weights))
        rounding = spec.scale_rounding
        expected.append(
            steps.expected_step(
                plan,
                topk_idx,
                spec.num_experts,
                inputs,
                spec.apply_weights,
                rounding if spec.dispatch_mxfp8 else None,
                rounding if spec.combine_mxfp8 else None,
            )
        )
    results = run_ranks(run_jobs, batch[0].ep_size, jobs)
    for rank, of_rank in enumerate(results):
        for spec, by_mode, want in zip(batch, of_rank, expected, strict=True):
            for mode, (got, overflowed) in by_mode.items():
                wrong = steps.differences(got, want[rank], exact_dots=spec.integers)
                assert not wrong, f"rank {rank}, {mode}, {spec}:\n" + "\n".join(wrong)
                assert not overflowed, f"rank {rank}, {mode}, {spec}"
            wrong = steps.differences(by_mode["static"][0], by_mode["eager"][0])
            assert not wrong, f"rank {rank}, static against eager, {spec}:\n" + "\n".join(wrong)


# No shrinking: a failed job takes the ranks' processes with it, and hundreds of restarts would take an hour.
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_everything_equals_the_reference(ep_size: int) -> None:
    @settings(max_examples=4, phases=[Phase.explicit, Phase.generate])
    @given(st.lists(specs(ep_size), min_size=12, max_size=12))
    def check(batch: list[Spec]) -> None:
        check_specs(batch)

    check()


def mixed_dtypes(rank: int, world_size: int, mode: str) -> list[torch.Tensor]:
    """BF16 tokens, FP32 expert outputs, and weights used twice: by the experts and by the combine."""
    static = {"budget_rows": 16, "pair_rows": 4} if mode == "static" else {}
    config = ep_comm.EPConfig(2, 2, 4, 4, mode=mode, alignment=1, **static)
    with ep_comm.Dispatcher(config) as dispatcher:
        tokens = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 3, dtype=torch.bfloat16, requires_grad=True)
        weights = torch.tensor([[0.5, 0.25]] * 3, requires_grad=True)
        d = dispatcher.dispatch(tokens, torch.tensor([[0, 1], [1, 1], [0, -1]]), weights)
        y = d.tokens.float() * d.weights[:, None] * 1.001
        out = dispatcher.combine(y, d.handle, apply_weights=True)
        out.backward(torch.ones_like(out))
        return [out.detach(), tokens.grad, weights.grad]


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_outputs_may_have_another_dtype_than_tokens(mode: str) -> None:
    for out, grad_tokens, grad_weights in run_ranks(mixed_dtypes, 2, mode):
        assert (out.dtype, grad_tokens.dtype) == (torch.float32, torch.bfloat16)
        # out = 1.001 * x * sum of w^2: no rounding to BF16 on the way
        squares = torch.tensor([[0.3125], [0.3125], [0.25]])
        x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        torch.testing.assert_close(out, 1.001 * squares * x, rtol=1e-6, atol=0)
        torch.testing.assert_close(grad_tokens.float(), (1.001 * squares).expand(3, 4), rtol=2**-7, atol=0)
        # d out.sum() / d w = 2 * w * 1.001 * sum of x, zero in the empty slot
        expected = 2 * 1.001 * 10 * torch.tensor([[0.5, 0.25], [0.5, 0.25], [0.5, 0.0]])
        torch.testing.assert_close(grad_weights, expected, rtol=1e-5, atol=0)


def on_paper(rank: int, world_size: int, mode: str) -> list[Any]:
    config = ep_comm.EPConfig(
        num_experts=2, top_k=3, hidden_size=1, max_tokens_per_rank=1, mode=mode, alignment=1, budget_rows=4
    )
    with ep_comm.Dispatcher(config) as dispatcher:
        count = 1 if rank == 0 else 0
        d = dispatcher.dispatch(
            torch.ones(count, 1, dtype=torch.bfloat16),
            torch.tensor([[0, 0, 1]])[:count],
            torch.tensor([[0.5, 2.0, 3.0]])[:count],
        )
        y = torch.zeros(d.tokens.shape, dtype=torch.bfloat16)
        values = [256.0, 1.0] if rank == 0 else [1.0]
        y[: len(values), 0] = torch.tensor(values)
        return [dispatcher.combine(y, d.handle, apply_weights=a).tolist() for a in (False, True)]


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_combine_rounds_once_per_rank_and_once_at_the_end(mode: str) -> None:
    # In bf16 256 + 1 rounds to 256: rank 0 sends 256, and 256 + 1 is 256 again; one rounding would give 258.
    # Weighted: 128 + 2 = 130 from rank 0, 3 from rank 1.
    results = run_ranks(on_paper, 2, mode)
    assert results == [[[[256.0]], [[133.0]]], [[], []]]


def dense_layer(rank: int, world_size: int, mode: str, apply_weights: bool) -> dict[str, Any]:
    """A layer of linear experts, loss and backward, and the same layer computed densely in float64."""
    torch.manual_seed(0)
    num_experts, top_k, hidden, count = 8, 3, 16, 11
    tokens = torch.randn(world_size, count, hidden, dtype=torch.float64)
    logits = torch.randn(world_size, count, num_experts, dtype=torch.float64)
    experts = torch.randn(num_experts, hidden, hidden, dtype=torch.float64) / 4
    num_local = num_experts // world_size
    mine = experts[rank * num_local : (rank + 1) * num_local].float().requires_grad_()
    x = tokens[rank].float().requires_grad_()
    weights, topk_idx = logits[rank].softmax(-1).float().topk(top_k)
    weights = weights.detach().requires_grad_()
    config = ep_comm.EPConfig(num_experts, top_k, hidden, count, mode=mode, capacity_factor=3.0, alignment=16)
    with ep_comm.Dispatcher(config) as dispatcher:
        d = dispatcher.dispatch(x, topk_idx, weights)
        bounds = d.expert_offsets.tolist()
        parts = [torch.tanh(d.tokens[a:b] @ mine[e]) for e, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False))]
        parts.append(d.tokens[bounds[-1] :])
        y = torch.cat(parts)
        out = dispatcher.combine(y if apply_weights else y * d.weights[:, None], d.handle, apply_weights)
        out.square().sum().backward()

    dense_x = tokens.clone().requires_grad_()
    dense_experts = experts.clone().requires_grad_()
    dense_w, dense_idx = logits.softmax(-1).float().topk(top_k)
    dense_w = dense_w.double().requires_grad_()
    every = torch.tanh(torch.einsum("pth,ehi->ptei", dense_x, dense_experts))
    picked = every.gather(2, dense_idx[..., None].expand(-1, -1, -1, hidden))
    dense_out = (picked * dense_w[..., None]).sum(2)
    dense_out.square().sum().backward()
    pairs = {
        "out": (out, dense_out[rank]),
        "grad_tokens": (x.grad, dense_x.grad[rank]),
        "grad_weights": (weights.grad, dense_w.grad[rank]),
        "grad_experts": (mine.grad, dense_experts.grad[rank * num_local : (rank + 1) * num_local]),
    }
    return {name: ((a.double() - b).abs().max() / b.abs().max()).item() for name, (a, b) in pairs.items()}


@pytest.mark.parametrize("apply_weights", [False, True])
@pytest.mark.parametrize("mode", ["eager", "static"])
def test_a_layer_trains_like_its_dense_form(mode: str, apply_weights: bool) -> None:
    for errors in run_ranks(dense_layer, 2, mode, apply_weights):
        assert all(error < 1e-5 for error in errors.values()), errors
