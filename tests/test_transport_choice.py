"""Which transport a group gets: decided from the GPUs of its ranks, and from what the kernels can take."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from ep_comm import ConfigError, EPConfig
from ep_comm.cuda.window import PlanLaunch, plan_problem
from ep_comm.transport import open_transport, sites
from ep_comm.transport.sites import Site, symmetric_problems, this_site

from .harness import Caught, expect_error, run_ranks

CONFIG = EPConfig(num_experts=8, top_k=2, hidden_size=32, max_tokens_per_rank=8, transport="symmetric")


def site(rank: int, **changes: Any) -> Site:
    return replace(Site("a", None, gpu=f"gpu{rank}", index=rank), **changes)


@pytest.mark.parametrize(
    "changes, problems",
    [
        ({}, []),
        ({0: {"unreachable": frozenset({"gpu7"})}}, []),  # no rank of the group is there
        (
            {1: {"unreachable": frozenset({"gpu0", "gpu2", "gpu7"})}},
            ["rank 1: its GPU cannot address the memory of the GPU of rank 0, 2"],
        ),
        ({1: {"problem": "no kernels"}, 2: {"host": "b"}}, ["rank 1: no kernels", "the ranks are on several hosts"]),
        ({2: {"gpu": "gpu0"}}, ["ranks 0, 2 share one GPU"]),
        (
            {2: {"index": 1}},
            ["ranks 1, 2 all call their GPU cuda:1 and torch's symmetric memory wants other numbers: let every rank "
             "see the GPUs of all"],
        ),
        ({rank: {"index": 0, "same_index": True} for rank in range(3)}, []),
    ],
)  # fmt: skip
def test_the_gpus_of_the_group_decide(changes: dict[int, dict[str, Any]], problems: list[str]) -> None:
    assert symmetric_problems([site(rank, **changes.get(rank, {})) for rank in range(3)]) == problems


class FakeCuda:
    """Four GPUs, of which number 3 is on another switch."""

    properties = SimpleNamespace(name="H200", shared_memory_per_block_optin=232448, multi_processor_count=132)

    def patches(self) -> Any:
        return mock.patch.multiple(
            torch.cuda,
            device_count=lambda: 4,
            get_device_capability=lambda device: (9, 0),
            can_device_access_peer=lambda a, b: 3 not in (a, b),
            get_device_properties=lambda which: SimpleNamespace(
                **vars(self.properties), shared_memory_per_block=49152, uuid=f"gpu{getattr(which, 'index', which)}"
            ),
        )


def test_what_a_rank_says_of_itself() -> None:
    with FakeCuda().patches(), mock.patch.object(sites, "cuda_kernels_problem", lambda: None):
        seen = [this_site(CONFIG, 3, torch.device("cuda", rank)) for rank in range(4)]
        large = this_site(replace(CONFIG, max_tokens_per_rank=1 << 20), 3, torch.device("cuda", 0))
    assert [each.unreachable for each in seen] == [{"gpu3"}, {"gpu3"}, {"gpu3"}, {"gpu0", "gpu1", "gpu2"}]
    assert symmetric_problems(seen[:3]) == [] and len(symmetric_problems(seen)) == 4
    assert "max_tokens_per_rank=1048576, at most 540672 with top_k=2 and num_experts=8" in (large.problem or "")
    with mock.patch.object(sites, "_problem", side_effect=RuntimeError("the driver\nsays no")):
        assert "RuntimeError when it looked at its GPU: the driver" == (
            this_site(CONFIG, 3, torch.device("cuda", 0)).problem or ""
        )


def test_the_largest_plan() -> None:
    """Whatever fits the largest number of tokens fits all smaller ones, and no more blocks are launched than run."""
    sizes = {"num_experts": 256, "ep_size": 8}
    for top_k in (1, 7, 8, 32):
        most = next(t for t in range(4096, 1 << 21, 509) if plan_problem(132, num_tokens=t, top_k=top_k, **sizes)) - 509
        for num_tokens in (0, 1, most // 3, most // 2, most):
            launch = PlanLaunch.of(132, num_tokens=num_tokens, top_k=top_k, **sizes)
            assert launch.blocks <= launch.resident_blocks(132)
            assert launch.blocks * (PlanLaunch.WARPS * launch.items_per_warp // top_k) >= num_tokens
    assert "num_experts=8192" in (plan_problem(132, num_tokens=1, top_k=8, num_experts=8192, ep_size=8) or "")


def asked_for_symmetric(rank: int, world_size: int) -> tuple[Caught, str]:
    blocked = frozenset({"gpu0"}) if rank == 1 else frozenset()
    device = torch.device("cpu")
    with mock.patch("ep_comm.transport.this_site", lambda *_: site(rank, unreachable=blocked)):
        caught = expect_error(open_transport, CONFIG, torch.distributed.group.WORLD, rank, world_size, device)
        auto = replace(CONFIG, transport="auto")
        return caught, open_transport(auto, torch.distributed.group.WORLD, rank, world_size, device).name


def test_what_one_rank_cannot_reach_all_ranks_hear_of() -> None:
    for caught, chosen in run_ranks(asked_for_symmetric, 2):
        assert caught.type == ConfigError.__name__ and chosen == "collective"
        assert "rank 1: its GPU cannot address the memory of the GPU of rank 0" in caught.message
