"""Transports: how rows get from rank to rank. See :mod:`ep_comm.transport.base` for the interface."""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist

from ..config import EPConfig
from ..cuda.kernels import cuda_kernels_problem
from ..cuda.window import MAX_RANKS, MAX_TOP_K, MIN_SHARED_BYTES
from ..errors import ConfigError
from .base import Transport
from .collective import CollectiveTransport
from .hierarchical import HierarchicalTransport
from .hosts import Hosts, host_name, hosts_problem, ranks_by_host

__all__ = ["Transport", "open_transport"]

log = logging.getLogger("ep_comm")


def open_transport(
    config: EPConfig, group: dist.ProcessGroup | None, rank: int, ep_size: int, device: torch.device
) -> Transport:
    """The transport that ``config.transport`` asks for. Collective: all ranks get the same kind.

    Raises:
        ConfigError: on all ranks, if the transport that was asked for cannot serve this group.
    """
    if ep_size == 1 or config.transport == "collective":
        return CollectiveTransport(group, rank, ep_size)
    facts: list[tuple[str, str | None]] = [("", None)] * ep_size
    dist.all_gather_object(facts, (host_name(), _local_problem(config, ep_size, device)), group=group)
    ranks_GJ = ranks_by_host([host for host, _ in facts])
    reasons = [f"rank {r}: {problem}" for r, (_, problem) in enumerate(facts) if problem]
    if len(ranks_GJ) > 1:
        reasons.append("the ranks are on several hosts")
    if not reasons and config.transport != "hierarchical":
        from .symmetric import SymmetricTransport

        return SymmetricTransport(config, group, rank, ep_size, device)
    if config.transport == "symmetric":
        raise ConfigError(
            f"rank {rank}: transport='symmetric' cannot serve this group: {'; '.join(reasons)}; use 'auto' or "
            f"'collective'"
        )
    problem = hosts_problem(ranks_GJ)
    if problem is None:
        log.info("transport=%r: hierarchical, %d hosts of %d ranks", config.transport, len(ranks_GJ), len(ranks_GJ[0]))
        return HierarchicalTransport(config, group, Hosts(ranks_GJ, rank, device), rank, ep_size)
    if config.transport == "hierarchical":
        raise ConfigError(
            f"rank {rank}: transport='hierarchical' cannot serve this group: {problem}; use 'auto' or 'collective'"
        )
    log.info("transport='auto' chose collective: %s", "; ".join([*reasons, problem]))
    return CollectiveTransport(group, rank, ep_size)


def _local_problem(config: EPConfig, ep_size: int, device: torch.device) -> str | None:
    """Why this rank cannot use the symmetric transport, or None."""
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
    others = [other for other in range(torch.cuda.device_count()) if other != device.index]
    blocked = [other for other in others if not torch.cuda.can_device_access_peer(device.index, other)]
    if blocked:
        return f"GPU {device.index} cannot address the memory of GPU {blocked[0]}"
    return None
