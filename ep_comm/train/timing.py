"""Where the time of a step goes, on the host's clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..transport.base import Transport

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
        """The runner has returned after ``runner_seconds``: the last attempt counts, earlier ones do not."""
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


class TimedTransport:
    """Stands before any transport and adds the host time of its calls to a clock.

    On CPUs that is the whole exchange: packing, quantising, waiting for the other ranks, unpacking. On GPUs
    calls return before the work is done, so the trainer does not use this there.
    """

    _TIMED = frozenset({"exchange_counts", "open_route", "scatter_rows", "gather_sum"})

    def __init__(self, inner: Transport, clock: PhaseClock) -> None:
        self._inner = inner
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in self._TIMED:
            return found

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._clock.measure("exchange"):
                return found(*args, **kwargs)

        return timed
