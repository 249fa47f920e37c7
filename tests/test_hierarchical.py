"""The hierarchical transport on two hosts of two ranks: the rows of the flat path, sums in the documented order."""

from __future__ import annotations

import dataclasses
import gc
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
from tests import reference, steps
from tests.harness import expect_error, run_ranks
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
    @given(st.lists(specs(RANKS), min_size=12, max_size=12))
    def check(batch: list[Spec]) -> None:
        check_specs(batch, names)

    check()
