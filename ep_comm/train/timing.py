"""Where the time of a step goes, on the host's clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ..plan import RoutingPlan
from ..transport.base import Route, RowFormat, Transport

__all__ = ["PHASES", "PhaseClock", "TimedTransport"]

PHASES = ("data", "model", "exchange", "gradients", "optimizer", "discarded", "runner")
"""Disjoint parts of the training time, see :meth:`PhaseClock.seconds`."""


class PhaseClock:
    """Adds up the seconds of every phase over a run.

    A step is run once or, after an overflow, twice; only when the runner returns is it known which attempt
    counted. Attempts are therefore collected and sorted in :meth:`finish_step`.
    """

    def __init__(self) -> None:
        self.totals = dict.fromkeys(PHASES, 0.0)
        self._attempts: list[dict[str, float]] = []
        self._optimizer = 0.0

    def begin_attempt(self) -> None:
        """An attempt at a step starts."""
        self._attempts.append(dict.fromkeys(("model", "exchange", "gradients"), 0.0))

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the time of the block to ``phase``, of the attempt that is running if there is one."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - start)

    def add(self, phase: str, seconds: float) -> None:
        """Add to a phase."""
        if phase == "optimizer":
            self._optimizer += seconds
        elif self._attempts and phase in self._attempts[-1]:
            self._attempts[-1][phase] += seconds
        elif phase == "data":
            self.totals["data"] += seconds

    def finish_step(self, runner_seconds: float) -> None:
        """The runner has returned after ``runner_seconds``: the last attempt counted, earlier ones did not."""
        for attempt in self._attempts:
            # "model" was measured around everything, so the exchange inside it is taken out.
            attempt["model"] -= attempt["exchange"]
        spent = [sum(attempt.values()) for attempt in self._attempts]
        if self._attempts:
            for phase, seconds in self._attempts[-1].items():
                self.totals[phase] += seconds
        self.totals["discarded"] += sum(spent[:-1])
        self.totals["optimizer"] += self._optimizer
        self.totals["runner"] += max(0.0, runner_seconds - sum(spent) - self._optimizer)
        self._attempts, self._optimizer = [], 0.0


class TimedTransport(Transport):
    """Any transport, with the host time of its calls added to a clock.

    On CPUs that is the whole exchange: packing, quantising, waiting for the other ranks, unpacking. On GPUs
    calls return before the work is done, so the trainer does not use this there.
    """

    def __init__(self, inner: Transport, clock: PhaseClock) -> None:
        self.name = inner.name
        self._inner = inner
        self._clock = clock

    def exchange_counts(self, message: Tensor, operation: str) -> Tensor:
        with self._clock.measure("exchange"):
            return self._inner.exchange_counts(message, operation)

    def open_route(self, plan: RoutingPlan) -> Route:
        with self._clock.measure("exchange"):
            return self._inner.open_route(plan)

    def scatter_rows(
        self, route: Route, rows_TH: Tensor, scalars_TK: Tensor | None, row_format: RowFormat, operation: str
    ) -> tuple[Tensor, Tensor | None]:
        with self._clock.measure("exchange"):
            return self._inner.scatter_rows(route, rows_TH, scalars_TK, row_format, operation)

    def gather_sum(
        self, route: Route, rows_RH: Tensor, weights_R: Tensor | None, scalars_R: Tensor | None, operation: str
    ) -> tuple[Tensor, Tensor | None]:
        with self._clock.measure("exchange"):
            return self._inner.gather_sum(route, rows_RH, weights_R, scalars_R, operation)

    def wire_row_bytes(
        self, hidden_size: int, top_k: int, row_format: RowFormat, *, scalars: bool, tables: bool
    ) -> int:
        return self._inner.wire_row_bytes(hidden_size, top_k, row_format, scalars=scalars, tables=tables)

    def close(self) -> None:
        self._inner.close()
