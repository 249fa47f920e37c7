"""Transports: how rows get from rank to rank. See :mod:`ep_comm.transport.base` for the interface."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from ..config import EPConfig
from ..errors import ConfigError
from .base import Transport
from .collective import CollectiveTransport
from .hierarchical import HierarchicalTransport
from .hosts import Hosts, hosts_problem, ranks_by_host
from .sites import Site, symmetric_problems, this_site

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
    sites = [Site("", None)] * ep_size
    dist.all_gather_object(sites, this_site(config, ep_size, device), group=group)
    ranks_GJ = ranks_by_host([site.host for site in sites])
    reasons = symmetric_problems(sites)
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
