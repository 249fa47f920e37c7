"""How a process that used gloo ends without being aborted by PyTorch.

Gloo's threads live as long as anything refers to the process group, and let go of the tensors of the last collective a
moment after it is done. For that they need Python's lock; if the interpreter ends just then, PyTorch 2.13 calls
``std::terminate``: "terminate called without an active exception", in about one run of fifty on a busy machine.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

__all__ = ["end_well_with", "let_gloo_finish"]

_MOST_SECONDS = 1.0


def end_well_with(group: dist.ProcessGroup | None) -> None:
    """See to it that the interpreter ends only after gloo's threads have finished, if ``group`` has any."""
    if group is not None and "gloo" in dist.get_backend_config(group):
        atexit.unregister(let_gloo_finish)  # once, and before everything that was registered until now
        atexit.register(let_gloo_finish)


def let_gloo_finish() -> None:
    """Wait until gloo's threads have nothing in their hands any more. Sleeping gives them Python's lock."""
    idle, deadline = 0, time.monotonic() + _MOST_SECONDS
    while idle < 2 and time.monotonic() < deadline:
        time.sleep(0.002)
        idle = 0 if any(state == "R" for state in _thread_states()) else idle + 1


def _thread_states() -> Iterator[str]:
    """The state of each of gloo's threads as Linux has it: R is running or about to. None elsewhere."""
    for entry in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # it has ended
            name, _, rest = entry.read_text().partition("(")[2].rpartition(")")
            if name == "pt_gloo_runloop":
                yield rest.split()[0]
