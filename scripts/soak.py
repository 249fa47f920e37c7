#!/usr/bin/env python3
"""Start a job, do one step, end it; again and again. Counts hangs, failures, and what is left behind.

    scripts/soak.py --runs 100                      every way to start that works here, in turn
    scripts/soak.py --runs 20 --launcher torchrun

A run hangs if it does not end within --timeout seconds. Left behind is a process that a run started and that is still
there after it (found by a variable in its environment), a network namespace, or an entry of the folder for temporary
files. Exit status 0 if nothing of that happened.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import hosts as hosts_script  # beside this file

ROOT = Path(__file__).resolve().parents[1]
MARK = "EP_COMM_SOAK"
TRAIN = (
    "-m ep_comm train --steps 1 --hidden-size 32 --layers 1 --heads 2 --ffn-size 32 --sequence-length 16 "
    "--batch-size 2 --experts 4 --validation-batches 0 --max-bytes 50000 --device cpu"
).split()
# A cache that is meant to stay, and the logs of torchrun.
PYTORCHS_OWN = ("torchinductor_", "torchelastic_")
PASSED_ON = ("PATH", "PYTHONPATH", "OMP_NUM_THREADS", "PYTHONFAULTHANDLER", "TMPDIR", MARK)


def launchers() -> dict[str, str]:
    """Every way to start two ranks; the value says why it cannot be used here, if so."""
    program = shutil.which("mpirun", path=_path())
    no_mpi = "" if program and importlib.util.find_spec("mpi4py") else "needs mpirun and mpi4py"
    no_hosts = "needs an mpirun in a folder without spaces" if " " in (program or "") else hosts_script.why_not()
    return {"own": "", "torchrun": "", "mpirun": no_mpi, "hosts": no_mpi or no_hosts}


def run_once(launcher: str, environment: dict[str, str], timeout: float) -> tuple[int | None, str, list[str]]:
    """One job; its exit status, None if it hung, its output, and the network namespaces that it left."""
    if launcher == "hosts":
        with hosts_script.Hosts(2) as hosts, hosts.mpirun(2, [sys.executable, *TRAIN], pass_on=PASSED_ON) as line:
            done = _wait(hosts.inside(1, line), environment, timeout)
        return *done, [space for space in hosts_script.namespaces() if space.startswith(hosts.name)]
    program = [sys.executable, *TRAIN]
    if launcher == "own":
        command = [*program, "--ranks", "2"]
    elif launcher == "torchrun":
        command = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2".split(), *TRAIN]
    else:
        mpirun = shutil.which("mpirun", path=_path())
        command = [str(mpirun), *"--allow-run-as-root --oversubscribe -n 2".split(), *program]
    return *_wait(command, environment, timeout), []


def _path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def _wait(command: list[str], environment: dict[str, str], timeout: float) -> tuple[int | None, str]:
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            status: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
            for pid in marked(environment[MARK]):
                _send(pid, signal.SIGABRT)  # Python writes where every thread stands
            time.sleep(1.0)
            process.kill()
            process.wait()
        output.seek(0)
        return status, output.read()


@dataclass
class Count:
    """What went wrong so far."""

    hung: int = 0
    failed: int = 0
    processes: int = 0
    namespaces: int = 0
    files: int = 0

    def run(self, launcher: str, timeout: float) -> str:
        """One run, counted; what went wrong with it, if anything did."""
        mark = secrets.token_hex(8)
        with tempfile.TemporaryDirectory(prefix="soak_") as folder:
            environment = {
                **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",
                "PYTHONFAULTHANDLER": "1", "TMPDIR": folder, MARK: mark,
            }  # fmt: skip
            status, output, spaces = run_once(launcher, environment, timeout)
            pids = left_behind(mark)
            left = [name for name in os.listdir(folder) if not name.startswith(PYTORCHS_OWN)]
        self.hung += status is None
        self.failed += bool(status)
        self.processes += len(pids)
        self.namespaces += len(spaces)
        self.files += len(left)
        if status == 0 and not (pids or spaces or left):
            return ""
        return f"{'hung' if status is None else f'status {status}'}; left {pids} {spaces} {left}\n{output}"

    def __str__(self) -> str:
        return (
            f"{self.hung} hung, {self.failed} failed; left behind: {self.processes} processes, {self.namespaces} "
            f"network namespaces, {self.files} temporary files"
        )


def marked(mark: str) -> list[int]:
    """Processes that carry the mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # gone, or somebody else's
    return found


def left_behind(mark: str, seconds: float = 5.0) -> list[int]:
    """Marked processes that are still there after a while; they are ended."""
    deadline = time.monotonic() + seconds
    while (pids := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in pids:
        _send(pid, signal.SIGKILL)
    return pids


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def main() -> int:
    """The program; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--launcher", choices=["all", *launchers()], default="all")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds after which a run counts as hung")
    options = parser.parse_args()
    reasons = launchers()
    for name, reason in reasons.items():
        if reason:
            print(f"not used: {name}: {reason}")
    chosen = [name for name, reason in reasons.items() if not reason and options.launcher in ("all", name)]
    if not chosen:
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that hosts are removed
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    count = Count()
    for number, launcher in zip(range(1, options.runs + 1), itertools.cycle(chosen), strict=False):
        start = time.monotonic()
        story = count.run(launcher, options.timeout)
        seconds[launcher].append(time.monotonic() - start)
        if story:
            print(f"run {number} ({launcher}): {story}", flush=True)
        if number % 10 == 0:
            print(f"{number} runs: {count}", flush=True)
    for name, each in seconds.items():
        if each:
            times = f"{min(each):.1f} least, {statistics.median(each):.1f} median, {max(each):.1f} most"
            print(f"{name:9} {len(each):4} runs, seconds: {times}")
    print(f"{sum(map(len, seconds.values()))} runs: {count}")
    return int(count != Count())


if __name__ == "__main__":
    sys.exit(main())
