"""Contenders with a fault planted in them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ep_comm.bench.contenders.base import Place, Plan, Session
from ep_comm.bench.contenders.torch_alltoall import TorchAllToAll, _TorchSession
from ep_comm.bench.work import Item


class Swapped(TorchAllToAll):
    """Delivers two rows in each other's place on rank 1, and a wrong sum there."""

    name = "swapped"

    def open(self, plan: Plan) -> Session:
        return _SwappedSession(plan, self.place)


class _SwappedSession(_TorchSession):
    right_calls = 0

    def operation(self, direction: str, item: Item) -> Callable[[], tuple[Any, torch.Tensor | None]]:
        call = super().operation(direction, item)
        calls = 0

        def swap() -> tuple[Any, torch.Tensor | None]:
            nonlocal calls
            calls += 1
            rows, weights = call()
            if self._place.rank == 1 and calls > self.right_calls:
                rows[[0, 1]] = rows[[1, 0]]
            return rows, weights

        return swap


class Late(Swapped):
    """The same, but the first call of each operation is right."""

    name = "late"

    def open(self, plan: Plan) -> Session:
        session = _SwappedSession(plan, self.place)
        session.right_calls = 1
        return session


class Failing(TorchAllToAll):
    """Raises on rank 1 when everybody else is waiting for it in an all-to-all."""

    name = "failing"

    def start(self, place: Place) -> None:
        super().start(place)
        # gloo ends a wait for a lost rank only by its timeout: a test need not last as long.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), place.group)

    def open(self, plan: Plan) -> Session:
        return _FailingSession(plan, self.place)


class _FailingSession(_TorchSession):
    def operation(self, direction: str, item: Item) -> Callable[[], tuple[Any, torch.Tensor | None]]:
        if self._place.rank == 1:
            raise ValueError("planted")
        return super().operation(direction, item)


class Unable(TorchAllToAll):
    """Cannot be set up on any rank."""

    name = "unable"

    def start(self, place: Place) -> None:
        raise ValueError("needs what is not here")
