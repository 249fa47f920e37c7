"""The hierarchical transport on two hosts of two ranks: the rows of the flat path, sums in the documented order."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from torch import Tensor

import ep_comm
from tests import reference, steps, tiny_model
from tests.harness import run_ranks
from tests.test_dispatch_combine import DTYPES, Spec, run_jobs, specs
from tests.test_static_mode import HostSyncError, forbid_host_sync

RANKS = 4
BLOCKS, IN_TURN = "aabb", "abab"


@contextmanager
def host_named(name: str) -> Iterator[None]:
    """As if this rank ran on the host ``name``."""
    with mock.patch.dict(os.environ, {"NCCL_HOSTID": name}):
        yield


def on_hosts(rank: int, world_size: int, names: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Run ``fn`` on a rank of the host whose name is the rank's letter."""
    with host_named(names[rank]):
        return fn(rank, world_size, *args)


def combine_by_host(
    plan: list[reference.Layout], outputs: list[Tensor], weights: list[Tensor], apply_weights: bool, names: str
) -> list[Tensor]:
    """Slots ascending on a rank, ranks ascending on a host, rounded once; hosts by their first rank, rounded once."""
    dtype = outputs[0].dtype
    hosts = [[rank for rank, name in enumerate(names) if name == host] for host in dict.fromkeys(names)]
    row_of = [{source: row for row, source in layout.rows()} for layout in plan]
    combined = []
    for rank, w in enumerate(weights):
        out = torch.zeros(len(w), outputs[0].shape[1], dtype=dtype)
        for token, slots in enumerate(w):
            total = torch.zeros(out.shape[1])
            for ranks in hosts:
                of_host = torch.zeros(out.shape[1])
                for owner in ranks:
                    of_rank = torch.zeros(out.shape[1])
                    for slot, factor in enumerate(slots):
                        row = row_of[owner].get((rank, token, slot))
                        if row is not None:
                            term = outputs[owner][row].float()
                            of_rank = of_rank + (factor * term if apply_weights else term)
                    of_host = of_host + of_rank
                total = total + of_host.to(dtype).float()
            out[token] = total.to(dtype)
        combined.append(out)
    return combined


def check_specs(batch: list[Spec], names: str) -> None:
    """Every example in both modes: rows as ever, sums as above."""
    jobs, expected = [], []
    for spec in batch:
        topk_idx = spec.topk_idx()
        plan = reference.layouts(topk_idx, spec.num_experts, spec.alignment)
        dtypes = DTYPES[spec.dtype], getattr(torch, spec.idx_dtype)
        inputs = steps.make_inputs(plan, topk_idx, spec.top_k, spec.hidden, *dtypes, spec.seed, spec.integers)
        most = max(layout.required_rows for layout in plan)
        configs = {
            mode: dataclasses.replace(spec.config(mode, most), transport="hierarchical") for mode in ("eager", "static")
        }
        jobs.append((configs, inputs, spec.apply_weights))
        rounding = spec.scale_rounding
        flat = steps.expected_step(
            plan,
            topk_idx,
            spec.num_experts,
            inputs,
            spec.apply_weights,
            rounding if spec.dispatch_mxfp8 else None,
            rounding if spec.combine_mxfp8 else None,
        )
        weights = [i.topk_weights for i in inputs]
        out = combine_by_host(plan, [i.expert_output for i in inputs], weights, spec.apply_weights, names)
        grads = combine_by_host(plan, [i.grad_rows for i in inputs], weights, False, names)
        expected.append(
            [dataclasses.replace(w, out=o, grad_tokens=g) for w, o, g in zip(flat, out, grads, strict=True)]
        )
    for rank, of_rank in enumerate(run_ranks(on_hosts, RANKS, names, run_jobs, jobs)):
        for spec, by_mode, want in zip(batch, of_rank, expected, strict=True):
            for mode, (got, overflowed) in by_mode.items():
                wrong = steps.differences(got, want[rank], exact_dots=spec.integers)
                assert not wrong, f"rank {rank}, {mode}, {spec}:\n" + "\n".join(wrong)
                assert not overflowed, f"rank {rank}, {mode}, {spec}"


@pytest.mark.parametrize("names", [BLOCKS, IN_TURN])
def test_everything_equals_the_reference(names: str) -> None:
    @settings(max_examples=2, phases=[Phase.explicit, Phase.generate])
    @given(st.lists(specs(RANKS), min_size=10, max_size=10))
    def check(batch: list[Spec]) -> None:
        check_specs(batch, names)

    check()


def on_paper(rank: int, world_size: int, transport: str) -> Any:
    """One bf16 token of rank 0 on an expert of every rank but its own; twice on rank 2."""
    config = ep_comm.EPConfig(4, 4, 1, 1, transport=transport, alignment=1)
    with ep_comm.Dispatcher(config) as dispatcher:
        count = 1 if rank == 0 else 0
        d = dispatcher.dispatch(
            torch.ones(count, 1).bfloat16(), torch.tensor([[3, 2, 1, 2]])[:count], torch.ones(count, 4)
        )
        values = {1: [8.0], 2: [256.0, 1.0], 3: [1.0]}.get(rank, [])
        return dispatcher.combine(torch.tensor(values).reshape(-1, 1).bfloat16(), d.handle).tolist()


def test_a_host_rounds_once_and_the_owner_once() -> None:
    # Host b: 256 + 1 + 1 = 258, and 266 with the 8 of host a. Rank by rank, 256 + 1 rounds to 256, and 265 to 264.
    assert run_ranks(on_hosts, RANKS, BLOCKS, on_paper, "hierarchical")[0] == [[266.0]]
    assert run_ranks(on_hosts, RANKS, BLOCKS, on_paper, "collective")[0] == [[264.0]]


def rows_between(rank: int, world_size: int, transport: str, names: str, ids: list[list[list[int]]]) -> list[int]:
    """Token rows that this rank sent to itself, inside its host and to other hosts, in one dispatch."""
    sent = [0, 0, 0]
    exchange = dist.all_to_all_single

    def counted(out: Tensor, rows: Tensor, out_splits: Any, in_splits: list[int], group: Any) -> None:
        for other, count in zip(dist.get_process_group_ranks(group), in_splits, strict=True):
            sent[0 if other == rank else 1 if names[other] == names[rank] else 2] += count
        exchange(out, rows, out_splits, in_splits, group=group)

    config = ep_comm.EPConfig(8, 4, 32, 8, transport=transport, dispatch_forward_dtype="mxfp8")
    with ep_comm.Dispatcher(config) as dispatcher, mock.patch.object(dist, "all_to_all_single", counted):
        count = len(ids[rank])
        dispatcher.dispatch(torch.ones(count, 32), torch.tensor(ids[rank]), torch.ones(count, 4))
    return sent


@pytest.mark.parametrize("names", [BLOCKS, IN_TURN])
def test_a_token_crosses_once_for_each_host(names: str) -> None:
    make = torch.Generator().manual_seed(3)
    ids = [torch.rand(6, 8, generator=make).topk(4).indices.tolist() for _ in range(RANKS)]
    hosts_of = [[{names[e // 2] for e in slots} for slots in of_rank] for of_rank in ids]
    ranks_of = [[{e // 2 for e in slots} for slots in of_rank] for of_rank in ids]
    by_hosts = run_ranks(on_hosts, RANKS, names, rows_between, "hierarchical", names, ids)
    flat = run_ranks(on_hosts, RANKS, names, rows_between, "collective", names, ids)
    for rank, name in enumerate(names):
        abroad = [other for other, host in enumerate(names) if host != name]
        assert by_hosts[rank][2] == sum(len(hosts - {name}) for hosts in hosts_of[rank])
        assert flat[rank][2] == sum(len(ranks & set(abroad)) for ranks in ranks_of[rank]) > by_hosts[rank][2]
    # Inside the hosts: every (token, rank) that the forwarding rank does not want for itself.
    rails = [[r for r in range(RANKS) if names[: r + 1].count(names[r]) == i + 1] for i in range(2)]
    for rank in range(RANKS):
        rail = next(rail for rail in rails if rank in rail)
        beside = [other for other in range(RANKS) if names[other] == names[rank] and other != rank]
        assert by_hosts[rank][1] == sum(len(ranks & set(beside)) for p in rail for ranks in ranks_of[p])


def drop(
    rank: int, world_size: int, inputs: list[steps.StepInputs], limits: dict[str, int]
) -> list[tuple[steps.StepResult, bool]]:
    """The same step on both transports, losing what does not fit."""
    results = []
    for transport in ("collective", "hierarchical"):
        config = ep_comm.EPConfig(
            8, 3, 7, 12, mode="static", alignment=1, overflow="drop", transport=transport, **limits
        )
        step = dataclasses.replace(inputs[rank])
        for name in ("expert_output", "grad_rows", "grad_row_weights"):
            full = getattr(step, name)
            setattr(step, name, torch.cat([full, full.new_ones(96, *full.shape[1:])])[: config.budget_rows])
        with ep_comm.Dispatcher(config) as dispatcher:
            results.append((steps.run_step(dispatcher, step, True), dispatcher.overflowed))
    return results


@pytest.mark.parametrize("limits", [dict(budget_rows=96, pair_rows=2), dict(budget_rows=20, pair_rows=12)])
def test_what_does_not_fit_is_dropped_as_on_the_flat_path(limits: dict[str, int]) -> None:
    make = torch.Generator().manual_seed(5)
    ids = [(torch.rand(n, 8, generator=make) ** 2).topk(3).indices.tolist() for n in (12, 0, 7, 12)]
    plan = reference.layouts(ids, 8, 1)
    # Small whole numbers: every order of summing them gives the same bits.
    inputs = steps.make_inputs(plan, ids, 3, 7, torch.float32, integers=True)
    for step in inputs:
        step.topk_weights = step.topk_weights.mul(4).round()
    for names in (BLOCKS, IN_TURN):
        for (flat, flat_over), (got, over) in run_ranks(on_hosts, RANKS, names, drop, inputs, limits):
            assert over and flat_over
            assert not steps.differences(got, flat)


def watched_step(rank: int, world_size: int, dtype: str) -> list[Any]:
    config = ep_comm.EPConfig(
        8,
        2,
        32,
        8,
        mode="static",
        alignment=1,
        budget_rows=40,
        pair_rows=8,
        dispatch_forward_dtype=dtype,
        combine_backward_dtype=dtype,
    )
    with ep_comm.Dispatcher(config) as dispatcher:
        seen: list[Any] = [dispatcher.transport]
        for ids in ([[0, 7], [2, 3], [5, -1]], [[0, 0]] * 8):  # the second overflows
            gen = torch.Generator().manual_seed(rank)
            tokens = torch.randn(len(ids), 32, generator=gen, requires_grad=True)
            weights = torch.rand(len(ids), 2, generator=gen, requires_grad=True)
            topk_idx = torch.tensor(ids)
            with forbid_host_sync():
                try:
                    d = dispatcher.dispatch(tokens, topk_idx, weights)
                    out = dispatcher.combine(d.tokens * 2, d.handle, apply_weights=True)
                    out.backward(torch.ones_like(out))
                except HostSyncError as error:
                    return [f"host sync: {error}"]
            seen.append(dispatcher.overflowed)
        return seen


@pytest.mark.parametrize("dtype", ["bf16", "mxfp8"])
def test_static_mode_never_waits_for_the_device(dtype: str) -> None:
    assert run_ranks(on_hosts, RANKS, BLOCKS, watched_step, dtype) == [["hierarchical", False, True]] * RANKS


def train_both_ways(rank: int, world_size: int) -> tuple[int, list[str]]:
    """Static training from budgets of one row must end with the weights of eager training."""
    results = []
    for changes in ({"mode": "eager"}, {"mode": "static", "budget_rows": 1, "pair_rows": 1}):
        torch.manual_seed(7 + rank)
        formats = {"dispatch_forward_dtype": "mxfp8", "combine_backward_dtype": "mxfp8"}
        model = tiny_model.Model(tiny_model.config(**changes, **formats), recompute=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run = ep_comm.StepRunner(tiny_model.step_fn(model), model=model, optimizer=optimizer)
        for step in range(3):
            run(tiny_model.batch(rank, step))
        results.append(tiny_model.state_of(model, optimizer))
    tiny_model.assert_same_state(*results)
    return run.replays, [layer.dispatcher.transport for layer in model.layers]


def test_static_training_equals_eager() -> None:
    results = run_ranks(on_hosts, RANKS, BLOCKS, train_both_ways)
    replays, transports = results[0]
    assert replays >= 1 and transports == ["hierarchical"] * 2
    assert results == [results[0]] * RANKS


def chosen(rank: int, world_size: int, transport: str) -> Any:
    config = ep_comm.EPConfig(4, 1, 8, 4, transport=transport)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    log = logging.getLogger("ep_comm")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with ep_comm.Dispatcher(config) as dispatcher:
            x = torch.ones(1, 8)
            d = dispatcher.dispatch(x, torch.tensor([[rank]]), torch.ones(1, 1))
            assert torch.equal(dispatcher.combine(d.tokens, d.handle), x)
            return dispatcher.transport, " | ".join(messages)
    except ep_comm.ConfigError as error:
        return "ConfigError", str(error)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ("aaab", "3, 1 ranks"),
        ("abcd", "every host has one rank"),
        ("abba", "neither in blocks nor dealt out in turn"),
        ("aaaa", "all ranks are on one host"),
    ],
)
def test_other_hosts_take_the_flat_path(names: str, why: str) -> None:
    for transport, said in run_ranks(on_hosts, RANKS, names, chosen, "auto"):
        assert transport == "collective" and why in said
    for rank, (kind, said) in enumerate(run_ranks(on_hosts, RANKS, names, chosen, "hierarchical")):
        assert kind == "ConfigError" and why in said and f"rank {rank}" in said and "hierarchical" in said


def test_two_even_hosts_are_found() -> None:
    for transport, said in run_ranks(on_hosts, RANKS, BLOCKS, chosen, "auto"):
        assert transport == "hierarchical" and "2 hosts of 2 ranks" in said


def interleaved(rank: int, world_size: int) -> tuple[int, list[bool]]:
    """Two dispatchers, handles in flight; and the process groups that were made for them."""
    group = dist.new_group([0, 1, 2, 3])
    before = len(dist.distributed_c10d._world.pg_map)
    first, second = (
        ep_comm.Dispatcher(ep_comm.EPConfig(experts, 2, hidden, 8, mode=mode, capacity_factor=4.0), group)
        for experts, hidden, mode in ((4, 32, "eager"), (8, 50, "static"))
    )
    handles = []
    for turn in range(2):
        for dispatcher in (first, second):
            gen = torch.Generator().manual_seed(10 * turn + rank)
            x = torch.randn(turn + rank, dispatcher.config.hidden_size, generator=gen)
            ids = torch.rand(len(x), dispatcher.config.num_experts, generator=gen).topk(2).indices
            handles.append((dispatcher, x, dispatcher.dispatch(x, ids, torch.ones(len(x), 2))))
    right = [torch.equal(dispatcher.combine(d.tokens, d.handle), 2 * x) for dispatcher, x, d in reversed(handles)]
    made = len(dist.distributed_c10d._world.pg_map) - before
    dist.destroy_process_group(group)
    return made, right


def test_dispatchers_side_by_side_need_no_further_groups() -> None:
    assert run_ranks(on_hosts, RANKS, BLOCKS, interleaved) == [(0, [True] * 4)] * RANKS
