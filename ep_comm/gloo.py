"""How a process that used gloo ends without being aborted by PyTorch.

Gloo's threads live as long as anything refers to the process group, and let go of the tensors of the last collective a
moment after it is done. For that they need Python's lock; if the interpreter ends just then, PyTorch 2.13 calls
``std::terminate``: "terminate called without an active exception", in about one run of fifty on a busy machine.

A forked child has a copy of the group but none of its threads. When its interpreter ends and takes the group down, gloo
waits for them for ever, or crashes; so a child never takes down what is its parent's.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

__all__ = ["end_well_with", "leave_to_parent", "let_gloo_finish"]

_MOST_SECONDS = 1.0
_forks_are_seen = False


def end_well_with(group: dist.ProcessGroup | None) -> None:
    """See to it that the interpreter ends only after gloo's threads have finished, if ``group`` has any."""
    if group is not None and "gloo" in dist.get_backend_config(group):
        leave_to_parent()
        atexit.unregister(_let_gloo_finish_here)  # once, and before everything that was registered until now
        atexit.register(_let_gloo_finish_here, os.getpid())


def leave_to_parent() -> None:
    """See to it that children forked from now on do not take down the process groups of this process."""
    global _forks_are_seen
    if not _forks_are_seen and hasattr(os, "register_at_fork"):
        _forks_are_seen = True
        os.register_at_fork(after_in_child=_keep_groups)


def _keep_groups() -> None:
    # One reference more than will ever be given back.
    with suppress(AttributeError):  # private to PyTorch
        for group in list(dist.distributed_c10d._world.pg_map):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def let_gloo_finish() -> None:
    """Wait until gloo's threads have nothing in their hands any more. Sleeping gives them Python's lock."""
    idle, deadline = 0, time.monotonic() + _MOST_SECONDS
    while idle < 2 and time.monotonic() < deadline:
        time.sleep(0.002)
        idle = 0 if any(state == "R" for state in _thread_states()) else idle + 1


def _let_gloo_finish_here(pid: int) -> None:
    if os.getpid() == pid:  # a forked child has none of its parent's threads
        let_gloo_finish()


def _thread_states() -> Iterator[str]:
    """The state of each of gloo's threads as Linux has it: R is running or about to. None elsewhere."""
    for entry in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # it has ended
            name, _, rest = entry.read_text().partition("(")[2].rpartition(")")
            if name == "pt_gloo_runloop":
                yield rest.split()[0]
