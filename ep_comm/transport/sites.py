"""What decides whether the ranks of a group can write into each other's memory.

Every rank says what it knows of itself and of the GPUs that it sees; the decision is made from what all of them said,
by the same function on every rank. Only GPUs of the group's ranks count: others on the host do not matter.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..config import EPConfig
from ..cuda.kernels import cuda_kernels_problem
from ..cuda.window import MAX_RANKS, MAX_TOP_K, MIN_SHARED_BYTES, plan_problem
from .hosts import host_name

__all__ = ["Site", "symmetric_problems", "this_site"]


@dataclass(frozen=True)
class Site:
    """Where one rank is.

    Attributes:
        host: its host's name.
        problem: why this rank alone cannot use the symmetric transport, or None.
        gpu: the unique id of its GPU; empty without one.
        index: number of that GPU in its process.
        unreachable: ids of GPUs whose memory its GPU cannot address, among those it sees.
        same_index: torch's symmetric memory was told to put up with ranks whose GPUs have the same number.
    """

    host: str
    problem: str | None
    gpu: str = ""
    index: int = -1
    unreachable: frozenset[str] = frozenset()
    same_index: bool = False


def this_site(config: EPConfig, ep_size: int, device: torch.device) -> Site:
    """What this rank has to say. Raises nothing: the other ranks wait for it."""
    host = host_name()
    try:
        problem = _problem(config, ep_size, device)
        if problem is not None:
            return Site(host, problem)
        others = [other for other in range(torch.cuda.device_count()) if other != device.index]
        blocked = [other for other in others if not torch.cuda.can_device_access_peer(device.index, other)]
        return Site(
            host,
            None,
            _gpu_id(device.index),
            device.index,
            frozenset(map(_gpu_id, blocked)),
            os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1",
        )
    except Exception as error:
        return Site(host, f"{type(error).__name__} when it looked at its GPU: {(str(error).splitlines() or [''])[0]}")


def symmetric_problems(sites: Sequence[Site]) -> list[str]:
    """Why the ranks at ``sites`` cannot use the symmetric transport; empty if they can."""
    found = [f"rank {rank}: {site.problem}" for rank, site in enumerate(sites) if site.problem]
    if len({site.host for site in sites}) > 1:
        found.append("the ranks are on several hosts")
    if found:
        return found
    for rank, site in enumerate(sites):
        blocked = [other for other, peer in enumerate(sites) if peer.gpu in site.unreachable]
        if blocked:
            found.append(f"rank {rank}: its GPU cannot address the memory of the GPU of rank {_listed(blocked)}")
    by_gpu = _sharing([site.gpu for site in sites])
    found += [f"ranks {_listed(ranks)} share one GPU" for ranks in by_gpu]
    if not by_gpu and not all(site.same_index for site in sites):
        # torch tells GPUs apart by their numbers, which start at 0 in every process that sees only its own.
        found += [
            f"ranks {_listed(ranks)} all call their GPU cuda:{sites[ranks[0]].index} and torch's symmetric memory "
            f"wants other numbers: let every rank see the GPUs of all"
            for ranks in _sharing([site.index for site in sites])
        ]
    return found


def _problem(config: EPConfig, ep_size: int, device: torch.device) -> str | None:
    """Why this rank cannot use the symmetric transport whatever the others say, or None."""
    if device.type != "cuda":
        return "the process group's device is not a CUDA GPU"
    if cuda_kernels_problem():
        return cuda_kernels_problem()
    if torch.cuda.get_device_capability(device) < (9, 0):
        return f"compute capability {torch.cuda.get_device_capability(device)}, 9.0 or higher is needed"
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    if shared < MIN_SHARED_BYTES:
        return f"a block of {properties.name} has {shared} bytes of shared memory, {MIN_SHARED_BYTES} are needed"
    if os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):
        return "NCCL_P2P_DISABLE is set"
    if ep_size > MAX_RANKS:
        return f"ep_size={ep_size}, at most {MAX_RANKS}"
    if config.top_k > MAX_TOP_K:
        return f"top_k={config.top_k}, at most {MAX_TOP_K}"
    return plan_problem(
        properties.multi_processor_count,
        num_tokens=config.max_tokens_per_rank,
        top_k=config.top_k,
        num_experts=config.num_experts,
        ep_size=ep_size,
    )


def _gpu_id(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _sharing(values: Sequence[object]) -> list[list[int]]:
    """The ranks of every value that several of them have."""
    ranks: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return [group for group in ranks.values() if len(group) > 1]


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
