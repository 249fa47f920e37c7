"""Stages: what all ranks do together, with one verdict at its end, and no way to hang.

Ranks report the end of a stage through the job's key-value store, not through a collective, because it is the
collectives that may be broken. A thread watches: if a rank makes no progress for ``timeout`` seconds, or has failed
while others still wait for it, rank 0 reports which ranks did what, and all processes end.
"""

from __future__ import annotations

import itertools
import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist

from ..distributed import Env
from ..errors import EPError, PeerLostError
from ..failure import failing_fast, watch
from .findings import Finding, ranges

__all__ = ["StageError", "Stages", "ranks_in"]

_runs = itertools.count()
_POLL_SECONDS = 0.01
_WATCH_SECONDS = 0.5
_GRACE_SECONDS = 15.0  # more than failing_fast takes to free blocked ranks


class StageError(EPError):
    """A stage failed in a way after which the ranks cannot go on together.

    Attributes:
        findings: what went wrong, where.
    """

    def __init__(self, stage: str, findings: list[Finding]) -> None:
        super().__init__(f"stage {stage!r} failed")
        self.findings = findings


@dataclass
class _Outcome:
    value: Any = None
    error: str = ""
    fatal: bool = False


class Stages:
    """Runs stages on this rank. A context manager; all ranks call the same things in the same order.

    Args:
        env: this rank.
        timeout: seconds without progress after which a rank counts as stuck.
        give_up: called on rank 0, from another thread, with what went wrong, before all processes end.
    """

    def __init__(self, env: Env, timeout: float, give_up: Callable[[Finding], None]) -> None:
        self.env, self.timeout = env, timeout
        store = dist.distributed_c10d._get_default_store()
        prefix = f"ep_comm/check/{next(_runs)}"
        self._store = dist.PrefixStore(prefix, store)
        # A connection of its own for the watching thread: the first may be blocked in a call.
        self._watched_store = self._store.clone()
        self._give_up = give_up
        self._number = 0
        self._stage = ""
        self._last_sign = time.monotonic()
        self._failure_seen: tuple[int, float] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ep_comm check", daemon=True)

    def __enter__(self) -> Stages:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def progress(self, what: str) -> None:
        """This rank is alive and about to do ``what``."""
        self._last_sign = time.monotonic()
        self._store.set(f"{self._number}/at/{self.env.rank}", what)

    def run(self, name: str, work: Callable[[], Any]) -> tuple[list[Any], list[Finding]]:
        """Let every rank do ``work``, and wait until all have.

        Returns:
            The ranks' results, by rank, and no findings; on ranks other than 0 the list holds only the own result.
            If all ranks raised, an empty list and the findings.

        Raises:
            StageError: some ranks raised and others did not, or a rank was lost.
        """
        self._number += 1
        self._stage = name
        self.progress(name)
        outcome = self._attempt(work)
        self._store.set(f"{self._number}/end/{self.env.rank}", pickle.dumps(outcome))
        if outcome.error:
            self._store.set(f"{self._number}/failed", "1")
        errors, fatal, values = self._agree(outcome)
        self._last_sign = time.monotonic()
        if not errors:
            return values, []
        findings = _failures(name, errors)
        if fatal or len(errors) < self.env.world_size:
            raise StageError(name, findings)
        return [], findings

    def share_verdict(self, failed: bool) -> bool:
        """Rank 0, having shown the result, tells the others its verdict; they wait for it."""
        self._stage = "report"
        self.progress("report")
        if self.env.rank == 0:
            self._store.set("verdict", str(failed))
            return failed
        return self._wait("verdict") == b"True"

    # -- inside --------------------------------------------------------------------------------------

    def _attempt(self, work: Callable[[], Any]) -> _Outcome:
        try:
            # Frees the ranks that wait in a collective for one that has failed.
            with failing_fast(self._stage):
                return _Outcome(value=work())
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            return _Outcome(error=f"{type(error).__name__}: {lines[0]}", fatal=not _survivable(error))

    def _agree(self, own: _Outcome) -> tuple[dict[int, str], bool, list[Any]]:
        """Errors by rank and whether the ranks can go on, the same on all ranks; and on rank 0 all values."""
        key = f"{self._number}/verdict"
        if self.env.rank != 0:
            errors, fatal = pickle.loads(self._wait(key))
            return errors, fatal, [own.value]
        outcomes = [pickle.loads(self._wait(f"{self._number}/end/{rank}")) for rank in range(self.env.world_size)]
        errors = {rank: outcome.error for rank, outcome in enumerate(outcomes) if outcome.error}
        fatal = any(outcome.fatal for outcome in outcomes)
        self._store.set(key, pickle.dumps((errors, fatal)))
        return errors, fatal, [outcome.value for outcome in outcomes]

    def _wait(self, key: str) -> bytes:
        """Polls, so that the store's lock is free in between; the watching thread sets the limit."""
        pause = _POLL_SECONDS / 10
        while True:
            try:
                if self._store.check([key]):
                    return self._store.get(key)
            except RuntimeError:
                self._end("rank 0 is gone")
            time.sleep(pause)
            pause = min(pause * 1.5, _POLL_SECONDS)

    def _watch(self) -> None:
        while not self._ended.wait(_WATCH_SECONDS):
            try:
                if self.env.rank == 0:
                    self._watch_all()
                else:
                    self._watch_rank_0()
            except RuntimeError:
                if not self._ended.is_set():
                    self._end("the job's key-value store is gone, and rank 0 with it")

    def _watch_all(self) -> None:
        now, number = time.monotonic(), self._number
        seen = self._failure_seen
        if (seen is None or seen[0] != number) and self._watched_store.check([f"{number}/failed"]):
            self._failure_seen = seen = (number, now)
        failed = seen is not None and seen[0] == number and now - seen[1] > _GRACE_SECONDS
        if not failed and now - self._last_sign < self.timeout:
            return
        finding = self._describe()
        if finding is None:  # it ended just now
            return
        self._give_up(finding)
        self._watched_store.set("abandoned", "1")
        time.sleep(3 * _WATCH_SECONDS)  # the others look for it, in a store that may be served by this process
        self._end()

    def _watch_rank_0(self) -> None:
        if self._watched_store.check(["abandoned"]):
            self._end()
        if time.monotonic() - self._last_sign > self.timeout + 2 * _GRACE_SECONDS:
            self._end("rank 0 does not answer")

    def _describe(self) -> Finding | None:
        """What the ranks of a stage that does not end have done so far."""
        number = self._number
        missing, errors = [], {}
        for rank in range(self.env.world_size):
            if not self._watched_store.check([f"{number}/end/{rank}"]):
                missing.append(rank)
                continue
            outcome = pickle.loads(self._watched_store.get(f"{number}/end/{rank}"))
            if outcome.error:
                errors[rank] = outcome.error
        if number != self._number or self._watched_store.check([f"{number}/verdict"]):
            return None
        doing = "; ".join(f"rank {rank} in {self._at(number, rank)}" for rank in missing[:8])
        if errors:
            rank, error = min(errors.items(), key=lambda item: "PeerLostError" in item[1])
            message = f"{self._stage}: rank {rank} failed with {error}; others waited for it: {doing or 'none'}"
            return Finding("stage-failed", message, tuple(sorted(errors)))
        message = f"{self._stage}: no progress on rank {ranges(missing)} for {self.timeout:g} s"
        watcher = watch()
        # Where one rank is stopped or lost the others soon wait for it: tell them apart.
        alive = watcher.find_silent() if watcher is not None else ""
        if self._watched_store.check([f"{number}/verdict"]):
            return None  # it ended while that was looked at
        silent = ranks_in(alive) or tuple(missing)
        return Finding("no-answer", f"{message}{alive and f' ({alive})'}; last seen: {doing}", silent)

    def _at(self, number: int, rank: int) -> str:
        key = f"{number}/at/{rank}"
        return self._watched_store.get(key).decode() if self._watched_store.check([key]) else "the stage before"

    def _end(self, why: str = "") -> NoReturn:
        """The main thread may be blocked for ever in a collective: only leaving the process ends it."""
        if why:
            print(f"ep-comm check: rank {self.env.rank} gives up in {self._stage}: {why}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)


def ranks_in(text: str) -> tuple[int, ...]:
    """The ranks named in ``"no sign of life from rank 2 on b, ranks 4, 5 on c"``."""
    if not text.startswith("no sign of life"):
        return ()
    return tuple(sorted(int(rank) for some in re.findall(r"ranks? ([0-9, ]+) on ", text) for rank in some.split(",")))


def _survivable(error: Exception) -> bool:
    """Whether the process group can still be used, if all ranks raised it."""
    return isinstance(error, EPError) and not isinstance(error, PeerLostError)


def _failures(name: str, errors: dict[int, str]) -> list[Finding]:
    """One finding for each distinct error; lost peers are left out where another rank says why it left."""
    by_error: dict[str, list[int]] = {}
    for rank, error in errors.items():
        by_error.setdefault(error, []).append(rank)
    causes = {error: ranks for error, ranks in by_error.items() if not error.startswith("PeerLostError")}
    return [
        Finding("stage-failed", f"{name}: rank {ranges(ranks)} failed with {error}", tuple(ranks))
        for error, ranks in (causes or by_error).items()
    ]
