"""Start the ranks of an ``ep-comm`` command on this machine when no launcher did."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from .errors import ConfigError

__all__ = ["end_with_launcher", "end_with_parent", "launch_ranks", "usable_cores"]

_PARENT = "EP_COMM_LAUNCHER_PID"
_LAUNCHER_THREAD = "ep_comm launcher"


def usable_cores() -> int:
    """CPU cores this process may use: its affinity, and the quota of its container if there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no cgroup, or "max": no quota
    return cores


def launch_ranks(ranks: int, argv: Sequence[str]) -> int:
    """Run ``python -m ep_comm ARGV`` on ``ranks`` local processes and wait for them.

    The processes meet at a free port of the loopback interface. If one fails the others are ended; Ctrl-C
    and SIGTERM end all of them. Each gets ``OMP_NUM_THREADS = cores / ranks`` unless the variable is set.

    Args:
        ranks: number of processes, at least 1.
        argv: arguments of the ``ep-comm`` program, the command's name first.

    Returns:
        The exit status: 0, that of the first rank that failed, or 128 + the signal's number.

    Raises:
        ConfigError: ``ranks`` is below 1.
    """
    if ranks < 1:
        raise ConfigError(f"ranks must be at least 1, got {ranks}")
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with (
        tempfile.TemporaryDirectory(prefix="ep_comm_") as log_dir,
        _children_environment(ranks),
        _quiet_elastic(),
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",  # the machine's own name need not resolve
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=log_dir),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "ep_comm", *argv)
        except ChildFailedError as error:
            return _exit_status(error)
        except SignalException as error:
            return 128 + int(error.sigval)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
    return 0


def end_with_parent() -> None:
    """Let this rank end if the process that launched it is killed (Linux; elsewhere nothing happens)."""
    parent = os.environ.get(_PARENT)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != int(parent):
        sys.exit(128 + signal.SIGTERM)  # the launcher was gone before the request was made


def end_with_launcher() -> None:
    """Let this rank end once the process that started it is gone.

    Open MPI leaves the ranks of its own host running when it gives up because it has lost another host; they would
    wait for the others until the process group's timeout. A thread looks once a second; a signal on the parent's death
    would depend on which of the parent's threads started this process.
    """
    if any(thread.name == _LAUNCHER_THREAD for thread in threading.enumerate()):
        return
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        with contextlib.suppress(OSError):
            print("ep_comm: the launcher of this rank is gone, so it ends", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=look, name=_LAUNCHER_THREAD, daemon=True).start()


def _exit_status(error: Exception) -> int:
    _, failure = error.get_first_failure()  # type: ignore[attr-defined]
    code = failure.exitcode
    if code < 0:
        print(
            f"ep-comm: rank {failure.local_rank} was ended by signal {signal.Signals(-code).name}",
            file=sys.stderr,
        )
        return 128 - code
    return code or 1


@contextlib.contextmanager
def _children_environment(ranks: int) -> Iterator[None]:
    """What the ranks inherit; put back afterwards, because launch_ranks is also called from tests."""
    package_parent = Path(__file__).resolve().parent.parent
    wanted = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks))),
        _PARENT: str(os.getpid()),
    }
    if package_parent.name not in ("site-packages", "dist-packages"):
        # A source checkout that this process found through sys.path must be found by the ranks as well.
        paths = [str(package_parent), os.environ.get("PYTHONPATH", "")]
        wanted["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    before = {name: os.environ.get(name) for name in (*wanted, "TORCHELASTIC_SIGNALS_TO_HANDLE")}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet_elastic() -> Iterator[None]:
    """A failing rank has said what is wrong; elastic would add a page about process ids."""
    logger = logging.getLogger("torch.distributed.elastic")
    children = [
        logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")
    ]
    levels = [(each, each.level) for each in (logger, *children)]
    for each, _ in levels:
        each.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for each, level in levels:
            each.setLevel(level)
