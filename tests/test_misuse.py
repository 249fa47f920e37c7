"""Mistakes of a program around the dispatcher: every rank hears of them, and the next good call works."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import ep_comm
from ep_comm import ConfigError, Dispatcher, EPConfig, EPError, HandleError

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


def bad_layer_input(rank: int, world_size: int, what: str) -> Caught:
    config = EPConfig(num_experts=4, top_k=2, hidden_size=32, max_tokens_per_rank=8)
    layer = ep_comm.MoELayer(32, 16, 4, 2, config, seed=0)
    x, mask = torch.ones(3, 32), torch.ones(3, dtype=torch.bool)
    if rank == 1 and what == "shape":
        x = torch.ones(3, 31)
    elif rank == 1 and what == "dtype":
        x = x.double()
    elif rank == 1:
        mask = mask[:2]
    caught = expect_error(layer, x, mask)
    assert layer(torch.ones(3, 32)).shape == (3, 32)
    return caught


@pytest.mark.parametrize("what", ["shape", "dtype", "mask"])
def test_a_layer_that_refuses_its_input_on_one_rank(what: str) -> None:
    results = run_ranks(bad_layer_input, 2, what)
    same_everywhere(results, "ArgumentError", "rank 1", "refused its input")
    assert {"shape": "[3, 31]", "dtype": "float64", "mask": "token_mask"}[what] in results[1].message


def swapped(rank: int, world_size: int) -> Caught:
    first, second = make(), make()
    caught = expect_error((first if rank == 0 else second).dispatch, *inputs())
    works(first)
    works(second)
    return caught


def test_dispatchers_in_another_order() -> None:
    same_everywhere(run_ranks(swapped, 2), "HandleError", "out of step", "rank 0", "rank 1")


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
