"""Every error this package raises on purpose.

All of them derive from :class:`EPError`, so ``except ep_comm.EPError`` catches whatever ep_comm has
to say. Mistakes in arguments or configuration are also :class:`ValueError`. A message names the
argument, the value it got, what is allowed, and the rank that has the problem; where the mistake of
one rank stops all of them, every rank raises the same message.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "BudgetExceededError",
    "ClosedError",
    "ConfigError",
    "EPError",
    "HandleError",
    "PeerLostError",
    "RoutingError",
]


class EPError(RuntimeError):
    """Base class of all errors raised by ep_comm."""


class ConfigError(EPError, ValueError):
    """A field of :class:`ep_comm.EPConfig` is out of range, or ranks disagree on the configuration."""


class ArgumentError(EPError, ValueError):
    """A tensor given to ``dispatch`` or ``combine`` has the wrong shape, dtype, device or size."""


class RoutingError(ArgumentError):
    """``topk_idx`` holds an id outside ``[-1, num_experts)``."""


class HandleError(EPError):
    """A handle is used with a dispatcher that did not make it, or ranks combine different handles."""


class ClosedError(EPError):
    """A dispatcher is used after ``close()``."""


class PeerLostError(EPError):
    """A collective failed: a rank died, or did not arrive within the process group's timeout."""


class BudgetExceededError(EPError):
    """Routing needs more rows than ``max_budget_rows`` (or than free memory) allows.

    Attributes:
        layer: name of the dispatcher (the module's path in the model where the runner knows it).
        rank: rank in the dispatcher's group that needs the rows.
        required_rows: rows this step needs there, padding included.
        allowed_rows: the ceiling in force.
    """

    def __init__(self, message: str, *, layer: str, rank: int, required_rows: int, allowed_rows: int) -> None:
        super().__init__(message)
        self.layer = layer
        self.rank = rank
        self.required_rows = required_rows
        self.allowed_rows = allowed_rows
