"""Which ranks of a group share a host.

Found out, not configured: ranks with the same host name (``NCCL_HOSTID`` if it is set, as for NCCL) share a host.
Hosts are ordered by their lowest rank, the ranks of a host ascend. The ``i``-th ranks of all hosts form a *rail*.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Hosts", "host_name", "hosts_problem", "ranks_by_host"]


def host_name() -> str:
    """What ranks that can map each other's memory have in common. NCCL_HOSTID counts, as it does for NCCL."""
    return os.environ.get("NCCL_HOSTID") or socket.gethostname()


def ranks_by_host(names: Sequence[str]) -> list[list[int]]:
    """Ranks of every host, from the host name of every rank; hosts in the order of their lowest rank."""
    hosts: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    return list(hosts.values())


def hosts_problem(ranks_GJ: list[list[int]]) -> str | None:
    """Why two levels of ranks cannot be made of these hosts, or None."""
    sizes = [len(ranks) for ranks in ranks_GJ]
    if len(sizes) == 1:
        return "all ranks are on one host"
    if len(set(sizes)) > 1:
        return f"the hosts have {', '.join(map(str, sizes))} ranks, and the hierarchical path needs as many on each"
    if sizes[0] == 1:
        return "every host has one rank"
    # Buffers are in the order of the ranks: on every rail that has to be the order of the hosts.
    if any(list(rail) != sorted(rail) for rail in zip(*ranks_GJ, strict=True)):
        return f"the ranks of the hosts {ranks_GJ} are neither in blocks nor dealt out in turn"
    return None


class Hosts:
    """Where the ranks of a group run: ``J`` ranks on each of ``G`` hosts.

    Args:
        ranks_GJ: ranks of every host, from :func:`ranks_by_host`, free of :func:`hosts_problem`.
        rank: this rank.
        device: of the tables.

    Attributes:
        ranks: ``ranks_GJ`` on the host; ``ranks_GJ`` is the same as int64 on the device.
        host, place: this rank's host, and its place among the ranks of the host.
        host_P, place_P: the same of every rank, int64 on the device.
    """

    def __init__(self, ranks_GJ: list[list[int]], rank: int, device: torch.device) -> None:
        self.ranks = ranks_GJ
        self.host = next(host for host, ranks in enumerate(ranks_GJ) if rank in ranks)
        self.place = ranks_GJ[self.host].index(rank)
        # Kept for every later dispatch: not tensors of the inference mode that may be on now.
        with torch.inference_mode(False):
            self.ranks_GJ = torch.tensor(ranks_GJ, dtype=torch.int64, device=device)
            order_P = self.ranks_GJ.flatten().argsort()
            self.host_P, self.place_P = order_P // self.ranks_per_host, order_P % self.ranks_per_host

    @property
    def num_hosts(self) -> int:
        """G."""
        return len(self.ranks)

    @property
    def ranks_per_host(self) -> int:
        """J."""
        return len(self.ranks[0])

    @property
    def rail(self) -> list[int]:
        """The ranks with this rank's place, one on each host."""
        return [ranks[self.place] for ranks in self.ranks]

    def needed(self, needs_TP: Tensor) -> Tensor:
        """Whether a token goes to any rank of a host, bool ``[T, G]``, from whether it goes to each rank."""
        needs_TX = needs_TP.index_select(1, self.ranks_GJ.flatten())
        return needs_TX.view(needs_TP.shape[0], self.num_hosts, self.ranks_per_host).any(2)
