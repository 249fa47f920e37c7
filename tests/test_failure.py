"""A failure on one rank ends the others in seconds, with that rank's message, and blames nobody else."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ep_comm
from ep_comm import ConfigError, PeerLostError, failing_fast
from ep_comm.failure import _is_communication_error
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
    """The rank that failed stays alive for as long as the others need, so no connection breaks by itself."""
    store = dist.distributed_c10d._get_default_store()
    store.add("tests/done", 1)
    deadline = time.monotonic() + SOON
    while store.add("tests/done", 0) < world_size and time.monotonic() < deadline:
        time.sleep(0.1)


# ---- one after the other in the same processes, each on a process group of its own ----------------------------


def all_ranks_raise(rank: int, world_size: int) -> list[Caught]:
    def body(number: int) -> None:
        with failing_fast(f"step {number}", grace_seconds=0.5):
            sum_of_ranks()
            deadline = time.monotonic() + 1.5 * (rank == 0)
            while time.monotonic() < deadline:  # its own reason comes later; busy is not blocked
                torch.ones(8).sum()
            raise ValueError(f"number {number} on rank {rank}")

    caught = [expect_error(body, number) for number in range(2)]
    with failing_fast("the last step", grace_seconds=0.5):
        time.sleep(1.5 * (rank == 1))  # long enough to be ended for a failure that was not withdrawn
        sum_of_ranks()
    return caught


def one_rank_raises(rank: int, world_size: int) -> tuple[Caught, float]:
    def body() -> None:
        with failing_fast("step 17"):
            sum_of_ranks()
            if rank == 1:
                raise ValueError("sample 42 is empty")
            sum_of_ranks()

    return timed(body)


def runner_with_a_bad_argument(rank: int, world_size: int) -> tuple[Caught, float, bool, int]:
    """One good step, then one in which rank 1 alone gives combine too few rows."""
    torch.manual_seed(3)
    config = ep_comm.EPConfig(6, 2, 32, 8, mode="static", alignment=1, budget_rows=64, pair_rows=8)
    dispatcher = ep_comm.Dispatcher(config, name="layer 3")
    model = torch.nn.Linear(32, 32)
    model.register_buffer("seen", torch.zeros(()))

    def step(faulty: bool) -> None:
        model.seen.add_(1)
        topk_idx = torch.tensor([[0, 3], [2, 1], [1, 5], [4, 0]])
        d = dispatcher.dispatch(model(torch.ones(4, 32)), topk_idx, torch.ones(4, 2))
        rows = d.tokens[:-1] if faulty and rank == 1 else d.tokens
        dispatcher.combine(rows, d.handle, apply_weights=True).sum().backward()

    runner = ep_comm.StepRunner(step, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    runner(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    caught, seconds = timed(lambda: runner(True))
    untouched = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return caught, seconds, untouched, runner.steps


def one_rank_raises_too_late(rank: int, world_size: int) -> tuple[Caught, Caught]:
    """Behind its last collective: rank 1 has not made the step, and would go on with it."""
    dispatcher = ep_comm.Dispatcher(ep_comm.EPConfig(6, 2, 32, 8, mode="static", budget_rows=64, pair_rows=8))
    model = torch.nn.Linear(32, 32)

    def step(number: int) -> None:
        d = dispatcher.dispatch(model(torch.ones(1, 32)), torch.tensor([[0, 3]]), torch.ones(1, 2))
        dispatcher.combine(d.tokens, d.handle).sum().backward()
        if rank == 1 and number == 1:
            raise ValueError("the log is full")

    runner = ep_comm.StepRunner(step, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    runner(0)
    return expect_error(runner, 1), expect_error(runner, 2)


def one_rank_is_elsewhere(rank: int, world_size: int) -> Caught:
    def body() -> None:
        with failing_fast("step 4" if rank == 1 else "step 5"):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
            if rank == 1:
                time.sleep(6)
            else:
                sum_of_ranks()

    return expect_error(body)


def one_rank_is_killed(rank: int, world_size: int) -> tuple[Caught, float]:
    def body() -> None:
        with failing_fast("step 3"):
            sum_of_ranks()
            time.sleep(1.5)  # for a sign of life
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            sum_of_ranks()

    return timed(body)


SCENES = (
    all_ranks_raise,
    one_rank_raises,
    runner_with_a_bad_argument,
    one_rank_raises_too_late,
    one_rank_is_elsewhere,
    one_rank_is_killed,
)


def all_scenes(rank: int, world_size: int, folder: str) -> None:
    for scene in SCENES:
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/{scene.__name__}.store", world_size)
        # A process group made by hand: there is no launcher and no init_distributed.
        timeout = timedelta(seconds=GROUP_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        result = scene(rank, world_size)
        Path(folder, f"{scene.__name__}.{rank}").write_bytes(pickle.dumps(result))
        if scene is not SCENES[-1]:
            stay_until_all_are_done(world_size)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank of three saw in each scene; the last one costs rank 2 its life."""
    folder = tmp_path_factory.mktemp("scenes")
    ends = run_ranks(all_scenes, 3, str(folder), fresh=True, group_timeout=GROUP_TIMEOUT, timeout=150)
    assert ends == [None, None, Died(-signal.SIGKILL)]
    found = {}
    for scene in SCENES:
        files = [folder / f"{scene.__name__}.{rank}" for rank in range(3)]
        found[scene.__name__] = [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
    return found


def test_ranks_that_raise_alike_keep_their_own_errors_and_their_group(scenes: dict[str, list[Any]]) -> None:
    for rank, caught in enumerate(scenes["all_ranks_raise"]):
        assert caught == [Caught("ValueError", f"number {number} on rank {rank}") for number in range(2)]


def test_a_rank_that_raises_ends_the_blocked_ones_with_its_message(scenes: dict[str, list[Any]]) -> None:
    results = scenes["one_rank_raises"]
    assert results[1][0] == Caught("ValueError", "sample 42 is empty")
    for caught, seconds in (results[0], results[2]):
        assert caught.type == "PeerLostError" and seconds < SOON
        assert caught.message.startswith(f"rank 1 (host {HOST}) failed in step 17: ValueError: sample 42 is empty")


def test_a_runner_ends_its_peers_and_undoes_the_step(scenes: dict[str, list[Any]]) -> None:
    results = scenes["runner_with_a_bad_argument"]
    assert results[1][0].type == "ArgumentError"
    for caught, seconds, *_ in (results[0], results[2]):
        assert caught.type == "PeerLostError" and seconds < SOON
        assert caught.message.startswith(f"rank 1 (host {HOST}) failed in step 1: ArgumentError: ")
    assert [state for _, _, *state in results] == [[True, 1]] * 3


def test_a_rank_that_failed_alone_behind_the_last_collective_does_not_go_on(scenes: dict[str, list[Any]]) -> None:
    results = scenes["one_rank_raises_too_late"]
    assert results[1][0] == Caught("ValueError", "the log is full")
    assert "rank 1: step 1 failed on this rank, but not on all" in results[1][1].message, results[1][1]
    for first, second in (results[0], results[2]):
        assert first.type == "" and second.type == "PeerLostError" and "the log is full" in second.message


def test_a_rank_that_does_not_come_is_said_to_be_alive(scenes: dict[str, list[Any]]) -> None:
    results = scenes["one_rank_is_elsewhere"]
    for rank in (0, 2):
        assert results[rank].type == "PeerLostError"
        assert f"every rank is alive, but not in step 5: rank 1 on {HOST} in step 4" in results[rank].message


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (RuntimeError("dataset 'gloo_mitten.json' not found"), False),
        (ConfigError("transport='symmetric' cannot serve this group: NCCL_P2P_DISABLE is set"), False),
        (OSError("Broken pipe"), False),
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1"), True),
        (PeerLostError("rank 3 was lost"), True),
    ],
)
def test_a_users_own_error_is_not_taken_for_a_lost_peer(error: Exception, ours: bool) -> None:
    assert _is_communication_error(error) is ours


def test_a_killed_rank_is_named(scenes: dict[str, list[Any]]) -> None:
    results = scenes["one_rank_is_killed"]
    assert results[2] is None
    for caught, seconds in results[:2]:
        assert caught.type == "PeerLostError" and "in step 3: " in caught.message
        assert f"no sign of life from rank 2 on {HOST}" in caught.message
        assert "rank 1 on" not in caught.message and "ranks" not in caught.message
        assert seconds < SOON


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


def test_an_uncaught_error_of_a_program_reaches_the_others() -> None:
    guilty = 0  # the rank that serves the store through which its message goes
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
