"""Several ranks on one GPU: each has a window and a stream of its own, and their kernels meet as on a node.

All kernels of an operation have to be resident together, so every rank takes a few multiprocessors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ep_comm.cuda.kernels import cuda_kernels
from ep_comm.cuda.ops import Window
from ep_comm.cuda.window import STATE_WORDS, WindowLayout

__all__ = ["EmulatedRanks"]

Result = TypeVar("Result")


class EmulatedRanks:
    """``layout.ep_size`` ranks in this process, on the first GPU."""

    def __init__(self, layout: WindowLayout, *, timeout_ns: int = 20 * 10**9) -> None:
        self.device = torch.device("cuda", 0)
        # The process's own, which are never unloaded: that would wait for a kernel that waits for another rank's.
        self.kernels = cuda_kernels(self.device)
        self.num_sms = max(1, self.kernels.num_sms // layout.ep_size // 2)
        ranks = range(layout.ep_size)
        self.streams = [torch.cuda.Stream(self.device) for _ in ranks]
        memory = [torch.zeros(layout.total_bytes, dtype=torch.uint8, device=self.device) for _ in ranks]
        peers = torch.tensor([window.data_ptr() for window in memory], device=self.device)
        self.windows = [
            Window(
                peers=peers,
                local=memory[rank],
                state=torch.zeros(STATE_WORDS, dtype=torch.int32, device=self.device),
                first_bad=torch.full((1,), 2**31 - 1, dtype=torch.int32, device=self.device),
                rank=rank,
                layout=layout,
                timeout_ns=timeout_ns,
            )
            for rank in ranks
        ]
        # A kernel that waits for another rank's, which is not launched yet, must not meet a cudaMalloc that
        # waits for it: give every stream's pool enough memory beforehand.
        for stream in self.streams:
            with torch.cuda.stream(stream):
                pool = [torch.empty(1 << 19, dtype=torch.uint8, device=self.device) for _ in range(128)]
                pool.append(torch.empty(1 << 27, dtype=torch.uint8, device=self.device))
                del pool
        torch.cuda.synchronize()

    def each(self, call: Callable[[int, Window], Result]) -> list[Result]:
        """``call(rank, window)`` for every rank on its stream; waits for all; no wait may have timed out."""
        results = self.launch(call)
        torch.cuda.synchronize()
        for rank, window in enumerate(self.windows):
            assert window.state[3].item() == 0, f"rank {rank}: {window.state.tolist()}"
        return results

    def launch(self, call: Callable[[int, Window], Result]) -> list[Result]:
        results = []
        for rank, window in enumerate(self.windows):
            with torch.cuda.stream(self.streams[rank]):
                results.append(call(rank, window))
        return results
