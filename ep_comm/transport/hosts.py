"""Which ranks of a group share a host, and the process groups along and across hosts.

Found out, not configured: ranks with the same host name (``NCCL_HOSTID`` if it is set, as for NCCL) share a host.
Hosts are ordered by their lowest rank, the ranks of a host ascend. The ``i``-th ranks of all hosts form a *rail*.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["HostGroups", "Hosts", "host_groups", "host_name", "hosts_problem", "ranks_by_host"]


def host_name() -> str:
    """What ranks that can map each other's memory have in common. NCCL_HOSTID counts, as it does for NCCL."""
    return os.environ.get("NCCL_HOSTID") or socket.gethostname()


def ranks_by_host(names: Sequence[str]) -> list[list[int]]:
    """Ranks of every host, from the host name of every rank; hosts in the order of their lowest rank."""
    hosts: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    return list(hosts.values())


def hosts_problem(ranks_GJ: list[list[int]], global_ranks: Sequence[int]) -> str | None:
    """Why two levels of ranks cannot be made of these hosts, or None.

    Args:
        ranks_GJ: ranks of every host.
        global_ranks: of every rank its rank in the whole job.
    """
    sizes = [len(ranks) for ranks in ranks_GJ]
    if len(sizes) == 1:
        return "all ranks are on one host"
    if len(set(sizes)) > 1:
        return f"the hosts have {', '.join(map(str, sizes))} ranks, and the hierarchical path needs as many on each"
    if sizes[0] == 1:
        return "every host has one rank"
    # A process group sorts its ranks by their number in the job: that has to be the order of hosts and places.
    parts = [[global_ranks[rank] for rank in part] for part in (*ranks_GJ, *zip(*ranks_GJ, strict=True))]
    if any(part != sorted(part) for part in parts):
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


@dataclass(frozen=True)
class HostGroups:
    """Process groups of this rank.

    Attributes:
        rail: the ranks with its place, one on each host, in the order of the hosts.
        host: the ranks of its host.
    """

    rail: dist.ProcessGroup
    host: dist.ProcessGroup


_made: WeakKeyDictionary[dist.ProcessGroup, dict[str, HostGroups]] = WeakKeyDictionary()


def host_groups(group: dist.ProcessGroup, hosts: Hosts, device: torch.device) -> HostGroups:
    """The groups along and across the hosts of ``group``, made once for it. Collective over ``group``.

    They have the backend and the timeout of ``group``, and go when it goes.
    """
    made = _made.setdefault(group, {})
    key = str(hosts.ranks)
    if key not in made:
        rails = [list(rail) for rail in zip(*hosts.ranks, strict=True)]
        made[key] = HostGroups(_own_group(group, rails, device), _own_group(group, hosts.ranks, device))
        finalize(group, _destroy, made[key]).atexit = False
    return made[key]


def _own_group(group: dist.ProcessGroup, parts: list[list[int]], device: torch.device) -> dist.ProcessGroup:
    """Of the ``parts`` that ``group`` is divided into, this rank's one, as a process group."""
    backend = group._get_backend(device)
    # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around it.
    backend = getattr(backend, "wrapped_pg", backend)
    timeout = backend.options._timeout
    if getattr(dist.group.WORLD, "bound_device_id", None) is not None and backend.supports_splitting:
        # With a device bound to the job's group, new_group would split the communicator of the whole job, and wait
        # for ranks outside of this group.
        return dist.split_group(group, parts, timeout=timeout)
    mine = next(part for part in parts if dist.get_rank(group) in part)
    global_ranks = dist.get_process_group_ranks(group)
    return dist.new_group(
        [global_ranks[rank] for rank in mine],
        timeout=timeout,
        backend=dist.get_backend_config(group),
        use_local_synchronization=True,
    )


def _destroy(groups: HostGroups) -> None:
    """Undo :func:`host_groups`, unless the whole job's groups are gone already."""
    for made in (groups.rail, groups.host):
        if dist.is_initialized() and made in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(made)
