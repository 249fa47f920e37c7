"""How fast the link between the ranks copies: a plain copy to the next rank, every rank at the same time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .timing import Timer

__all__ = ["Link", "copy_from_peer", "send_to_peer"]

_GPU_BYTES = 8192 * 14336
_CPU_BYTES = 8 << 20


@dataclass(frozen=True)
class Link:
    """Times of one kind of copy on this rank.

    Attributes:
        how: the kind, for the report.
        size: bytes that every rank sends and receives.
        times: microseconds of each iteration.
    """

    how: str
    size: int
    times: list[float]


def copy_from_peer(timer: Timer, group: dist.ProcessGroup, rank: int, ep_size: int) -> Link:
    """Copy the next rank's memory over the link with the device's own copy. Needs GPUs that reach each other."""
    import torch.distributed._symmetric_memory as symmetric_memory

    memory = symmetric_memory.empty(_GPU_BYTES, dtype=torch.uint8, device=timer.device)
    memory.fill_(rank + 1)
    handle = symmetric_memory.rendezvous(memory, group.group_name)
    peer = handle.get_buffer((rank + 1) % ep_size, (_GPU_BYTES,), torch.uint8)
    here = torch.empty_like(peer)
    torch.cuda.synchronize(timer.device)
    dist.barrier(group)
    times = timer([lambda: here.copy_(peer)], group)
    dist.barrier(group)  # the memory must live until everybody has read it
    return Link("copy from a peer's memory, all ranks at once", _GPU_BYTES, times)


def send_to_peer(timer: Timer, group: dist.ProcessGroup, rank: int, ep_size: int) -> Link:
    """Send to the next rank and receive from the one before, both at once, over the process group."""
    size = _GPU_BYTES if timer.device.type == "cuda" else _CPU_BYTES
    out = torch.full((size,), rank + 1, dtype=torch.uint8, device=timer.device)
    into = torch.empty_like(out)

    def exchange() -> None:
        operations = [
            dist.P2POp(dist.isend, out, (rank + 1) % ep_size, group),
            dist.P2POp(dist.irecv, into, (rank - 1) % ep_size, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    times = timer([exchange], group)
    return Link(f"{dist.get_backend(group)} send and receive, all ranks at once", size, times)
