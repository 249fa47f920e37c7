"""All ranks try something together, and agree how it ended before they go on.

A contender that fails on one rank would leave the others waiting in a collective. So every attempt is watched: as
soon as one rank reports a failure, or time is up, the others abort the contender's process group, which ends what
they wait for. Ranks report through the rendezvous store, which works whatever state the devices are in.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["Outcome", "Referee"]

_POLL_SECONDS = 0.1
# What a rank may take to notice a failure by itself, before its communication is aborted.
_GRACE_SECONDS = 2.0
_MAX_TEXT = 300


@dataclass
class Outcome:
    """How an attempt ended, the same on all ranks except for ``value``.

    Attributes:
        value: what the function returned on this rank; None after a failure.
        facts: what every rank reported of it.
        problem: what failed and on which ranks, or None.
        everywhere: all ranks refused in the same way, so nobody was left waiting and communication is intact.
    """

    value: Any
    facts: list[Any]
    problem: str | None
    everywhere: bool


class Referee:
    """Judge of one job's attempts. All ranks call it in the same order.

    Args:
        rank, world_size: this rank's place.
        store: shared by the ranks; None for a single process.
        timeout: seconds that an attempt may take.
        name: no other referee of this store has had it.
    """

    def __init__(self, rank: int, world_size: int, store: dist.Store | None, timeout: float, name: str = "") -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        prefix = f"ep_comm/bench/{name}"
        self._store = dist.PrefixStore(prefix, store) if store is not None else None
        # A connection of its own: the main thread may hold the other one while it waits for a key.
        self._watched = dist.PrefixStore(prefix, store.clone()) if store is not None else None
        self._attempts = 0

    def attempt(
        self,
        call: Callable[[], Any],
        *,
        facts: Callable[[Any], Any] = lambda value: None,
        abort: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Run ``call`` on all ranks.

        Args:
            call: what to try.
            facts: of the returned value, something that JSON can hold, for all ranks to know.
            abort: ends the communication that ``call`` may be waiting in.
        """
        self._attempts += 1
        key = f"attempt {self._attempts}"
        watch = _Watch(self._watched, key, self.timeout, abort)
        value, report = None, {"problem": None, "kind": None, "first": True, "facts": None}
        try:
            with watch:
                value = call()
            report["facts"] = facts(value)
            report["problem"] = watch.reason
        except Exception as error:
            text = _first_line(error).removeprefix(f"rank {self.rank}: ")
            report["problem"] = watch.reason or f"{type(error).__name__}: {text}"
            report["kind"] = type(error).__name__
            if self._store is not None:
                report["first"] = not self._store.check([f"{key}/failed"])
                self._store.set(f"{key}/failed", "1")
        if watch.reason == _ABORTED:
            report["first"] = False
        reports = self._exchange(key, report)
        problems = {rank: each["problem"] for rank, each in enumerate(reports) if each["problem"]}
        if len(set(problems.values())) > 1:
            # A rank that failed after another one may only suffer from that: those that came first say why.
            problems = {rank: text for rank, text in problems.items() if reports[rank]["first"]} or problems
        kinds = {each["kind"] for each in reports}
        return Outcome(
            value=None if problems else value,
            facts=[each["facts"] for each in reports],
            problem="; ".join(_by_text(problems, self.world_size)) or None,
            everywhere=len(kinds) == 1 and not kinds & _MAY_BE_CONSEQUENCES,
        )

    def _exchange(self, key: str, report: dict[str, Any]) -> list[dict[str, Any]]:
        if self._store is None:
            return [report]
        self._store.set(f"{key}/{self.rank}", json.dumps(report))
        keys = [f"{key}/{rank}" for rank in range(self.world_size)]
        # Everybody is here after the limit, the grace, and what an aborted call needs to return.
        self._store.wait(keys, timedelta(seconds=2 * self.timeout + 60))
        return [json.loads(self._store.get(each)) for each in keys]


# Errors that a rank also gets when another one does not do its part; None stands for no error.
_MAY_BE_CONSEQUENCES = {None, "RuntimeError", "PeerLostError", "DistBackendError", "DistNetworkError"}
_ABORTED = "aborted, because another rank failed"


class _Watch:
    """Aborts when another rank has failed or time is up; a thread, because the main one may be stuck in a wait."""

    def __init__(self, store: dist.Store | None, key: str, timeout: float, abort: Callable[[], None]) -> None:
        self._store, self._key, self._timeout, self._abort = store, f"{key}/failed", timeout, abort
        self._over = threading.Event()
        self.reason: str | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Watch:
        if self._store is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._store is not None:
            self._thread.join()

    def _run(self) -> None:
        start = time.monotonic()
        while not self._over.wait(_POLL_SECONDS):
            if self._store.check([self._key]):
                if not self._over.wait(_GRACE_SECONDS):
                    self._give_up(_ABORTED)
                return
            if time.monotonic() - start > self._timeout:
                self._store.set(self._key, "1")
                self._give_up(f"not done after {self._timeout:g} s")
                return

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        try:
            self._abort()
        except Exception as error:
            # The call then ends with the process group's own timeout.
            self.reason = f"{reason}; abort failed: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:_MAX_TEXT] if text else "no message"


def _by_text(problems: dict[int, str], world_size: int) -> list[str]:
    """``rank 0, 2: text`` for every different text; only the text where all ranks have the same."""
    ranks: dict[str, list[int]] = {}
    for rank, text in problems.items():
        ranks.setdefault(text, []).append(rank)
    return [
        text if len(where) == world_size else f"rank {', '.join(map(str, where))}: {text}"
        for text, where in ranks.items()
    ]
