"""Failing fast: what goes wrong on one rank ends the others in seconds, with that rank's message.

Without this a rank that raises in user code leaves the others in their next collective until the process
group's timeout, and a rank that is killed shows as a broken connection without a name.

    rank 3                          rank 0
    with failing_fast("step 17"):   with failing_fast("step 17"):
        ValueError                      all_to_all ...                 blocked
        │ record in the store    ──▶    its watcher sees the record
        ▼                               it stands, and this rank does not move: connections are broken
    ValueError                          all_to_all raises
                                    PeerLostError: rank 3 (host b) failed in step 17: ValueError: ...

:class:`ep_comm.StepRunner` and ``ep-comm`` do this by themselves. Nothing is sent on the thread that trains; see
:mod:`ep_comm.watcher` for what the watching thread does.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist

from .errors import ConfigError, EPError, PeerLostError
from .unblock import break_connections
from .watcher import Record, Watcher

__all__ = ["FailureCount", "failing_fast", "stop_watching", "watch"]

log = logging.getLogger("ep_comm")

_GRACE_SECONDS = 3.0
_LAST_RESORT_SECONDS = 15.0
_SHARED_SECONDS = 120.0  # where the failure no longer stands, so that nobody can end with it
# What gloo and NCCL really print: a user's own error may well mention them.
_BACKEND_WORDS = ("gloo/transport/", "NCCL error", "NCCL communicator was aborted", "Connection closed by peer")


@dataclass
class _Scope:
    """One ``with failing_fast(...)`` that is open."""

    where: str
    ranks: frozenset[int] | None
    grace_seconds: float
    thread: int = field(default_factory=threading.get_ident)
    before: str = ""
    broken: Record | None = None


@dataclass
class _State:
    """The watcher of this process, the scopes that are open in it, and whether their thread moves."""

    watcher: Watcher | None = None
    scopes: list[_Scope] = field(default_factory=list)
    position: object = None
    moved: float = 0.0
    unusable: dist.Store | None = None
    broken_at: float | None = None
    process: int = 0


_state = _State()


@contextmanager
def failing_fast(
    where: str, *, group: dist.ProcessGroup | None = None, grace_seconds: float = _GRACE_SECONDS
) -> Iterator[None]:
    """Everything in this ``with`` fails on all ranks if it fails on one.

    An exception that leaves the body is told to the other ranks, then raised as it is. A rank whose body is
    blocked while the failure of another rank stands ends with :class:`PeerLostError`, which holds the other
    rank's message. A collective that fails because a rank died, or did not come in time, becomes a
    :class:`PeerLostError` that names the ranks and hosts that give no sign of life.

    Where all ranks raise for the same reason nobody is blocked, so each keeps its own exception and the process
    group stays usable: entering the next ``failing_fast`` withdraws this rank's failure. After
    :class:`PeerLostError` the process groups are good for nothing but being destroyed. A rank that is blocked in
    something that cannot be broken prints the message and ends its process 15 s later.

    Without torch.distributed, or with one rank, nothing happens. Scopes may be nested.

    Args:
        where: what the body does, for messages: ``"step 17"``.
        group: only failures of its ranks matter; None means all ranks.
        grace_seconds: how long a blocked rank waits for the failed one to come back, above 0.

    Raises:
        PeerLostError: another rank failed or was lost.
        ConfigError: ``grace_seconds`` is not above 0.
        Exception: whatever the body raises on this rank by itself.
    """
    if not grace_seconds > 0:
        raise ConfigError(f"grace_seconds must be above 0, got {grace_seconds!r}")
    watcher = watch()
    if watcher is None:
        yield
        return
    ranks = None if group is None else frozenset(dist.get_process_group_ranks(group))
    scope = _enter(watcher, _Scope(where, ranks, grace_seconds))
    try:
        yield
    except GeneratorExit:
        raise
    except BaseException as error:
        consequence = _consequence(watcher, scope, error)
        if consequence is not None:
            raise consequence from error
        if not _is_good_exit(error) and not getattr(error, "_ep_comm_told", False):
            _tell(watcher, scope, error)
        raise
    else:
        if scope.broken is not None:  # nccl: an aborted collective returns as if nothing had happened
            raise _lost(watcher, scope.broken, None)
    finally:
        _leave(watcher, scope)


class FailureCount:
    """Tells a failure that all ranks of a group had from one that a single rank had.

    A rank that has caught its own exception would go on one step behind the others, which never noticed: they were
    past the last collective of the step. So it goes on only once all have counted the same failure; otherwise it
    raises, and as its failure still stands, the others end with it.

    Args:
        group: its ranks have to fail together; None means one process.
        number: tells what counts here from what else counts in the group; the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, number: Callable[[], int]) -> None:
        self._group = group
        self._number = number
        self._count = 0
        self._waiting: str | None = None

    def note(self, step: int) -> None:
        """This rank has failed in ``step``."""
        watcher = None if self._group is None or dist.get_world_size(self._group) == 1 else watch()
        if watcher is None:
            return
        self._count += 1
        self._waiting = f"ep_comm/failures/{self._group.group_name}/{self._number()}/{self._count}/{step}"
        watcher.add(self._waiting, 1)

    def check(self, step: int) -> None:
        """Before going on: wait until the others have failed in ``step`` as well.

        Raises:
            EPError: they have not.
        """
        watcher = None if self._waiting is None else watch()
        deadline = time.monotonic() + _SHARED_SECONDS
        while watcher is not None:
            count = watcher.add(self._waiting, 0)
            if count is None:
                break  # the store is gone, and with it whoever served it: the next collective tells
            if count >= dist.get_world_size(self._group):
                watcher.excuse()
                break
            # Who is ahead is blocked, and ends with this rank's failure; who is merely late has not heard of it.
            if watcher.is_heard() or time.monotonic() > deadline:
                raise EPError(
                    f"rank {dist.get_rank(self._group)}: step {step} failed on this rank, but not on all: the others "
                    f"are ahead, and training cannot go on. What may fail on one rank only belongs in front of the "
                    f"step's last collective"
                )
            time.sleep(0.05)
        self._waiting = None


def watch() -> Watcher | None:
    """Start the watching thread of this process, or find it. None without other ranks, or without a usable store."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    watcher = _state.watcher
    if watcher is not None and watcher.base_store is store:
        return watcher
    if watcher is not None:
        stop_watching()
    if store is _state.unusable:
        return None
    try:
        _state.watcher = Watcher(store, dist.get_rank(), dist.get_world_size(), _notice)
    except (RuntimeError, NotImplementedError) as error:
        log.debug("failures of other ranks are not seen at once: %s", error)
        _state.unusable = store
        return None
    _state.broken_at, _state.process = None, os.getpid()
    atexit.register(stop_watching)
    return _state.watcher


def stop_watching(*, failed: bool | None = None) -> None:
    """End the watching thread, before the process group goes. Harmless if there is none.

    Args:
        failed: the process ends because of an error: it is told to the other ranks, if it was not yet, and this
            rank stays a few seconds, until they have heard. None looks for an uncaught exception.
    """
    watcher, _state.watcher = _state.watcher, None
    atexit.unregister(stop_watching)
    if watcher is None or _state.process != os.getpid():  # a forked child has no thread, and its parent goes on
        return
    uncaught = sys.exc_info()[1] if failed else getattr(sys, "last_value", None)
    failed = uncaught is not None if failed is None else failed
    if failed and uncaught is not None and not getattr(uncaught, "_ep_comm_told", False):
        _tell(watcher, None, uncaught)
    watcher.stop(failed=failed)


# ---- on the thread that entered the scope ---------------------------------------------------------------------


def _enter(watcher: Watcher, scope: _Scope) -> _Scope:
    watcher.withdraw()
    scope.before, watcher.doing = watcher.doing, scope.where
    _state.moved = time.monotonic()
    _state.scopes.append(scope)
    return scope


def _leave(watcher: Watcher, scope: _Scope) -> None:
    if scope in _state.scopes:
        _state.scopes.remove(scope)
    watcher.doing = scope.before
    _state.moved = time.monotonic()


def _tell(watcher: Watcher, scope: _Scope | None, error: BaseException) -> None:
    where = f" in {scope.where}" if scope is not None else ""
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, PeerLostError):
        watcher.publish(str(error))
    else:
        watcher.publish(f"rank {watcher.rank} (host {watcher.host}) failed{where}: {reason}")
    _mark(error)


def _consequence(watcher: Watcher, scope: _Scope, error: BaseException) -> PeerLostError | None:
    """What to raise instead of ``error``, if another rank is its cause."""
    if scope.broken is not None:
        return _lost(watcher, scope.broken, error)
    if getattr(error, "_ep_comm_told", False) or not _is_communication_error(error):
        return None
    record = watcher.look()
    if record is not None:
        return _lost(watcher, record, error)
    silent = watcher.find_silent()
    record = watcher.others_record()
    if record is not None:
        return _lost(watcher, record, error)
    lost = PeerLostError(f"rank {watcher.rank} (host {watcher.host}) in {scope.where}: {_first_line(error)}; {silent}")
    _tell(watcher, scope, lost)
    return lost


def _lost(watcher: Watcher, record: Record, error: BaseException | None) -> PeerLostError:
    watcher.heard()
    here = f" [here: {_first_line(error)}]" if error is not None else ""
    return _mark(PeerLostError(record.text + here))


def _mark(error: BaseException) -> BaseException:
    """Remember that the other ranks know of it."""
    try:
        error._ep_comm_told = True  # type: ignore[attr-defined]
    except AttributeError:
        pass  # an exception class with __slots__ is told twice, which changes nothing
    return error


def _is_communication_error(error: BaseException) -> bool:
    if isinstance(error, (PeerLostError, dist.DistError)):
        return True
    if isinstance(error, EPError):
        return False
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _BACKEND_WORDS)


def _is_good_exit(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# ---- on the watching thread -----------------------------------------------------------------------------------


def _notice(record: Record, stuck: bool) -> None:
    """A failure stands in the store: end what this rank is blocked in, if it is blocked."""
    watcher = _state.watcher
    if watcher is None:
        return
    if stuck and _state.broken_at is None:
        _break(watcher, record)
        return
    scope = _state.scopes[-1] if _state.scopes else None
    if scope is None or record.rank == watcher.rank or (scope.ranks is not None and record.rank not in scope.ranks):
        return
    now, position = time.monotonic(), _position(scope.thread)
    if position != _state.position:
        _state.position, _state.moved = position, now
    waited = now - _state.moved
    if _state.broken_at is None:
        if waited >= (min(0.5, scope.grace_seconds) if record.final else scope.grace_seconds):
            watcher.ask_to_break(record)
            _break(watcher, record)
    elif min(waited, now - _state.broken_at) >= _LAST_RESORT_SECONDS:
        print(
            f"ep_comm: rank {watcher.rank} cannot be freed from {scope.where}: {record.text}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def _break(watcher: Watcher, record: Record) -> None:
    _state.broken_at = time.monotonic()
    if record.rank != watcher.rank:
        for scope in _state.scopes:
            scope.broken = record
    break_connections()


def _position(thread: int) -> tuple[object, ...]:
    """Where the scope's thread, and those on which autograd runs Python, stand: unchanged means blocked."""
    known = {each.ident for each in threading.enumerate() if not each.name.startswith("Dummy")}
    frames = sys._current_frames()
    return tuple(
        (ident, id(frame), frame.f_lasti)
        for ident, frame in sorted(frames.items())
        if ident == thread or ident not in known
    )
