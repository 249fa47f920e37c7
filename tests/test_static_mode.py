"""Static mode: the overflow verdict, growing budgets, dropping on request, and no host sync."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ep_comm
from ep_comm import devices
from ep_comm.config import worst_case_rows
from ep_comm.status import Operation
from tests import reference, steps
from tests.harness import Caught, expect_error, run_ranks

HIDDEN = 32


def make_config(**changes: Any) -> ep_comm.EPConfig:
    fields: dict[str, Any] = dict(
        num_experts=4,
        top_k=2,
        hidden_size=HIDDEN,
        max_tokens_per_rank=8,
        mode="static",
        alignment=1,
        budget_rows=16,
        pair_rows=8,
    )
    return ep_comm.EPConfig(**(fields | changes))


def inputs_to(topk_idx: list[list[int]], rank: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(rank)
    count = len(topk_idx)
    tokens = torch.randn(count, HIDDEN, generator=gen)
    return (
        tokens,
        torch.tensor(topk_idx, dtype=torch.int64).reshape(count, 2),
        torch.rand(count, 2, generator=gen),
    )


def verdicts(
    rank: int, world_size: int, changes: dict[str, Any], routings: list[list[list[list[int]]]]
) -> list[tuple[bool, int, list[int], tuple[int, ...]]]:
    with ep_comm.Dispatcher(make_config(**changes)) as dispatcher:
        seen = []
        for routing in routings:
            d = dispatcher.dispatch(*inputs_to(routing[rank], rank))
            required = dispatcher.required_rows
            counts = d.tokens_per_expert.tolist()
            seen.append((bool(dispatcher.overflowed), required, counts, tuple(d.tokens.shape)))
            assert dispatcher.combine(d.tokens, d.handle).shape == (len(routing[rank]), HIDDEN)
        return seen


def test_the_verdict_is_exact_and_the_same_on_every_rank() -> None:
    at_budget = [[[0, 1]] * 5, [[0, 1]] * 3]
    one_above = [[[0, 1]] * 5, [[0, 1]] * 3 + [[-1, 0]]]
    far_above = [[[0, 0]] * 8, [[0, 0]] * 8]
    results = run_ranks(verdicts, 2, {}, [at_budget, one_above, far_above, at_budget])
    shape = (16, HIDDEN)
    assert results[0] == [
        (False, 16, [8, 8], shape),
        (True, 17, [9, 7], shape),
        (True, 32, [16, 0], shape),
        (False, 16, [8, 8], shape),
    ]
    assert results[1] == [(flag, 0, [0, 0], shape) for flag in (False, True, True, False)]


def test_padding_counts_towards_the_budget() -> None:
    two_experts, one_expert = [[[0, 1]], []], [[[0, 0]], []]
    results = run_ranks(verdicts, 2, dict(alignment=16), [two_experts, one_expert])
    assert [seen[:2] for seen in results[0]] == [(True, 32), (False, 16)]
    assert [seen[:2] for seen in results[1]] == [(True, 0), (False, 0)]


def test_too_many_tokens_for_one_pair_of_ranks_overflow_too() -> None:
    # The rows fit; the two tokens that rank 1 sends to rank 0 do not.
    crowded, fitting = [[], [[0, -1], [1, -1]]], [[[0, -1]], [[1, 1], [3, -1]]]
    results = run_ranks(verdicts, 2, dict(pair_rows=1), [crowded, fitting])
    assert [seen[:2] for seen in results[0]] == [(True, 2), (False, 3)]
    assert [seen[:2] for seen in results[1]] == [(True, 0), (False, 1)]


def grow_and_repeat(rank: int, world_size: int) -> dict[str, Any]:
    with ep_comm.Dispatcher(make_config(max_budget_rows=30)) as dispatcher:
        inputs = inputs_to([[0, 1]] * (8 if rank == 0 else 5), rank)
        dispatcher.dispatch(*inputs)
        before = (dispatcher.overflowed, dispatcher.required_rows, dispatcher.budget_rows)
        dispatcher.grow(26)
        d = dispatcher.dispatch(*inputs)
        out = dispatcher.combine(d.tokens, d.handle)
        after = (dispatcher.overflowed, dispatcher.required_rows, dispatcher.budget_rows)
        error = expect_error(dispatcher.grow, 31)
        saved = dispatcher.state_dict()
    with ep_comm.Dispatcher(make_config(max_budget_rows=30)) as fresh:
        fresh.load_state_dict(saved)
        d = fresh.dispatch(*inputs)
        restored = (fresh.overflowed, fresh.budget_rows, tuple(d.tokens.shape))
    return dict(
        before=before,
        after=after,
        right=torch.equal(out, 2 * inputs[0]),
        error=error,
        kept=dispatcher.budget_rows,
        restored=restored,
    )


def test_a_budget_grows_persists_and_has_a_ceiling() -> None:
    for rank, seen in enumerate(run_ranks(grow_and_repeat, 2)):
        required = 26 if rank == 0 else 0
        assert seen["before"] == (True, required, 16)
        assert seen["after"] == (False, required, 26)
        assert seen["right"]
        assert seen["error"].type == "BudgetExceededError"
        assert "31" in seen["error"].message and "30" in seen["error"].message
        assert seen["kept"] == 26, "a refused growth must change nothing"
        assert seen["restored"] == (False, 26, (26, HIDDEN))


def dropping(
    rank: int, world_size: int, topk_idx: list[list[list[int]]], step: list[steps.StepInputs], aw: bool
) -> dict[str, Any]:
    with ep_comm.Dispatcher(make_config(overflow="drop")) as dispatcher:
        mine = step[rank]
        tokens, weights = mine.tokens.requires_grad_(), mine.topk_weights.requires_grad_()
        d = dispatcher.dispatch(tokens, mine.topk_idx, weights)
        y = torch.full((16, HIDDEN), torch.nan)
        kept = min(len(mine.expert_output), 16)
        y[:kept] = mine.expert_output[:kept]
        y.requires_grad_()
        out = dispatcher.combine(y, d.handle, apply_weights=aw)
        torch.autograd.backward(
            [out, d.tokens, d.weights],
            [mine.grad_out, torch.ones(16, HIDDEN), torch.ones(16)],
        )
        return dict(
            overflowed=bool(dispatcher.overflowed),
            rows=d.tokens.detach(),
            weights=d.weights.detach(),
            out=out.detach(),
            grad_y=y.grad,
            grad_tokens=tokens.grad,
            grad_weights=weights.grad,
        )


@pytest.mark.parametrize("apply_weights", [False, True])
def test_dropping_keeps_the_rows_that_fit(apply_weights: bool) -> None:
    """What is beyond the budget counts as if it had never been routed; the rest is exact."""
    topk_idx = [[[0, 1]] * 8, [[1, 0], [2, 1], [0, 3], [1, 1]]]
    plan = reference.layouts(topk_idx, 4, 1)
    step = steps.make_inputs(plan, topk_idx, 2, HIDDEN, torch.float32, integers=True)
    weights = [s.topk_weights for s in step]
    for layout in plan:
        layout.row_source = layout.row_source[:16]
    outputs = [s.expert_output[:16] for s in step]
    rows, row_weights = reference.dispatch(plan, [s.tokens for s in step], weights)
    out = reference.combine(plan, outputs, weights, apply_weights)
    grad_y = reference.combine_grad_outputs(plan, [s.grad_out for s in step], weights, apply_weights)
    ones = [torch.ones_like(r) for r in rows]
    grad_tokens = reference.dispatch_grad_tokens(plan, ones, weights)
    grad_weights = reference.dispatch_grad_weights(plan, [o[:, 0] for o in ones], weights)
    if apply_weights:
        dots = reference.combine_grad_weights(plan, outputs, [s.grad_out for s in step], weights)
        grad_weights = [a + b for a, b in zip(grad_weights, dots, strict=True)]
    for rank, got in enumerate(run_ranks(dropping, 2, topk_idx, step, apply_weights)):
        assert got["overflowed"]
        kept = len(rows[rank])
        for name, want in (("rows", rows), ("weights", row_weights), ("grad_y", grad_y)):
            assert steps.same_bits(got[name][:kept], want[rank]), name
            assert not got[name][kept:].any(), name
        for name, want in (("out", out), ("grad_tokens", grad_tokens), ("grad_weights", grad_weights)):
            assert steps.same_bits(got[name], want[rank]), name


def bad_ids(rank: int, world_size: int) -> list[Caught]:
    """One id out of range on rank 1, in several ways: the step runs on, the check raises everywhere, once."""
    caught = []
    with ep_comm.Dispatcher(make_config(), name="layer") as dispatcher:
        for bad, dtype in (
            (4, torch.int32),
            (-2, torch.int64),
            (2**40, torch.int64),
            (-(2**62), torch.int64),
        ):
            tokens, topk_idx, weights = inputs_to([[0, 1], [2, 3]], rank)
            topk_idx = topk_idx.to(dtype)
            if rank == 1:
                topk_idx[1, 0] = bad
            d = dispatcher.dispatch(tokens.requires_grad_(), topk_idx, weights)
            dispatcher.combine(d.tokens, d.handle, apply_weights=True).sum().backward()
            caught.append(expect_error(dispatcher.check))
            dispatcher.check()
    return caught


def test_ids_out_of_range_are_raised_by_the_check() -> None:
    results = run_ranks(bad_ids, 2)
    assert results[0] == results[1]
    for caught, bad in zip(results[0], (4, -2, 2**40, -(2**62)), strict=True):
        assert caught.type == "RoutingError"
        for part in ("rank 1", "token 1", f"{bad}", "-1", "4"):
            assert part in caught.message, caught.message


def without_zero_tail(rank: int, world_size: int) -> list[bool]:
    with ep_comm.Dispatcher(make_config(zero_tail=False)) as dispatcher:
        right = []
        for count in (8, 3):
            tokens, topk_idx, weights = inputs_to([[0, 2]] * count, rank)
            d = dispatcher.dispatch(tokens, topk_idx, weights)
            everyone = torch.cat([inputs_to([[0, 2]] * count, r)[0] for r in range(2)])
            out = dispatcher.combine(d.tokens, d.handle)
            right.append(torch.equal(d.tokens[: 2 * count], everyone) and torch.equal(out, 2 * tokens))
        return right


def test_the_tail_need_not_be_zeroed() -> None:
    assert run_ranks(without_zero_tail, 2) == [[True, True]] * 2


class HostSyncError(Exception):
    """The host read a value that would live on the device."""


class NoHostSync(TorchDispatchMode):
    """Refuses every operation that has to wait for a GPU when its tensors live there."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "_unique2")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        boolean_index = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]
        )
        unsized = name == "repeat_interleave" and not (kwargs or {}).get("output_size")
        if name in self.NAMES or boolean_index or unsized:
            raise HostSyncError(str(func))
        return func(*args, **(kwargs or {}))


def forbid_host_sync() -> ExitStack:
    stack = ExitStack()

    def refuse(*_: Any, **__: Any) -> Any:
        raise HostSyncError("a tensor's value was read on the host")

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
        stack.enter_context(mock.patch.object(Tensor, name, refuse))
    # As on a GPU: the host knows no value of the device.
    stack.enter_context(mock.patch.object(devices, "host_reads_are_free", lambda device: False))
    stack.enter_context(NoHostSync())
    return stack


def watched_step(rank: int, world_size: int, mode: str, dtype: str, apply_weights: bool) -> str:
    static = {} if mode == "static" else dict(mode="eager", budget_rows=None, pair_rows=None)
    config = make_config(**static, dispatch_forward_dtype=dtype, combine_backward_dtype=dtype)
    with ep_comm.Dispatcher(config) as dispatcher:
        results = []
        for topk_idx in ([[0, 3]] * 5, [[0, 0]] * 8):  # the second overflows
            tokens, idx, weights = inputs_to(topk_idx, rank)
            tokens.requires_grad_()
            weights.requires_grad_()
            with forbid_host_sync():
                try:
                    d = dispatcher.dispatch(tokens, idx, weights)
                    out = dispatcher.combine(d.tokens * 2, d.handle, apply_weights=apply_weights)
                    out.backward(torch.ones_like(out))
                except HostSyncError as error:
                    return f"host sync: {error}"
            results.append(bool(dispatcher.overflowed))
        return f"overflowed: {results}"


@pytest.mark.parametrize("apply_weights", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "mxfp8"])
def test_static_mode_never_waits_for_the_device(dtype: str, apply_weights: bool) -> None:
    for answer in run_ranks(watched_step, 2, "static", dtype, apply_weights):
        assert answer == "overflowed: [False, True]"


def test_eager_mode_does_and_the_watch_sees_it() -> None:
    for answer in run_ranks(watched_step, 2, "eager", "bf16", False):
        assert answer.startswith("host sync")


def facts(rank: int, world_size: int) -> dict[str, Any]:
    with ep_comm.Dispatcher(make_config(dispatch_forward_dtype="mxfp8", hidden_size=256), name="layer 7") as dispatcher:
        hooked: list[Any] = []
        dispatcher.routing_hooks.append(lambda which, topk_idx: hooked.append((which.name, topk_idx.tolist())))
        tokens, topk_idx, weights = inputs_to([[0, 3], [0, 1], [3, 3]], rank)
        d = dispatcher.dispatch(tokens.repeat(1, 8).bfloat16(), topk_idx, weights)
        dispatcher.combine(d.tokens, d.handle)
        directions = ("dispatch_forward", "dispatch_backward", "combine_forward", "combine_backward")
        return dict(
            name=dispatcher.name,
            transport=dispatcher.transport,
            sizes=(dispatcher.rank, dispatcher.ep_size, dispatcher.num_local_experts),
            budgets=(dispatcher.budget_rows, dispatcher.pair_rows),
            sent=dispatcher.tokens_sent,
            hooked=hooked,
            wire={name: dispatcher.wire_row_bytes(name) for name in directions},
            bad_direction=expect_error(dispatcher.wire_row_bytes, "sideways"),
        )


def test_a_dispatcher_tells_its_facts() -> None:
    for rank, seen in enumerate(run_ranks(facts, 2)):
        assert seen["name"] == "layer 7" and seen["transport"] == "collective"
        assert seen["sizes"] == (rank, 2, 2) and seen["budgets"] == (16, 8)
        assert seen["sent"] == 2
        assert seen["hooked"] == [("layer 7", [[0, 3], [0, 1], [3, 3]])]
        wire = seen["wire"]
        # Beside the 256 elements travel 8 scales and, with some padding, the two slots' weights and rows.
        assert 264 <= wire.pop("dispatch_forward") <= 264 + 40
        assert all(512 <= size <= 512 + 32 for size in wire.values())
        assert seen["bad_direction"].type in ("ArgumentError", "ConfigError")
        assert "sideways" in seen["bad_direction"].message


def test_the_worst_case_is_reached_and_never_exceeded() -> None:
    for pairs, experts, alignment in itertools.product(range(6), range(1, 4), (1, 2, 4)):
        splits = (c for c in itertools.product(range(pairs + 1), repeat=experts) if sum(c) == pairs)
        most = max(sum(-(-c // alignment) * alignment for c in split) for split in splits)
        assert worst_case_rows(pairs, experts, alignment) == most


def test_ragged_batches_leave_a_bounded_number_of_status_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with ep_comm.Dispatcher(make_config(max_tokens_per_rank=2000)) as dispatcher:
        exchange = dispatcher._exchange

        def header(tokens: int) -> Any:
            return exchange._header(dispatcher.device, Operation.DISPATCH, 0, tokens, 0, 16)

        with monkeypatch.context() as capturing:
            capturing.setattr(devices, "is_capturing", lambda device: True)
            captured = header(7)
        used_before = header(8)
        for tokens in range(9, 2000):
            header(tokens)
            assert header(8) is used_before
        assert header(7) is captured  # which a graph reads
        assert len(exchange._headers) + len(exchange._captured) <= 257
        dispatcher.prepare_capture()
