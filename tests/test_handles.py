"""Dispatches in flight together, dispatchers side by side, recomputation, odd inputs, and a clean exit."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ep_comm
from tests import reference, steps
from tests.harness import run_ranks

MODES = pytest.mark.parametrize("mode", ["eager", "static"])
HIDDEN = 32


def make_config(mode: str, **changes: Any) -> ep_comm.EPConfig:
    fields: dict[str, Any] = dict(
        num_experts=4, top_k=2, hidden_size=HIDDEN, max_tokens_per_rank=8, mode=mode, alignment=1
    )
    if mode == "static":
        fields |= dict(budget_rows=64, pair_rows=8)
    return ep_comm.EPConfig(**(fields | changes))


def routing(rank: int, seed: int, count: int, num_experts: int = 4, top_k: int = 2) -> tuple[Tensor, ...]:
    gen = torch.Generator().manual_seed(100 * seed + rank)
    tokens = torch.randn(count, HIDDEN, generator=gen)
    topk_idx = torch.rand(count, num_experts, generator=gen).argsort(1)[:, :top_k]
    return tokens, topk_idx, torch.rand(count, top_k, generator=gen)


def in_flight(rank: int, world_size: int, mode: str, order: str) -> list[list[Tensor]]:
    """Forward and backward of two batches on one dispatcher, their four operations in the given order."""
    with ep_comm.Dispatcher(make_config(mode)) as dispatcher:
        tokens, dispatched, results = {}, {}, {}
        for step in order.split():
            verb, name = step.split(":")
            if verb == "dispatch":
                x, topk_idx, weights = routing(rank, ord(name), 5 if name == "A" else 8 * rank)
                tokens[name] = x.requires_grad_()
                dispatched[name] = dispatcher.dispatch(x, topk_idx, weights.requires_grad_())
            elif verb == "combine":
                d = dispatched[name]
                results[name] = [dispatcher.combine(d.tokens.square(), d.handle, True)]
            else:
                results[name][0].sum().backward()
                results[name].append(tokens[name].grad)
        return [[t.detach() for t in results[name]] for name in "AB"]


@MODES
def test_dispatches_in_flight_do_not_mix(mode: str) -> None:
    alone = "dispatch:A combine:A backward:A dispatch:B combine:B backward:B"
    nested = "dispatch:A dispatch:B combine:B combine:A backward:A backward:B"
    crossed = "dispatch:A dispatch:B combine:A combine:B backward:B backward:A"
    expected = run_ranks(in_flight, 2, mode, alone)
    for order in (nested, crossed):
        for got, want in zip(run_ranks(in_flight, 2, mode, order), expected, strict=True):
            for a, b in zip(sum(got, []), sum(want, []), strict=True):
                assert steps.same_bits(a, b), order


def side_by_side(rank: int, world_size: int, mode: str) -> dict[str, bool]:
    """A dispatcher over all four ranks, one over this rank's pair and one without peers, all in flight."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    singles = [dist.new_group([r]) for r in range(4)]
    pair = ep_comm.Dispatcher(make_config(mode), group=pairs[rank // 2], name="pair")
    world = ep_comm.Dispatcher(make_config(mode, num_experts=8, top_k=3, alignment=16, budget_rows=None))
    single = ep_comm.Dispatcher(make_config(mode), group=singles[rank])
    runs = []
    for dispatcher, num_experts, top_k in ((world, 8, 3), (pair, 4, 2), (single, 4, 2)):
        inputs = routing(rank, num_experts, 6, num_experts, top_k)
        runs.append((dispatcher, inputs, dispatcher.dispatch(*inputs)))
    same = {}
    for dispatcher, (tokens, topk_idx, weights), d in reversed(runs):
        out = dispatcher.combine(d.tokens, d.handle, apply_weights=True)
        want = torch.zeros_like(tokens)
        ranks_experts = (topk_idx // dispatcher.num_local_experts, weights[..., None] * tokens[:, None])
        for owner in range(dispatcher.ep_size):
            part = torch.zeros_like(tokens)
            for slot in range(topk_idx.shape[1]):
                part += ranks_experts[1][:, slot] * (ranks_experts[0][:, slot] == owner)[:, None]
            want += part
        same[f"{dispatcher.ep_size} ranks, rank {dispatcher.rank}"] = steps.same_bits(out, want)
        dispatcher.close()
    return same


@MODES
def test_dispatchers_of_different_shapes_and_groups_live_together(mode: str) -> None:
    results = run_ranks(side_by_side, 4, mode)
    for rank, same in enumerate(results):
        assert same == {
            "1 ranks, rank 0": True,
            f"2 ranks, rank {rank % 2}": True,
            f"4 ranks, rank {rank}": True,
        }


def recompute(rank: int, world_size: int, mode: str, how: str) -> dict[str, Any]:
    config = make_config(mode, dispatch_forward_dtype="mxfp8", combine_backward_dtype="mxfp8")
    with ep_comm.Dispatcher(config) as dispatcher:
        calls: list[Tensor] = []
        dispatcher.routing_hooks.append(lambda which, topk_idx: calls.append(topk_idx))
        tokens, topk_idx, weights = routing(rank, 1, 3 + 4 * rank)
        tokens.requires_grad_()
        weights.requires_grad_()
        scale = torch.full((), 1.5, requires_grad=True)
        seen: list[Tensor] = []

        def block(x: Tensor, w: Tensor) -> Tensor:
            d = dispatcher.dispatch(x, topk_idx, w)
            seen.append(d.tokens.detach().clone())
            return dispatcher.combine(torch.tanh(d.tokens * scale), d.handle, apply_weights=True)

        y = tokens
        for _ in range(2):  # two layers: the second one's recomputation comes before the first one's
            y = block(y, weights) if how == "plain" else checkpoint(block, y, weights, use_reentrant=how == "reentrant")
        y.square().sum().backward()
        return {
            "values": [y.detach(), tokens.grad, weights.grad, scale.grad],
            "seen": seen,
            "hook_calls": len(calls),
        }


@MODES
@pytest.mark.parametrize("how", ["reentrant", "nonreentrant"])
def test_recomputation_gives_the_same_rows(mode: str, how: str) -> None:
    plain = run_ranks(recompute, 2, mode, "plain")
    for got, want in zip(run_ranks(recompute, 2, mode, how), plain, strict=True):
        for a, b in zip(got["values"], want["values"], strict=True):
            assert steps.same_bits(a, b)
        first, second, *recomputed = got["seen"]
        assert len(recomputed) == 2
        assert steps.same_bits(recomputed[0], second) and steps.same_bits(recomputed[1], first)
        assert got["hook_calls"] == want["hook_calls"] == 2, "recomputation must not count as a dispatch"


def without_grad(rank: int, world_size: int, mode: str) -> list[Any]:
    with ep_comm.Dispatcher(make_config(mode)) as dispatcher:
        tokens, topk_idx, weights = routing(rank, 2, 5)
        results = []
        for guard in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with guard():
                d = dispatcher.dispatch(tokens, topk_idx, weights)
                out = dispatcher.combine(d.tokens, d.handle)
                # With gradients on, even inputs without one must take part in the other ranks' backward.
                assert out.requires_grad == (guard is torch.enable_grad)
                results.append(out.detach().numpy().copy())
        return results


@MODES
def test_no_grad_and_inference_mode(mode: str) -> None:
    for plain, inference, grad in run_ranks(without_grad, 2, mode):
        assert (plain == grad).all() and (inference == grad).all()


def strided(rank: int, world_size: int, mode: str) -> list[tuple[Tensor, Tensor]]:
    """Transposed, sliced and expanded inputs, and gradients that arrive expanded, against contiguous ones."""
    results = []
    for contiguous in (True, False):
        with ep_comm.Dispatcher(make_config(mode, combine_backward_dtype="mxfp8")) as dispatcher:
            gen = torch.Generator().manual_seed(rank)
            tokens = torch.randn(HIDDEN, 6, generator=gen).t()
            topk_idx = torch.randint(0, 4, (6, 4), generator=gen)[:, ::2]
            weights = torch.rand(1, 2, generator=gen).expand(6, 2)
            if contiguous:
                tokens, topk_idx, weights = tokens.contiguous(), topk_idx.contiguous(), weights.contiguous()
            tokens.requires_grad_()
            d = dispatcher.dispatch(tokens, topk_idx, weights)
            wide = torch.cat([d.tokens, d.tokens], 1)[:, ::2]
            y = wide.contiguous() if contiguous else wide
            out = dispatcher.combine(y, d.handle, apply_weights=True)
            grad = torch.tensor(0.75).expand(out.shape)
            out.backward(grad.contiguous() if contiguous else grad)
            results.append((out.detach(), tokens.grad))
    return results


@MODES
def test_inputs_need_not_be_contiguous(mode: str) -> None:
    for plain, odd in run_ranks(strided, 2, mode):
        assert all(steps.same_bits(a, b) for a, b in zip(plain, odd, strict=True))


def disconnected(rank: int, world_size: int, mode: str, apply_weights: bool) -> list[Tensor]:
    """On rank 1 the experts' output does not depend on the rows, and no row ever needs a gradient."""
    with ep_comm.Dispatcher(make_config(mode)) as dispatcher:
        results = []
        for seed in range(2):  # a second round: the first must leave nothing behind
            tokens, topk_idx, weights = routing(rank, seed, 4)
            tokens.requires_grad_()
            weights.requires_grad_()
            d = dispatcher.dispatch(tokens, topk_idx, weights)
            y = d.tokens * 2 if rank == 0 else torch.zeros(d.tokens.shape)
            dispatcher.combine(y, d.handle, apply_weights=apply_weights).sum().backward()
            on_zero = (topk_idx < 2).float()
            scale = on_zero * weights.detach() if apply_weights else on_zero
            expected = 2 * scale.sum(1, keepdim=True).expand(-1, HIDDEN)
            results += [tokens.grad, expected]
        return results


@MODES
@pytest.mark.parametrize("apply_weights", [False, True])
def test_experts_outside_the_graph_do_not_hang_the_others(mode: str, apply_weights: bool) -> None:
    for results in run_ranks(disconnected, 2, mode, apply_weights, timeout=30):
        for got, expected in zip(results[::2], results[1::2], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def partly_frozen(rank: int, world_size: int, mode: str) -> list[bool]:
    """Tokens need a gradient on rank 0 only, weights on rank 1 only: backward must still pair up."""
    with ep_comm.Dispatcher(make_config(mode)) as dispatcher:
        tokens, topk_idx, weights = routing(rank, 5, 4)
        (tokens if rank == 0 else weights).requires_grad_()
        d = dispatcher.dispatch(tokens, topk_idx, weights)
        out = dispatcher.combine(d.tokens * d.weights[:, None], d.handle)
        out.sum().backward()
        expected = weights.sum(1, keepdim=True).expand_as(tokens) if rank == 0 else tokens.sum(1, keepdim=True)
        got = tokens.grad if rank == 0 else weights.grad
        return [torch.allclose(got, expected.expand_as(got), rtol=1e-5, atol=1e-5)]


@MODES
def test_inputs_that_need_gradients_may_differ_between_ranks(mode: str) -> None:
    assert run_ranks(partly_frozen, 2, mode, timeout=30) == [[True], [True]]


def nothing_to_learn(rank: int, world_size: int, mode: str) -> bool:
    """Rank 1 passes plain tensors, as a rank without tokens may: its backward must take part all the same."""
    with ep_comm.Dispatcher(make_config(mode)) as dispatcher:
        tokens, topk_idx, weights = routing(rank, 6, 4 if rank == 0 else 0)
        if rank == 0:
            tokens.requires_grad_()
        d = dispatcher.dispatch(tokens, topk_idx, weights)
        out = dispatcher.combine(d.tokens, d.handle)
        out.sum().backward()
        return rank == 1 or torch.equal(tokens.grad, torch.full_like(tokens, 2))


@MODES
def test_a_rank_without_gradients_takes_part_in_backward(mode: str) -> None:
    assert run_ranks(nothing_to_learn, 2, mode, timeout=30) == [True, True]


def special_values(rank: int, world_size: int, mode: str, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """Token 0 of rank 0 holds NaN and infinities; each token has one expert on each rank."""
    config = make_config(mode, dispatch_forward_dtype=dtype, hidden_size=64)
    with ep_comm.Dispatcher(config) as dispatcher:
        tokens = torch.full((3, 64), 2.0 + rank, dtype=torch.bfloat16)
        if rank == 0:
            tokens[0, 3], tokens[0, 5], tokens[0, 7] = torch.nan, torch.inf, -torch.inf
        d = dispatcher.dispatch(tokens, torch.tensor([[0, 2]] * 3), torch.ones(3, 2))
        rows = d.tokens[: dispatcher.required_rows].clone()
        return tokens, rows, dispatcher.combine(d.tokens, d.handle)


@MODES
@pytest.mark.parametrize("dtype", ["bf16", "mxfp8"])
def test_nan_and_infinity_stay_in_their_own_rows(mode: str, dtype: str) -> None:
    results = run_ranks(special_values, 2, mode, dtype)
    for rank, (tokens, rows, out) in enumerate(results):
        assert rows.shape == (6, 64)
        first = results[0][0][0].clone()
        if dtype == "mxfp8":  # the whole block of 32 becomes NaN, nothing becomes finite
            first[:32] = torch.nan
        assert steps.same_bits(rows[0], first)
        assert steps.same_bits(rows[1:], torch.cat([results[0][0][1:], results[1][0]]))
        clean = slice(1, None) if rank == 0 else slice(None)
        assert torch.equal(out[clean], 2 * tokens[clean])
        if rank == 0:
            assert steps.same_bits(out[0], first + first)


def received_mxfp8(rank: int, world_size: int, mode: str) -> list[Tensor]:
    config = make_config(mode, dispatch_forward_dtype="mxfp8", recv_format="mxfp8", alignment=16)
    with ep_comm.Dispatcher(config) as dispatcher:
        tokens, topk_idx, weights = routing(rank, 3, 5)
        d = dispatcher.dispatch(tokens, topk_idx, weights)
        return [d.tokens.data.view(torch.uint8), d.tokens.scales, tokens, topk_idx]


@MODES
def test_rows_can_be_handed_out_as_mxfp8(mode: str) -> None:
    results = run_ranks(received_mxfp8, 2, mode)
    plan = reference.layouts([r[3].tolist() for r in results], 4, 16)
    for layout, (data, scales, *_) in zip(plan, results, strict=True):
        assert len(data) == (64 if mode == "static" else layout.required_rows)
        expected = torch.zeros(len(data), HIDDEN)
        for row, (source, token, _) in layout.rows():
            expected[row] = results[source][2][token]
        want = ep_comm.quantize_mxfp8(expected)
        assert torch.equal(data, want.data.view(torch.uint8)) and torch.equal(scales, want.scales)


def many_sizes(rank: int, world_size: int, mode: str) -> list[bool]:
    """Micro-batches that grow and shrink, down to none on one rank and on all."""
    with ep_comm.Dispatcher(make_config(mode)) as dispatcher:
        right = []
        for counts in ((1, 2), (8, 3), (0, 8), (0, 0), (8, 8), (2, 0)):
            tokens, topk_idx, weights = routing(rank, sum(counts), counts[rank])
            tokens.requires_grad_()
            d = dispatcher.dispatch(tokens, topk_idx, weights)
            out = dispatcher.combine(d.tokens, d.handle)
            out.sum().backward()
            right.append(torch.equal(out, 2 * tokens) and torch.equal(tokens.grad, torch.full_like(tokens, 2)))
        return right


@MODES
def test_micro_batches_of_any_size_follow_each_other(mode: str) -> None:
    assert run_ranks(many_sizes, 2, mode) == [[True] * 6] * 2


def test_a_single_process_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    for mode in ("eager", "static"):
        with ep_comm.Dispatcher(make_config(mode)) as dispatcher:
            assert (dispatcher.transport, dispatcher.rank, dispatcher.ep_size) == ("local", 0, 1)
            tokens, topk_idx, weights = routing(0, 1, 8)
            d = dispatcher.dispatch(tokens, topk_idx, weights)
            assert torch.equal(dispatcher.combine(d.tokens, d.handle), 2 * tokens)
            assert dispatcher.tokens_sent == 0


def test_threads_do_not_share_wire_rows() -> None:
    with ep_comm.Dispatcher(make_config("eager")) as first, ep_comm.Dispatcher(make_config("eager")) as second:
        take = (4, 16, torch.device("cpu"))
        mine = first._transport._buffers.take("sent", *take).zero_()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: second._transport._buffers.take("sent", *take).fill_(1)).result()
        assert not mine.any()


EXIT_SCRIPT = """
import sys
import torch, torch.distributed as dist
import ep_comm
rank, store, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
static = dict(budget_rows=16) if mode == "static" else {}
config = ep_comm.EPConfig(4, 2, 32, 8, mode=mode, **static)
dispatcher = ep_comm.Dispatcher(config)
x = torch.ones(3, 32, requires_grad=True)
d = dispatcher.dispatch(x, torch.tensor([[0, 3]] * 3), torch.ones(3, 2))
dispatcher.combine(d.tokens, d.handle).sum().backward()
print("gradient", x.grad[0, 0].item(), flush=True)
"""


@MODES
def test_the_interpreter_exits_cleanly_without_close(mode: str, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", EXIT_SCRIPT, str(rank), str(tmp_path / "store"), mode],
            cwd=Path(__file__).parent.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "gradient 2.0\n", process.communicate(timeout=10)
        done = time.monotonic()
        for process in ranks:
            _, errors = process.communicate(timeout=20)
            assert process.returncode == 0 and "Traceback" not in errors, errors
        assert time.monotonic() - done < 10
    finally:
        for process in ranks:
            process.kill()
            process.wait()
