"""Runs a function on several gloo ranks and brings back what each rank returned.

Starting a rank costs seconds, most of it importing torch. So the ranks live in one pool of worker
processes that serves the whole test session: a job is a top-level function and its arguments, sent
through a pipe. A job that raises, dies or runs out of time takes the pool with it, and the next job
starts a new one, so no test sees the leftovers of another.

    def sum_of_ranks(rank, world_size, scale):
        x = torch.tensor(float(rank * scale))
        dist.all_reduce(x)
        return x.item()

    assert run_ranks(sum_of_ranks, 4, 10) == [60.0] * 4
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

__all__ = ["Caught", "Died", "RankError", "expect_error", "run_ranks", "shutdown"]

# After one rank has failed, its peers usually wait for it in a collective: this is how long they get
# to report their own error before they are killed.
GRACE_SECONDS = 3.0
START_SECONDS = 120.0


class RankError(AssertionError):
    """A rank raised, died or did not finish; the message holds its traceback."""


class Died(NamedTuple):
    """Stands for the result of a rank that ended without one (only with ``fresh=True``)."""

    exitcode: int | None


class Caught(NamedTuple):
    """An error as :func:`expect_error` saw it."""

    type: str
    message: str


def expect_error(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Caught:
    """Call ``fn`` and return the (type name, message) of what it raised; ("", repr of result) if nothing."""
    try:
        result = fn(*args, **kwargs)
    except Exception as error:
        return Caught(type(error).__name__, str(error))
    return Caught("", f"no error, returned {type(result).__name__}")


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    fresh: bool = False,
    group_timeout: float = 60.0,
) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` on every rank of a gloo group and return the results by rank.

    Args:
        fn: a function at the top level of an importable module. In it the default process group is a
            gloo group of ``world_size`` ranks, torch uses one thread, and the seed is 0.
        world_size: number of ranks.
        args: whatever pickles. Results must pickle too.
        timeout: seconds for the whole job, the start of a new pool not counted.
        fresh: run on processes of their own, which end with the job. A rank that dies then gives a
            :class:`Died` in the list instead of failing the job.
        group_timeout: seconds a collective waits for a peer. Only with ``fresh``.

    Raises:
        RankError: a rank raised (its traceback is in the message), died, or did not finish in time.
    """
    job = pickle.dumps((fn, args))
    if fresh:
        pool = _Pool(group_timeout)
        try:
            return pool.run(job, world_size, timeout, tolerate_death=True)
        finally:
            pool.kill()
    global _shared
    if _shared is None:
        _shared = _Pool(60.0)
    try:
        return _shared.run(job, world_size, timeout, tolerate_death=False)
    except BaseException:
        shutdown()
        raise


def shutdown() -> None:
    """End the shared pool's processes. The next :func:`run_ranks` starts new ones."""
    global _shared
    if _shared is not None:
        _shared.kill()
        _shared = None


@dataclass
class _Outcome:
    """What one rank sent back."""

    ok: bool
    value: Any = None
    trace: str = ""


class _Worker:
    """One rank's process and the parent's end of its pipe."""

    def __init__(self, rank: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, os.getpid()), name=f"rank-{rank}", daemon=True)
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


@dataclass
class _Pool:
    """Worker processes, as many as the largest job so far needed; worker i serves as rank i."""

    group_timeout: float
    workers: list[_Worker] = field(default_factory=list)
    directory: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="ep_comm_ranks_"))
    group: tuple[int, str] | None = None
    groups_made: int = 0

    def run(self, job: bytes, world_size: int, timeout: float, tolerate_death: bool) -> list[Any]:
        self._grow(world_size)
        if self.group is None or self.group[0] != world_size:
            self.groups_made += 1
            self.group = (world_size, os.path.join(self.directory, f"store{self.groups_made}"))
        for rank, worker in enumerate(self.workers[:world_size]):
            worker.pipe.send_bytes(pickle.dumps((rank, *self.group, self.group_timeout)))
            worker.pipe.send_bytes(job)
        outcomes = self._collect(world_size, timeout, tolerate_death)
        return _unwrap(outcomes, self.workers[:world_size], timeout, tolerate_death)

    def _grow(self, world_size: int) -> None:
        new = [_Worker(rank) for rank in range(len(self.workers), world_size)]
        self.workers.extend(new)
        for worker in new:
            if not worker.pipe.poll(START_SECONDS):
                raise RankError(f"{worker.process.name} did not start within {START_SECONDS:.0f} s")
            worker.pipe.recv_bytes()

    def _collect(self, world_size: int, timeout: float, tolerate_death: bool) -> dict[int, _Outcome]:
        """Wait until every rank has reported or died, a failure has used up its grace, or time is up."""
        deadline = time.monotonic() + timeout
        waiting = {worker.pipe: rank for rank, worker in enumerate(self.workers[:world_size])}
        outcomes: dict[int, _Outcome] = {}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in multiprocessing.connection.wait(list(waiting), timeout=left):
                rank = waiting.pop(pipe)
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
                    failed = not outcomes[rank].ok
                except (EOFError, ConnectionError):
                    failed = not tolerate_death
                if failed:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return outcomes

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers.clear()
        shutil.rmtree(self.directory, ignore_errors=True)


_shared: _Pool | None = None
atexit.register(shutdown)


def _unwrap(outcomes: dict[int, _Outcome], workers: list[_Worker], timeout: float, tolerate_death: bool) -> list[Any]:
    """Results by rank, or RankError with every failed rank's story, the first to fail first."""
    stories = [f"rank {rank} raised:\n{out.trace}" for rank, out in outcomes.items() if not out.ok]
    results: list[Any] = []
    for rank, worker in enumerate(workers):
        if rank in outcomes:
            results.append(outcomes[rank].value)
            continue
        worker.process.join(timeout=0.5)
        exitcode = worker.process.exitcode
        if exitcode is None:
            stories.append(f"rank {rank} did not finish (timeout {timeout:.0f} s, or a peer failed)")
        elif not tolerate_death:
            stories.append(f"rank {rank} died with exit code {exitcode}")
        results.append(Died(exitcode))
    if stories:
        raise RankError("\n".join(stories))
    return results


def _serve(pipe: multiprocessing.connection.Connection, parent: int) -> None:
    """A worker's life: say hello, then one job after the other until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it kills its workers
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    import torch

    torch.set_num_threads(1)
    pipe.send_bytes(b"ready")
    group = None
    while True:
        try:
            rank, world_size, store, group_timeout = pickle.loads(pipe.recv_bytes())
            job = pipe.recv_bytes()
        except EOFError:
            return
        try:
            if group != (world_size, store):
                _join_group(rank, world_size, store, group_timeout)
                group = (world_size, store)
            torch.manual_seed(0)
            fn, args = pickle.loads(job)
            outcome = _Outcome(True, fn(rank, world_size, *args))
            answer = pickle.dumps(outcome)
        except BaseException:
            answer = pickle.dumps(_Outcome(False, trace=traceback.format_exc()))
        pipe.send_bytes(answer)


def _join_group(rank: int, world_size: int, store: str, group_timeout: float) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=group_timeout),
    )


def _exit_with_parent(parent: int) -> None:
    # A worker that waits in a collective does not notice that its pipe has closed.
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
