"""What differs between devices in this package, in one place."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["free_memory", "group_device", "host_reads_are_free", "is_capturing", "to_host"]

_MEMINFO = "/proc/meminfo"


def host_reads_are_free(device: torch.device) -> bool:
    """Whether the host may look at a value on ``device`` without waiting for queued work.

    Where it may, shapes follow the data; elsewhere they are bounded by what the host knows, because static
    mode must not wait for the device. Both ways give the same bits.
    """
    return device.type == "cpu"


def is_capturing(device: torch.device) -> bool:
    """Whether work for ``device`` is being captured in a CUDA graph at the moment."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def to_host(tensor: Tensor) -> Tensor:
    """A copy of ``tensor`` on the host, when it is there.

    Not ``tensor.cpu()``: a copy into memory that is not pinned keeps the CUDA driver to itself while it waits, so
    that no other thread could end what it waits for (see :mod:`ep_comm.unblock`).
    """
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    return host


def free_memory(device: torch.device) -> int:
    """Bytes that a new buffer on ``device`` may take.

    On a GPU, what the driver has free plus what PyTorch's allocator holds unused; on a CPU, what the kernel
    estimates as available. Where nobody tells, no limit is assumed.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        with open(_MEMINFO) as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 2**63 - 1


def group_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where the tensors belong that a group's collectives take."""
    if group is not None and "nccl" in dist.get_backend_config(group) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
