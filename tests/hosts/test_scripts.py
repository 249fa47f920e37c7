"""scripts/hosts.py and scripts/soak.py: what they make works, breaks on request, and is gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.test_hosts import MPI, NO_HOSTS, ROOT, load_script, script, wait_until

HOSTS = [sys.executable, str(ROOT / "scripts" / "hosts.py")]
needs_hosts = pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "hosts can be made")
CONNECT = "import socket, sys; print(socket.create_connection((sys.argv[1], 7000), 1).recv(64).decode(), end='')"


def hosts(*words: object, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*HOSTS, *map(str, words)], capture_output=True, text=True, timeout=timeout)


@pytest.fixture
def run_of_two() -> Iterator[str]:
    done = hosts("up", 2)
    assert done.returncode == 0, done.stderr
    name = done.stdout.strip()
    yield name
    hosts("down", "--name", name)
    assert not [space for space in script.namespaces() if space.startswith(name)]


@needs_hosts
@pytest.mark.hosts
def test_hosts_have_names_and_a_network_that_can_be_cut_and_mended(run_of_two: str) -> None:
    def said(number: int, *command: str) -> str:
        return hosts("exec", number, "--name", run_of_two, "--", *command).stdout

    assert run_of_two in hosts("list").stdout.splitlines()
    assert said(2, "cat", "/proc/sys/kernel/hostname") == f"{run_of_two}-2\n"
    assert os.uname().nodename != f"{run_of_two}-2"

    serve = (
        "import os, socket\n"
        "server = socket.create_server(('', 7000))\n"
        "while True:\n"
        "    peer = server.accept()[0]\n"
        "    peer.sendall(os.uname().nodename.encode()); peer.close()\n"
    )
    found = script.Hosts.find(run_of_two)
    server = found.start(2, [sys.executable, "-S", "-c", serve])
    reach = (sys.executable, "-S", "-c", CONNECT, f"{run_of_two}-2")
    wait_until(lambda: said(1, *reach) == f"{run_of_two}-2", 30)
    assert hosts("slow", 2, "--name", run_of_two, "--rate", "50mbit", "--delay", "1ms").stdout.startswith("rate 50mbit")
    assert said(1, *reach) == f"{run_of_two}-2"
    hosts("cut", 2, "--name", run_of_two)
    assert said(1, *reach) == ""
    hosts("mend", 2, "--name", run_of_two)
    wait_until(lambda: said(1, *reach) == f"{run_of_two}-2", 30)
    hosts("kill", 2, "--name", run_of_two)
    assert server.wait(10) == -signal.SIGKILL and found.pids(2) == []


@needs_hosts
@pytest.mark.hosts
def test_a_terminated_run_leaves_nothing() -> None:
    name = f"ep{os.getpid():06d}"
    process = subprocess.Popen([*HOSTS, "run", "-n", "2", "--hosts", "2", "--name", name, "--", "sleep", "60"])
    try:
        wait_until(lambda: f"{name}-2" in script.namespaces() and script.Hosts.find(name).pids(2) != [], 30)
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
        assert not [space for space in script.namespaces() if space.startswith(name)]
    finally:
        script.Hosts(2, name).down()


@needs_hosts
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("up", 17), "must be from 1 to 16, got 17"),
        (("run", "-n", 3, "--hosts", 2, "--", "true"), "must be a multiple of the 2 hosts, got 3"),
        (("cut", 1, "--name", "nobody"), "there are no hosts called nobody-1"),
    ],
)
def test_what_cannot_be_is_one_line(words: tuple[object, ...], message: str) -> None:
    done = hosts(*words)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_soak_sees_what_is_left_behind(tmp_path: Path) -> None:
    soak = load_script("soak")
    mark = f"test{os.getpid()}"
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, soak.MARK: mark})
    wait_until(lambda: soak.marked(mark) == [process.pid], 10)
    start = time.monotonic()
    assert soak.left_behind(mark, 0.3) == [process.pid] and time.monotonic() - start < 5
    assert process.wait(10) == -signal.SIGKILL
    assert soak.left_behind(mark, 0.3) == []


def test_start_one_step_and_exit_leave_nothing() -> None:
    launcher = "hosts" if MPI and not NO_HOSTS else "own"
    soak = [sys.executable, str(ROOT / "scripts" / "soak.py"), "--runs", "1", "--launcher", launcher]
    done = subprocess.run(soak, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == (
        "1 runs: 0 hung, 0 failed; left behind: 0 processes, 0 network namespaces, 0 temporary files"
    )
