"""Copies out of another GPU's memory: the path of the symmetric transport, without its kernels."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..distributed import Env
from .pairs import PairSpeed, pattern

__all__ = ["PeerMemory"]

_BYTES = 64 << 20
_COPIES = 4  # launched one after the other, so that launching and waiting is a small part
_REPEATS = 3
_SMALL = 8


class PeerMemory:
    """This rank's window, which the others map. Collective; it must live until all ranks have read it.

    Args:
        env: this rank, on a GPU that reaches those of all others.
    """

    path = "peer memory"

    def __init__(self, env: Env) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self._env = env
        memory = symmetric_memory.empty(_BYTES, dtype=torch.uint8, device=env.device)
        self._mapping = symmetric_memory.rendezvous(memory, env.group.group_name)
        memory.view(torch.int64).copy_(pattern(env.rank, _BYTES, env.device))
        self._memory = memory
        self._here = torch.empty_like(memory)
        torch.cuda.synchronize(env.device)
        dist.barrier(env.group)

    def measure(self, peer: int, meet: Callable[[], None]) -> PairSpeed:
        """Both ranks of a pair read each other's window at once.

        Args:
            meet: waits for the other rank, so that both start together.
        """
        theirs = self._mapping.get_buffer(peer, (_BYTES,), torch.uint8)
        self._here.copy_(theirs)
        intact = torch.equal(self._here.view(torch.int64), pattern(peer, _BYTES, self._env.device))
        small = min(self._seconds(theirs[:_SMALL], meet) for _ in range(_REPEATS))
        large = min(self._seconds(theirs, meet) for _ in range(_REPEATS))
        rank = self._env.rank
        return PairSpeed(
            min(rank, peer), max(rank, peer), small * 1e6, _BYTES / large / 1e9, _BYTES, intact, path=self.path
        )

    def _seconds(self, source: torch.Tensor, meet: Callable[[], None]) -> float:
        into = self._here[: source.numel()]
        meet()
        torch.cuda.synchronize(self._env.device)
        started = time.perf_counter()
        for _ in range(_COPIES):
            into.copy_(source)
        torch.cuda.synchronize(self._env.device)
        return (time.perf_counter() - started) / _COPIES
