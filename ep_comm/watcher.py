"""A thread of each rank that tells the others of a failure, hears of theirs, and gives signs of life.

Everything goes through the store with which the default process group was made (a TCPStore under every
launcher, a file in tests), over a connection of its own: the main thread may be blocked, and the store with it.

    ep_comm/failure                 the first failure of the job: who, where, what; empty again once it was withdrawn
    ep_comm/failure/<rank>/heard    how many ranks have left because of the failure of a rank
    ep_comm/failure/<rank>/stuck    set by a rank that is blocked because of it: everybody breaks connections
    ep_comm/alive/<rank>            host, number of the sign of life, and what the rank is doing

Cost: about three small messages to the store a second and rank, none of them on the main thread.
"""

from __future__ import annotations

import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["Record", "Watcher"]

log = logging.getLogger("ep_comm")

_POLL_SECONDS = 0.25
_BEAT_SECONDS = 1.0
_SILENT_SECONDS = 2.5  # longer than two signs of life are apart
_ANSWER_SECONDS = 3.0
_STORE_TIMEOUT = timedelta(seconds=5)

_FAILURE, _ALIVE = "ep_comm/failure", "ep_comm/alive"


@dataclass(frozen=True)
class Record:
    """A failure as it stands in the store.

    Attributes:
        rank, host: who failed, rank in the whole job.
        text: the sentence that every rank ends with.
        final: the process of that rank is ending, so it will not come back.
        number: which failure of that rank it is.
    """

    rank: int
    host: str
    text: str
    final: bool = False
    number: int = 0

    def encode(self) -> str:
        """As it is written into the store; equal records give equal text."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def decode(cls, text: str) -> Record:
        """What :meth:`encode` wrote."""
        return cls(**json.loads(text))


class Watcher:
    """The thread, and what it knows.

    Args:
        store: of the default process group.
        rank, world_size: place in the default process group.
        notice: called on the thread about four times a second with the failure of another rank that stands in
            the store, and with whether a rank has asked that connections be broken.

    Attributes:
        doing: what this rank is doing; part of its sign of life.
        record: the failure in the store that was last seen, whoever's; None if there is none.
        lost: the store no longer answers or is gone.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, notice: Callable[[Record, bool], None]) -> None:
        self.base_store = store
        self.rank, self.world_size, self.host = rank, world_size, socket.gethostname()
        self.doing = ""
        self.record: Record | None = None
        self.lost = False
        self._excused: Record | None = None
        self._published = 0
        self._notice = notice
        self._own: Record | None = None
        self._store = _own_connection(store)
        self._told: set[int] = set()
        self._beats = 0
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ep_comm watcher", daemon=True)
        self._thread.start()

    # ---- for the main thread: every call returns in seconds, whatever the network does ------------------------

    def publish(self, text: str, *, final: bool = False) -> None:
        """Make this rank's failure known, unless another failure of the job stands already."""
        self._published += 1
        record = Record(self.rank, self.host, text, final, self._published)
        self._ask(lambda: self._publish(record))

    def withdraw(self) -> None:
        """This rank goes on after its failure, so the others need not end."""
        if self._own is not None:
            self._ask(self._withdraw)

    def look(self) -> Record | None:
        """The failure of another rank, as the store has it now."""
        self._ask(self._read)
        return self.others_record()

    def others_record(self) -> Record | None:
        """The failure of another rank that was last seen."""
        return self.record if self.record is not None and self.record.rank != self.rank else None

    def heard(self) -> None:
        """Tell the rank that failed that this rank has raised its message, or has left."""
        record = self.others_record()
        if record is not None and record.rank not in self._told:
            self._told.add(record.rank)
            self._ask(lambda: self._store.add(_heard(record), 1))

    def add(self, key: str, amount: int) -> int | None:
        """Add to a counter in the store; its value then, or None if the store does not answer."""
        found: list[int] = []
        self._ask(lambda: found.append(self._store.add(key, amount)))
        return found[0] if found else None

    def excuse(self) -> None:
        """The failure that stands is one that all ranks had: its rank may take its time to come back."""
        self._ask(self._excuse)

    def is_heard(self) -> bool:
        """Whether a rank has ended because of the failure that stands."""
        self._ask(self._read)
        record = self.record
        return record is not None and bool(self.add(_heard(record), 0))

    def ask_to_break(self, record: Record) -> None:
        """Ask every rank to break its connections: this rank is blocked. Called on the thread."""
        self._store.set(_stuck(record), "1")

    def find_silent(self) -> str:
        """Which ranks give no sign of life, as the end of a sentence; takes about three seconds."""
        found: list[str] = []
        self._ask(lambda: found.append(self._find_silent()), _SILENT_SECONDS + _ANSWER_SECONDS)
        return found[0] if found else self._store_is_gone()

    def stop(self, *, failed: bool, linger_seconds: float = 4.0) -> None:
        """End the thread. After a failure of its own this rank stays until the others have heard of it."""
        if failed and self._own is not None and not self.lost and self.record == self._own:
            self._ask(self._finalise)
            self._ask(lambda: self._wait_until_heard(linger_seconds), linger_seconds + _ANSWER_SECONDS)
        else:
            self.heard()
        self._commands.put(None)
        if not self.lost:
            self._thread.join(_ANSWER_SECONDS)

    def _ask(self, command: Callable[[], Any], seconds: float = _ANSWER_SECONDS) -> None:
        """Run a command on the thread and wait for it."""
        if self.lost or not self._thread.is_alive() or threading.current_thread() is self._thread:
            return
        done = threading.Event()

        def run() -> None:
            try:
                command()
            finally:
                done.set()

        self._commands.put(run)
        if not done.wait(seconds):
            self.lost = True  # the network swallows what is sent: nobody should wait for it a second time

    # ---- on the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        next_beat = next_look = 0.0
        try:
            while True:
                try:
                    command = self._commands.get(timeout=_POLL_SECONDS)
                    if command is None:
                        return
                    command()
                except queue.Empty:
                    pass
                if time.monotonic() >= next_look:  # also while commands come one behind the other
                    next_look = time.monotonic() + _POLL_SECONDS
                    self._read()
                    self._tell()
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + _BEAT_SECONDS
                    self._beat()
        except (RuntimeError, OSError) as error:
            # The rank that served the store has left, or the network is gone. What that means is for the
            # collective to find out: at the end of a job it means nothing.
            log.debug("rank %d: the store is lost: %s", self.rank, error)
            self.lost = True
            while not self._commands.empty():
                self._commands.get()

    def _tell(self) -> None:
        record = self.record
        if record is None:
            return
        stuck = self._store.check([_stuck(record)])
        if stuck or (record.rank != self.rank and record != self._excused):
            self._notice(record, stuck)

    def _read(self) -> None:
        text = self._store.get(_FAILURE).decode() if self._store.check([_FAILURE]) else ""
        if text != (self.record.encode() if self.record is not None else ""):
            self.record = Record.decode(text) if text else None

    def _excuse(self) -> None:
        self._read()
        self._excused = self.record

    def _publish(self, record: Record) -> None:
        self._own = record
        stands = self._store.compare_set(_FAILURE, "", record.encode()).decode()
        self.record = Record.decode(stands) if stands else None

    def _withdraw(self) -> None:
        own, self._own = self._own, None
        if own is not None and self._store.compare_set(_FAILURE, own.encode(), "").decode() == "":
            self.record = None

    def _finalise(self) -> None:
        if self._own is not None and not self._own.final:
            final = replace(self._own, final=True)
            self._store.compare_set(_FAILURE, self._own.encode(), final.encode())
            self._own = final
            self.record = final

    def _wait_until_heard(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._store.add(_heard(self._own), 0) < self.world_size - 1:
            time.sleep(0.05)
            self._tell()

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"{_ALIVE}/{self.rank}", json.dumps([self.host, self._beats, self.doing]))

    def _signs(self) -> dict[int, tuple[str, int, str]]:
        """Host, number and doing of every rank that ever gave a sign of life."""
        keys = {rank: f"{_ALIVE}/{rank}" for rank in range(self.world_size)}
        there = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return {rank: tuple(json.loads(self._store.get(key))) for rank, key in there.items()}

    def _find_silent(self) -> str:
        before = self._signs()
        deadline = time.monotonic() + _SILENT_SECONDS
        while time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            self._beat()
            self._read()
            if self.others_record() is not None:
                return ""  # somebody was faster and knows more
        after = self._signs()
        silent = [
            rank for rank in range(self.world_size) if before.get(rank, ("", 0))[1] == after.get(rank, ("", 0))[1]
        ]
        if silent:
            return "no sign of life from " + _by_host(silent, after)
        elsewhere = {rank: sign for rank, sign in after.items() if sign[2] != self.doing}
        if elsewhere:
            where = ", ".join(
                f"rank {rank} on {host} in {doing or 'other code'}" for rank, (host, _, doing) in elsewhere.items()
            )
            return f"every rank is alive, but not in {self.doing or 'the same code'}: {where}"
        return "every rank is alive; one is slow, or waits in another operation than this rank"

    def _store_is_gone(self) -> str:
        store = self.base_store
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        where = f" at {store.host}:{store.port}" if hasattr(store, "host") else ""
        return f"the store of the job{where} does not answer: its host (rank 0's), or the network to it, is lost"


def _by_host(ranks: list[int], signs: dict[int, tuple[str, int, str]]) -> str:
    """``rank 2 on b, ranks 4, 5 on c``."""
    hosts: dict[str, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(signs[rank][0] if rank in signs else "an unknown host", []).append(rank)
    return ", ".join(
        f"rank{'s' if len(on_host) > 1 else ''} {', '.join(map(str, on_host))} on {host}"
        for host, on_host in hosts.items()
    )


def _own_connection(store: dist.Store) -> dist.Store:
    """The same store through a connection that only the thread uses."""
    clone = store.clone()
    clone.set_timeout(_STORE_TIMEOUT)
    return clone


def _heard(record: Record) -> str:
    return f"{_FAILURE}/{record.rank}/heard"


def _stuck(record: Record) -> str:
    return f"{_FAILURE}/{record.rank}/stuck"
