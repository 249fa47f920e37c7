"""Timing: events or the host's clock, behind a barrier, inputs in turn, L2 written over.

The time of an iteration is that of the slowest rank; the figure is the median over iterations.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["GraphCall", "Timer", "count_host_syncs", "median_of_slowest"]

Call = Callable[[], Any]


class Timer:
    """Times calls on one device.

    Args:
        device: events on a CUDA device, the host's clock elsewhere.
        iterations, warmup: timed and untimed calls.
    """

    def __init__(self, device: torch.device, iterations: int, warmup: int) -> None:
        self.device, self.iterations, self.warmup = device, iterations, warmup
        self._flush: Tensor | None = None
        if device.type == "cuda":
            # Twice the cache, so that nothing of the previous iteration is left in it.
            size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
            self._flush = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
        self._meeting = torch.zeros(1, device=device)

    def __call__(self, calls: Sequence[Call], group: dist.ProcessGroup | None) -> list[float]:
        """Microseconds of each iteration on this rank; iteration ``i`` runs ``calls[i % len(calls)]``."""
        order = [calls[number % len(calls)] for number in range(self.warmup + self.iterations)]
        times = self._events(order, group) if self.device.type == "cuda" else self._clock(order, group)
        return times[self.warmup :]

    def _events(self, order: list[Call], group: dist.ProcessGroup | None) -> list[float]:
        pairs = []
        for call in order:
            self._flush.zero_()
            if group is not None:
                # Ranks meet on their devices: the host goes on, so that it does not become part of the figure
                # where the operation itself does not wait for it.
                dist.all_reduce(self._meeting, group=group)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(self.device)
        return [1000 * start.elapsed_time(end) for start, end in pairs]

    def _clock(self, order: list[Call], group: dist.ProcessGroup | None) -> list[float]:
        times = []
        for call in order:
            if group is not None:
                dist.all_reduce(self._meeting, group=group)
            start = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - start))
        return times


class GraphCall:
    """A call captured in a CUDA graph; calling it replays the graph and returns the same tensors, written anew.

    Args:
        call: has run before, so that nothing is initialised under capture.
        stream: on which it ran: autograd runs a backward pass on the stream of its forward pass.
        pool: of memory, shared by graphs that are never replayed at the same time.
    """

    def __init__(self, call: Call, stream: torch.cuda.Stream, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream):
            self._result = call()

    def __call__(self) -> Any:
        self._graph.replay()
        return self._result

    def reset(self) -> None:
        """Drop the graph. NCCL cannot end a communicator while a graph holds its kernels."""
        self._graph.reset()
        self._result = None


def count_host_syncs(call: Call, device: torch.device) -> int | None:
    """How often PyTorch makes the host wait for the device in ``call``; None where there is no such thing.

    What PyTorch's sync debug mode sees: reads of device values, synchronising copies and calls. Code that waits
    behind PyTorch's back (an extension that polls memory) is not seen.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    torch.cuda.synchronize(device)
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def median_of_slowest(times_of_ranks: Sequence[Sequence[float]]) -> float:
    """Median over iterations of the maximum over ranks."""
    return statistics.median(max(each) for each in zip(*times_of_ranks, strict=True))
