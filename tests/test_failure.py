"""A failure on one rank ends the others in seconds, with that rank's message, and blames nobody else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import ep_comm
from ep_comm import failing_fast
from tests.harness import Caught, Died, expect_error, run_ranks
from tests.test_distributed import environment, free_port

HOST = socket.gethostname()
GROUP_TIMEOUT = 50.0
SOON = 12.0  # seconds on a busy machine; far below GROUP_TIMEOUT


def timed(body: Callable[[], object]) -> tuple[Caught, float]:
    start = time.monotonic()
    return expect_error(body), time.monotonic() - start


def sum_of_ranks() -> None:
    x = torch.ones(8)
    dist.all_reduce(x)
    assert x[0] == dist.get_world_size()


def stay_until_all_are_done(world_size: int) -> None:
    """The rank that failed stays alive for as long as the others need."""
    store = dist.distributed_c10d._get_default_store()
    store.add("tests/done", 1)
    deadline = time.monotonic() + SOON
    while store.add("tests/done", 0) < world_size and time.monotonic() < deadline:
        time.sleep(0.1)


def one_rank_raises(rank: int, world_size: int) -> tuple[Caught, float]:
    """The rank that raises stays alive, so no connection breaks by itself."""

    def body() -> None:
        with failing_fast("step 17"):
            sum_of_ranks()
            if rank == 1:
                raise ValueError("sample 42 is empty")
            sum_of_ranks()

    result = timed(body)
    stay_until_all_are_done(world_size)
    return result


def test_a_rank_that_raises_ends_the_blocked_ones_with_its_message() -> None:
    results = run_ranks(one_rank_raises, 3, fresh=True, group_timeout=GROUP_TIMEOUT)
    assert results[1][0] == Caught("ValueError", "sample 42 is empty")
    for rank in (0, 2):
        caught, seconds = results[rank]
        assert caught.type == "PeerLostError"
        assert caught.message.startswith(f"rank 1 (host {HOST}) failed in step 17: ValueError: sample 42 is empty")
        assert seconds < SOON


def all_ranks_raise(rank: int, world_size: int) -> list[Caught]:
    def body(number: int) -> None:
        with failing_fast(f"step {number}", grace_seconds=0.5):
            sum_of_ranks()
            if rank == 0:
                time.sleep(0.8)  # its own reason comes later than the news of the others'
                deadline = time.monotonic() + 1.5
                while time.monotonic() < deadline:  # busy, which is not blocked
                    torch.ones(8).sum()
            raise ValueError(f"number {number} on rank {rank}")

    caught = [expect_error(body, number) for number in range(2)]
    with failing_fast("the step after"):
        sum_of_ranks()
    time.sleep(0.6)
    with failing_fast("the last step"):
        sum_of_ranks()
    return caught


def test_ranks_that_raise_alike_keep_their_own_errors_and_their_group() -> None:
    for rank, caught in enumerate(run_ranks(all_ranks_raise, 2, fresh=True, group_timeout=GROUP_TIMEOUT)):
        assert caught == [Caught("ValueError", f"number {number} on rank {rank}") for number in range(2)]


def one_rank_is_killed(rank: int, world_size: int) -> tuple[Caught, float]:
    def body() -> None:
        with failing_fast("step 3"):
            sum_of_ranks()
            time.sleep(1.5)
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            sum_of_ranks()

    return timed(body)


def test_a_killed_rank_is_named() -> None:
    results = run_ranks(one_rank_is_killed, 3, fresh=True, group_timeout=GROUP_TIMEOUT)
    assert results[2] == Died(-signal.SIGKILL)
    for caught, seconds in results[:2]:
        assert caught.type == "PeerLostError" and "in step 3: " in caught.message
        assert f"no sign of life from rank 2 on {HOST}" in caught.message
        assert "rank 1 on" not in caught.message and "ranks" not in caught.message
        assert seconds < SOON


def one_rank_is_elsewhere(rank: int, world_size: int) -> Caught:
    def body() -> None:
        with failing_fast("step 5" if rank == 0 else "step 4"):
            if rank == 1:
                time.sleep(8)
            sum_of_ranks()

    return expect_error(body)


def test_a_rank_that_does_not_come_is_said_to_be_alive() -> None:
    first, second = run_ranks(one_rank_is_elsewhere, 2, fresh=True, group_timeout=2.0)
    assert first.type == second.type == "PeerLostError"
    assert f"every rank is alive, but not in step 5: rank 1 on {HOST} in step 4" in first.message


# ---- whole programs -------------------------------------------------------------------------------------------

UNCAUGHT = """
import torch, torch.distributed as dist, ep_comm
env = ep_comm.init_distributed(timeout=50)
x = torch.ones(1)
if env.rank == {guilty}:
    dist.all_reduce(x)
    raise KeyError("no such shard")
with ep_comm.failing_fast("loading"):
    dist.all_reduce(x)
    dist.all_reduce(x)
"""

STUCK = """
import time, torch, torch.distributed as dist, ep_comm, ep_comm.failure
ep_comm.failure._LAST_RESORT_SECONDS = 1.0
env = ep_comm.init_distributed(timeout=50)
with ep_comm.failing_fast("step 1", grace_seconds=0.5):
    if env.rank == 1:
        raise OSError("disk full")
    time.sleep(40)
"""


def run_program(program: str) -> list[subprocess.CompletedProcess[str]]:
    """Two ranks that meet through plain variables, with no launcher that would end one for the other."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment(RANK=str(rank), **shared),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [
            subprocess.CompletedProcess(process.args, process.returncode, stderr=errors)
            for process in processes
            for _, errors in [process.communicate(timeout=90)]
        ]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("guilty", [0, 1])  # rank 0 serves the store through which its message goes
def test_an_uncaught_error_of_a_program_reaches_the_others(guilty: int) -> None:
    start = time.monotonic()
    ended = run_program(UNCAUGHT.format(guilty=guilty))
    assert time.monotonic() - start < 40
    assert [each.returncode for each in ended] == [1, 1]
    assert "KeyError: 'no such shard'" in ended[guilty].stderr and "PeerLostError" not in ended[guilty].stderr
    last = ended[1 - guilty].stderr.strip().splitlines()[-1]
    assert f"ep_comm.errors.PeerLostError: rank {guilty} (host {HOST}) failed: KeyError: 'no such shard'" in last


def test_what_cannot_be_broken_ends_with_the_message() -> None:
    first, second = run_program(STUCK)
    assert first.returncode == second.returncode == 1
    assert (
        f"rank 0 cannot be freed from step 1: rank 1 (host {HOST}) failed in step 1: OSError: disk full" in first.stderr
    )
    assert "OSError: disk full" in second.stderr


# ---- inside a StepRunner --------------------------------------------------------------------------------------


def runner_with_a_fault(rank: int, world_size: int, fault: str) -> tuple[Caught, float, bool, int]:
    """One good step, then one in which rank 1 alone does something wrong and stays alive."""
    torch.manual_seed(3)
    config = ep_comm.EPConfig(4, 2, 32, 8, mode="static", alignment=1, budget_rows=64, pair_rows=8)
    dispatcher = ep_comm.Dispatcher(config, name="layer 3")
    model = torch.nn.Linear(32, 32)
    model.register_buffer("seen", torch.zeros(()))

    def step(faulty: bool) -> None:
        model.seen.add_(1)
        d = dispatcher.dispatch(
            model(torch.ones(4, 32)), torch.tensor([[0, 3], [2, 1], [1, 3], [3, 0]]), torch.ones(4, 2)
        )
        rows = d.tokens
        if faulty and rank == 1 and fault == "bad argument":
            rows = rows[:-1]
        if faulty and rank == 1 and fault == "user code":
            raise ValueError("bad luck")
        dispatcher.combine(rows, d.handle, apply_weights=True).sum().backward()

    runner = ep_comm.StepRunner(step, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    runner(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    caught, seconds = timed(lambda: runner(True))
    untouched = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    stay_until_all_are_done(world_size)
    return caught, seconds, untouched, runner.steps


@pytest.mark.parametrize(
    "fault, type_there, words",
    [("user code", "ValueError", "ValueError: bad luck"), ("bad argument", "ArgumentError", "ArgumentError: ")],
)
def test_a_runner_ends_its_peers_and_undoes_the_step(fault: str, type_there: str, words: str) -> None:
    (here, seconds, *state), (there, _, *state_there) = run_ranks(
        runner_with_a_fault, 2, fault, fresh=True, group_timeout=GROUP_TIMEOUT
    )
    assert there.type == type_there
    assert here.type == "PeerLostError" and seconds < SOON
    assert here.message.startswith(f"rank 1 (host {HOST}) failed in step 1: {words}")
    assert state == state_there == [True, 1]


ORPHAN = """
import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(rank.pid, flush=True)
time.sleep(60)
"""

LAUNCHED = """
import time, ep_comm
ep_comm.init_distributed(timeout=50)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_rank_ends_when_its_launcher_does() -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "x"}
    launchers = [
        subprocess.Popen(
            [sys.executable, "-c", ORPHAN, LAUNCHED],
            env=environment(RANK=str(rank), **place),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    pids = []
    for launcher in launchers:
        assert launcher.stdout is not None
        pids.append(int(launcher.stdout.readline()))
        assert launcher.stdout.readline() == "ready\n"
    launchers[1].kill()
    assert launchers[1].communicate(timeout=SOON)[0] == ""  # the pipe closes when the rank has ended
    os.kill(pids[0], 0)
    launchers[0].kill()
    launchers[0].communicate(timeout=SOON)
