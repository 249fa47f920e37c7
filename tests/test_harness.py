"""The harness: results by rank, errors with their traceback, dead and stuck ranks, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import Died, RankError, expect_error, run_ranks


def sum_of_ranks(rank: int, world_size: int, scale: int) -> tuple[float, int]:
    x = torch.tensor(float(rank * scale))
    dist.all_reduce(x)
    return x.item(), os.getpid()


def raise_on_rank(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        raise KeyError("lost key")
    dist.barrier()


def kill_rank(rank: int, world_size: int, victim: int) -> str:
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return expect_error(dist.all_reduce, torch.zeros(1)).type


def sleep_forever(rank: int, world_size: int) -> None:
    time.sleep(60)


def test_results_come_by_rank_and_the_pool_is_reused() -> None:
    first = run_ranks(sum_of_ranks, 2, 10)
    assert [value for value, _ in first] == [10.0, 10.0]
    assert [value for value, _ in run_ranks(sum_of_ranks, 4, 10)] == [60.0] * 4
    assert [value for value, _ in run_ranks(sum_of_ranks, 1, 10)] == [0.0]
    again = run_ranks(sum_of_ranks, 2, 1)
    assert [value for value, _ in again] == [1.0, 1.0]
    assert [pid for _, pid in again] == [pid for _, pid in first]


def test_an_exception_brings_its_traceback_and_the_next_job_works() -> None:
    with pytest.raises(RankError, match="(?s)rank 1 raised.*raise_on_rank.*lost key"):
        run_ranks(raise_on_rank, 2, 1)
    assert run_ranks(sum_of_ranks, 2, 1)[0][0] == 1.0


def test_a_killed_rank_is_reported() -> None:
    results = run_ranks(kill_rank, 2, 1, fresh=True, group_timeout=10)
    assert results[1] == Died(-signal.SIGKILL)
    assert results[0] != ""


def test_a_stuck_job_ends_with_the_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 0 did not finish"):
        run_ranks(sleep_forever, 1, timeout=1, fresh=True)
    assert time.monotonic() - start < 30


def test_ranks_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "from tests.harness import run_ranks, _shared\n"
        "from tests.test_harness import sum_of_ranks\n"
        "print(*[pid for _, pid in run_ranks(sum_of_ranks, 2, 1)], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parent.parent
    # A killed parent cannot remove its files: they go where pytest cleans up.
    env = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, timeout=60)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_alive(pid) for pid in pids)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
