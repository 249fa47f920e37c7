"""Mistakes of a program around the dispatcher: every rank hears of them, and the next good call works."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ep_comm
from ep_comm import ConfigError, Dispatcher, EPConfig, EPError, HandleError
from ep_comm.cuda.window import WindowLayout
from ep_comm.status import rank_name
from ep_comm.transport import windows

from .harness import Caught, expect_error, run_ranks


def make(mode: str = "eager", **changes: Any) -> Dispatcher:
    values = {"num_experts": 4, "top_k": 2, "hidden_size": 32, "max_tokens_per_rank": 8, "mode": mode}
    return Dispatcher(EPConfig(**{**values, **changes}))


def inputs(count: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    idx = torch.arange(2 * count).view(count, 2) % 4
    return torch.arange(32.0 * count).view(count, 32), idx, torch.ones(count, 2)


def works(dispatcher: Dispatcher) -> None:
    x, idx, w = inputs()
    d = dispatcher.dispatch(x, idx, w)
    assert torch.equal(dispatcher.combine(d.tokens, d.handle), 2 * x)


def same_everywhere(results: list[Caught], kind: str, *parts: str) -> None:
    for caught in results:
        assert caught.type == kind, caught
        for part in parts:
            assert part in caught.message, caught.message


def other_pair_rows(rank: int, world_size: int) -> Caught:
    dispatcher = make("static", capacity_factor=2.0, pair_rows=6)
    good = dispatcher.state_dict()
    if rank == 1:
        dispatcher.load_state_dict({**good, "pair_rows": 7})
    caught = expect_error(dispatcher.dispatch, *inputs())
    dispatcher.load_state_dict(good)
    works(dispatcher)
    return caught


def test_pair_budgets_that_differ() -> None:
    same_everywhere(run_ranks(other_pair_rows, 2), "ConfigError", "pair_rows", "6", "7", "rank 1")


def sparse_tokens(rank: int, world_size: int) -> Caught:
    dispatcher = make()
    x, idx, w = inputs()
    caught = expect_error(dispatcher.dispatch, x.to_sparse() if rank == 1 else x, idx, w)
    works(dispatcher)
    return caught


def test_sparse_tokens_on_one_rank() -> None:
    same_everywhere(run_ranks(sparse_tokens, 2), "ArgumentError", "rank 1", "tokens must be a dense torch.Tensor")


BAD_LAYER_INPUT: dict[str, tuple[dict[str, Any], str]] = {
    "x is a list": ({"x": [1.0]}, "x must be a dense torch.Tensor"),
    "hidden size": (
        {"x": torch.ones(2, 5, 1, 31)},
        "x must have the shape [..., hidden_size=32], got [..., 5, 1, 31]",
    ),
    "no dimensions": ({"x": torch.ones(())}, "x must have the shape [..., hidden_size=32], got []"),
    "dtype of x": (
        {"x": torch.ones(3, 32).double()},
        "x must have the dtype of the experts, torch.float32, got torch.float64",
    ),
    "device of x": ({"x": torch.ones(3, 32, device="meta")}, "x must be on cpu, the dispatcher's device, got meta"),
    "mask is a list": ({"token_mask": [True] * 3}, "token_mask must be a dense torch.Tensor"),
    "mask too short": (
        {"token_mask": torch.ones(2).bool()},
        "token_mask must have the shape of x without its last dimension: 3 in dimension 0, got 2",
    ),
    "mask too deep": ({"token_mask": torch.ones(3, 32).bool()}, "last dimension: 1 dimensions, got 2"),
    "dtype of the mask": ({"token_mask": torch.ones(3)}, "token_mask must be torch.bool, got torch.float32"),
    "device of the mask": (
        {"token_mask": torch.ones(3, device="meta").bool()},
        "token_mask must be on cpu, the device of x, got meta",
    ),
}


def bad_layer_input(rank: int, world_size: int) -> dict[str, list[Caught]]:
    config = EPConfig(num_experts=4, top_k=2, hidden_size=32, max_tokens_per_rank=8)
    layer = ep_comm.MoELayer(32, 16, 4, 2, config, seed=0)
    good = {"x": torch.ones(3, 32), "token_mask": torch.ones(3, dtype=torch.bool)}
    caught = {}
    for name, (bad, _) in BAD_LAYER_INPUT.items():
        caught[name] = expect_error(layer, **(good | bad if rank == 1 else good))
        works(layer.dispatcher)
    with torch.autocast("cpu", torch.bfloat16):
        caught["autocast"] = expect_error(layer, torch.ones(3, 32).to(torch.float if rank == 0 else torch.int))
    with mock.patch.object(
        layer.router, "forward", side_effect=MemoryError("no room") if rank == 1 else None
    ) as router:
        router.return_value = inputs(3)[1:]
        caught["router"] = expect_error(layer, **good)
    with mock.patch.object(
        ep_comm.moe.layer, "check_layer_input", side_effect=ZeroDivisionError if rank == 1 else None
    ) as check:
        check.return_value = None
        caught["check"] = expect_error(layer, **good)
    caught["refused"] = expect_error(layer.dispatcher.refuse, "too hot") if rank == 1 else expect_error(layer, **good)
    assert layer(**good).shape == (3, 32)
    return caught


def test_a_layer_whose_input_is_bad_on_one_rank() -> None:
    told, own = run_ranks(bad_layer_input, 2)
    for name, (_, message) in BAD_LAYER_INPUT.items():
        same_everywhere([told[name], own[name]], "ArgumentError", "rank 1: ", message)
    same_everywhere([told["autocast"], own["autocast"]], "ArgumentError", "x must have a floating dtype", "torch.int32")
    assert own["router"] == ("MemoryError", "no room") and told["router"].type == "EPError"
    assert "rank 1: MemoryError was raised there" in told["router"].message
    assert own["check"].type == "ZeroDivisionError" and told["check"].type == "EPError"
    assert "rank 1: ZeroDivisionError was raised there" in told["check"].message
    assert "too hot" in own["refused"].message and "refused its input" in told["refused"].message


def swapped(rank: int, world_size: int, mode: str, num_experts: int) -> Caught:
    room = {"capacity_factor": 4.0} if mode == "static" else {}
    first, second = make(mode, **room), make(mode, num_experts=num_experts, **room)
    caught = expect_error((first if rank == 0 else second).dispatch, *inputs())
    works(first)
    works(second)
    return caught


@pytest.mark.parametrize(("mode", "num_experts"), [("eager", 4), ("eager", 8), ("static", 8)])
def test_dispatchers_in_another_order(mode: str, num_experts: int) -> None:
    same_everywhere(run_ranks(swapped, 2, mode, num_experts), "HandleError", "out of step", "rank 0", "rank 1")


def weighted_on_one_rank(rank: int, world_size: int) -> Caught:
    dispatcher = make()
    d = dispatcher.dispatch(*inputs())
    caught = expect_error(dispatcher.combine, d.tokens, d.handle, apply_weights=rank == 0)
    works(dispatcher)
    return caught


def test_apply_weights_on_one_rank_only() -> None:
    same_everywhere(run_ranks(weighted_on_one_rank, 2), "HandleError", "apply_weights=True", "apply_weights=False")


def copies(rank: int, world_size: int) -> None:
    dispatcher = make("static", budget_rows=16)
    dispatcher.dispatch(*inputs(8))
    dispatcher.grow(dispatcher.required_rows)
    twin = copy.deepcopy(dispatcher)
    assert twin.ordinal != dispatcher.ordinal and twin.state_dict() == dispatcher.state_dict()
    works(dispatcher)
    works(twin)
    layer = ep_comm.MoELayer(32, 16, 4, 2, dispatcher.config, seed=rank)
    average = torch.optim.swa_utils.AveragedModel(layer)
    x = torch.randn(3, 32)
    assert torch.equal(average(x), layer(x))
    for thing in (dispatcher, layer, dispatcher.dispatch(*inputs()).handle):
        with pytest.raises(EPError, match="pickled"):
            pickle.dumps(thing)


def test_copying_works_and_pickling_says_why_not() -> None:
    run_ranks(copies, 2)


class FakeWindow:
    """Takes as long as the slowest rank to make, as a window of GPU memory does."""

    def __init__(self, rank: int, key: str, layout: WindowLayout) -> None:
        self.rank, self.key, self.layout = rank, key, layout
        dist.barrier()


def windows_dropped_without_close(rank: int, world_size: int) -> list[str]:
    def window(tokens: int) -> FakeWindow:
        layout = WindowLayout(ep_size=world_size, num_experts=4, top_k=2, max_tokens=tokens, row_bytes=64)
        made = windows.shared_window(dist.group.WORLD, layout, lambda *args: FakeWindow(rank, *args))
        assert made.layout.covers(layout)
        return made

    names = []
    gc.disable()
    try:
        for keeper in (0, 1, None):
            first = window(8)
            assert window(8) is first and window(4) is first
            names.append(first.key)
            cycle: list[Any] = [first]
            cycle.append(cycle)
            del first, cycle
            if rank != keeper:
                gc.collect()  # on the other rank it lives on
        larger = window(8), window(16), window(12)
        assert larger[1] is larger[2] is not larger[0]
        names += [each.key for each in larger]
        larger[1].rank = 1 - rank  # as after a group of the same name with its ranks in another order
        names.append(window(16).key)
        return names
    finally:
        gc.enable()


def test_ranks_agree_on_windows_whatever_was_collected() -> None:
    first, second = run_ranks(windows_dropped_without_close, 2)
    assert first == second and len(set(first)) == 6


def no_memory_on_one_rank(rank: int, world_size: int) -> Caught:
    last = dist.new_group([world_size - 1])
    assert rank_name(1, dist.group.WORLD) == "rank 1" and rank_name(0, None) == "rank 0"
    if rank == world_size - 1:
        assert rank_name(0, last) == "rank 0 (global rank 1)"
        caught = expect_error(Dispatcher(EPConfig(4, 2, 32, 8), last).dispatch, [], *inputs()[1:])
        assert caught.message.startswith("rank 0 (global rank 1): tokens must be"), caught
    return expect_error(windows.require_everywhere, "no memory left" if rank == 1 else None, dist.group.WORLD)


def test_a_window_that_one_rank_cannot_make() -> None:
    same_everywhere(run_ranks(no_memory_on_one_rank, 2), "EPError", "rank 1: no memory left")


def made_in_inference_mode(rank: int, world_size: int) -> None:
    for mode in ("eager", "static"):
        with torch.inference_mode():
            dispatcher = make(mode, **({"capacity_factor": 4.0} if mode == "static" else {}))
            x, idx, w = inputs()
            dispatcher.combine((d := dispatcher.dispatch(x, idx, w)).tokens, d.handle)
        works(dispatcher)
        x, idx, w = inputs()
        d = dispatcher.dispatch(x.requires_grad_(), idx, w)
        dispatcher.combine(d.tokens, d.handle).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 2.0))


@pytest.mark.parametrize("world_size", [1, 2])
def test_inference_mode_leaves_nothing_behind(world_size: int) -> None:
    run_ranks(made_in_inference_mode, world_size)


def test_errors_are_what_they_say() -> None:
    assert issubclass(ConfigError, ValueError) and issubclass(HandleError, EPError)


def under_ddp(rank: int, world_size: int) -> tuple[float, bool]:
    config = EPConfig(num_experts=4, top_k=2, hidden_size=32, max_tokens_per_rank=8)
    layer = ep_comm.MoELayer(32, 16, 4, 2, config, seed=5)
    own = [p.detach().clone() for p in layer.experts.parameters()]
    ep_comm.moe.ignore_experts_in_ddp(layer)
    model = torch.nn.parallel.DistributedDataParallel(layer)
    make = torch.Generator().manual_seed(rank)
    model(torch.randn(6, 32, generator=make)).square().sum().backward()
    kept = all(torch.equal(a, b) for a, b in zip(own, layer.experts.parameters(), strict=True))
    return float(layer.router.weight.grad.sum()), kept


def test_ddp_leaves_the_experts_alone() -> None:
    (first, kept), (second, also_kept) = run_ranks(under_ddp, 2)
    assert first == second != 0.0 and kept and also_kept
