"""Several hosts with their own addresses: the same bits as on one, and an end with a name when one is lost."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ep_comm.distributed import init_distributed
from ep_comm.extras import install_hint
from ep_comm.train.data import load_corpus
from ep_comm.train.loop import Trainer
from ep_comm.train.options import TrainOptions
from tests.harness import run_ranks
from tests.hosts import ranks
from tests.train.tiny import TINY, TINY_FLAGS

ROOT = Path(__file__).resolve().parents[2]
PASSED_ON = ("PATH", "PYTHONPATH", "OMP_NUM_THREADS", "COLUMNS", "TORCH_CPP_LOG_LEVEL")


def load_script(name: str) -> ModuleType:
    """A program of scripts/ as a module."""
    spec = importlib.util.spec_from_file_location(f"ep_comm_script_{name}", ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


script = load_script("hosts")
NO_HOSTS = script.why_not()
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
START_SECONDS = float(os.environ.get("EP_COMM_TEST_START_SECONDS", "90"))  # a busy machine needs more
_MPIRUN = shutil.which("mpirun", path=PATH)
MPI = _MPIRUN is not None and " " not in _MPIRUN and importlib.util.find_spec("mpi4py") is not None

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "hosts can be made")]
needs_mpi = pytest.mark.skipif(
    not MPI, reason=f"needs mpi4py, and mpirun in a folder without spaces: {install_hint('mpi')}"
)


@pytest.fixture
def make_hosts() -> Iterator[Callable[[int], Any]]:
    """Makes hosts; afterwards there must be no namespace, no file and no process of theirs."""
    made = []

    def make(count: int) -> Any:
        made.append(script.Hosts(count))
        made[-1].up()
        return made[-1]

    yield make
    for hosts in made:
        hosts.down()
        assert not [space for space in script.namespaces() if space.startswith(hosts.name)]
        assert not list(Path("/etc").glob(f"netns/{hosts.name}*"))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # addresses without a name are no news here
    monkeypatch.setenv("COLUMNS", "80")


def run_mpi(hosts: Any, count: int, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    with hosts.mpirun(count, command, pass_on=PASSED_ON) as line:
        return subprocess.run(
            hosts.inside(1, line), capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL, **options
        )


def wait_until(there: Callable[[], bool], seconds: float = START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def results(folder: Path, job: str) -> dict[int, dict[str, Any]]:
    return {int(file.name.split(".")[1]): json.loads(file.read_text()) for file in folder.glob(f"{job}.*.json")}


@needs_mpi
def test_mpirun_on_two_hosts_gives_the_bits_of_one_host(make_hosts: Callable[[int], Any], tmp_path: Path) -> None:
    hosts = make_hosts(2)
    done = run_mpi(hosts, 4, [sys.executable, "-m", "tests.hosts.ranks", "bits", str(tmp_path)], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    there = results(tmp_path, "bits")
    assert [there[rank]["host"] for rank in range(4)] == [hosts.host(1)] * 2 + [hosts.host(2)] * 2
    assert [there[rank]["local"] for rank in range(4)] == [[0, 2], [1, 2]] * 2
    assert {each["launcher"] for each in there.values()} == {"openmpi"}
    here = run_ranks(ranks.bits, 4)
    assert [there[rank]["result"] for rank in range(4)] == here
    assert len(set(here[0])) > 20


@needs_mpi
def test_check_under_mpirun_sees_two_hosts_and_both_paths(make_hosts: Callable[[int], Any], tmp_path: Path) -> None:
    hosts, report = make_hosts(2), tmp_path / "check.json"
    command = [sys.executable, "-m", "ep_comm", "check", "--seconds", "1", "--json", str(report)]
    done = run_mpi(hosts, 4, command, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(report.read_text())
    assert (facts["verdict"], facts["wrong"], facts["auto"]) == ("ok", [], "hierarchical")
    assert facts["hosts"] == [
        {"name": hosts.host(number), "ranks": [2 * number - 2, 2 * number - 1]} for number in (1, 2)
    ]
    assert {each["transport"] for each in facts["correctness"]} == {"collective", "hierarchical"}
    assert "between hosts" in {link["name"] for link in facts["links"]}


# ---- a host is lost -------------------------------------------------------------------------------------------


def end_of_ranks(
    hosts: Any, count: int, folder: Path, fault: Callable[[], None]
) -> tuple[dict[int, dict[str, Any]], list[subprocess.Popen[str]]]:
    """Run steps without a launcher, break something in the middle, and wait for every process to end."""
    command = [sys.executable, "-m", "tests.hosts.ranks", "fault", str(folder)]
    started = hosts.start_ranks(count, command, cwd=ROOT, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    wait_until(lambda: (folder / "started").exists() or any(each.poll() is not None for each in started))
    (folder / "fault").write_text(str(time.time()))
    fault()
    deadline = time.monotonic() + START_SECONDS
    for process in started:
        _, errors = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        assert process.returncode != 0, errors
    return results(folder, "fault"), started


def check_in_time(ended: dict[int, dict[str, Any]]) -> None:
    for each in ended.values():
        assert each["result"]["type"] == "PeerLostError"
        assert each["result"]["seconds"] < ranks.GROUP_TIMEOUT + 10


def test_a_cut_link_in_the_middle_of_a_step_is_named_on_both_sides(
    make_hosts: Callable[[int], Any], tmp_path: Path
) -> None:
    hosts = make_hosts(2)
    ended, _ = end_of_ranks(hosts, 4, tmp_path, lambda: hosts.cut(2))
    assert sorted(ended) == [0, 1, 2, 3]
    check_in_time(ended)
    for rank in (0, 1):
        message = ended[rank]["result"]["message"]
        assert f"no sign of life from ranks 2, 3 on {hosts.host(2)}" in message
        assert "layer 3" in message and "in step " in message
    for rank in (2, 3):
        message = ended[rank]["result"]["message"]
        assert f"the store of the job at {hosts.address(1)}:{script.PORT} does not answer" in message
        assert f"rank {rank} " in message and "layer 3" in message


def test_a_killed_host_is_named_by_the_others(make_hosts: Callable[[int], Any], tmp_path: Path) -> None:
    hosts = make_hosts(2)
    ended, _ = end_of_ranks(hosts, 2, tmp_path, lambda: hosts.kill(2))
    assert sorted(ended) == [0]
    check_in_time(ended)
    message = ended[0]["result"]["message"]
    assert f"no sign of life from rank 1 on {hosts.host(2)}" in message and "layer 3" in message


# ---- ep-comm train --------------------------------------------------------------------------------------------

STEPS = 60


def uninterrupted(rank: int, world_size: int) -> list[float]:
    options = TrainOptions(**TINY, steps=STEPS, max_bytes=100_000)
    corpus = load_corpus(None, options.sequence_length, options.seed, options.max_bytes)
    run = Trainer(options, init_distributed(), corpus)
    run.train(STEPS)
    run.close()
    return run.history.losses


@needs_mpi
def test_training_goes_on_after_a_killed_host_as_if_nothing_had_happened(
    make_hosts: Callable[[int], Any], tmp_path: Path
) -> None:
    """mpirun loses a host in the middle; torchrun, on a slow link and with a late host, does the rest."""
    saved, report = tmp_path / "run", tmp_path / "run.json"
    train = ["-m", "ep_comm", "train", *TINY_FLAGS, "--steps", str(STEPS), "--max-bytes", "100000"]

    hosts = make_hosts(2)
    command = [sys.executable, *train, "--save", str(saved), "--save-every", "2"]
    with hosts.mpirun(2, command, pass_on=PASSED_ON) as line:
        first = hosts.start(1, line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        wait_until(lambda: (saved / "latest").exists() or first.poll() is not None)
        hosts.kill(2)
        output, _ = first.communicate(timeout=90)
    assert hosts.host(2) in output, output  # Open MPI 5.0 names the host, but ends with status 0
    wait_until(lambda: not hosts.pids(1), 20)
    assert (saved / "latest").read_text() < f"step_{STEPS:06d}", "the fault came too late to mean anything"

    hosts = make_hosts(2)
    said = hosts.slow(2, "20mbit", "1ms")
    assert "rate 20mbit" in said
    command = [*train, "--resume", str(saved), "--json", str(report)]
    second = []
    for number in (1, 2):
        line = hosts.torchrun(number, 2, command)
        second.append(hosts.start(number, line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        time.sleep(2)
    outputs = [each.communicate(timeout=120)[0] for each in second]
    assert [each.returncode for each in second] == [0, 0], outputs
    assert "resumed at step" in outputs[0]
    assert json.loads(report.read_text())["losses"] == run_ranks(uninterrupted, 2)[0]
