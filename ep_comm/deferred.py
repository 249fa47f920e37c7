"""Steps that are launched before the verdicts of the steps in front of them are known.

A step whose verdict is bad changes no parameter and no optimizer state, and closes a latch on the device, so that
the steps launched behind it change none either. The host learns of it a fixed number of steps later: fixed, not
"when the verdict happens to be there", because all ranks must turn back at the same step. For the same reason it
does not matter whether a step ran as a CUDA graph, which ranks may find out differently. What turns back is what
the host keeps here for every launched step: the batch, the state in front of it, and the settings of the
optimizers, which a scheduler may have changed since.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from .attempt import LaunchedStep
from .errors import ArgumentError, EPError
from .optimizers import OptimizerSettings
from .snapshot import SavedState

__all__ = ["LAG", "SETTLED_FIRST", "Latch", "PendingStep", "refuse_gradients", "refuse_state_dict"]

LAG = 2
"""Launched steps whose verdict may be open. With two, the GPU has one step in front of it while the host waits."""

SETTLED_FIRST = 2
"""Steps of a runner that are checked at once: optimizers make their state in the first step, and SGD's momentum is
garbage after a first step that was skipped."""


class Latch:
    """Whether steps may update, as one number on the device.

    Args:
        latching: a bad verdict keeps it closed for the steps launched behind; otherwise every step counts by itself.
    """

    def __init__(self, *, latching: bool) -> None:
        self._latching = latching
        self._closed: Tensor | None = None

    def place(self, device: torch.device) -> None:
        """Make it, on the device of the verdicts, open. Before anything is captured: graphs keep its address."""
        if self._latching and self._closed is None:
            self._closed = torch.zeros((), device=device)

    def skip(self, words: Tensor) -> Tensor:
        """Close it where the verdict ``words`` are bad. No host sync; may stand in a graph.

        Returns:
            fp32 without dimensions: 1 where the step must not update.
        """
        bad = (words[:2].amax() > 0).to(torch.float32)
        return bad if self._closed is None else self._closed.copy_(torch.maximum(self._closed, bad))

    def open(self) -> None:
        """Let the steps launched from now on update again."""
        if self._closed is not None:
            self._closed.zero_()


@dataclass(frozen=True)
class PendingStep:
    """A launched step whose verdict is open.

    Attributes:
        launched: with the batch and the result.
        before: the state in front of the step.
        settings: of the optimizers at its launch.
    """

    launched: LaunchedStep
    before: SavedState
    settings: OptimizerSettings

    def deliver(self, result: Any) -> None:
        """Put the right values into the result that the caller was given."""
        given, right = tree_flatten(self.launched.result)[0], tree_flatten(result)[0]
        for old, new in zip(given, right, strict=True):
            if isinstance(old, Tensor):
                with torch.no_grad():
                    old.copy_(new)


def refuse_gradients(batch: Any) -> None:
    """A batch that wants gradients cannot be run again later: they may have been used by then.

    Raises:
        ArgumentError: a tensor of the batch requires a gradient.
    """
    for number, leaf in enumerate(tree_flatten(batch)[0]):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise ArgumentError(
                f"batch: tensor {number} of it, of shape {list(leaf.shape)}, requires a gradient, which "
                f"check='deferred' cannot give; use check='every_step', or detach it"
            )


def refuse_state_dict(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], num_pending: Callable[[], int]
) -> None:
    """Make ``state_dict()`` of model and optimizers an error while verdicts are open.

    An error rather than a flush: it may be called on one rank only, and a step can only be replayed on all.
    """

    def refuse(*_: Any) -> None:
        count = num_pending()
        if count:
            raise EPError(
                f"state_dict() while the verdicts of {count} steps are open (check='deferred'): call flush() of the "
                f"StepRunner on every rank first"
            )

    for module in model.modules():  # of a wrapped model only the inner one may be saved
        module.register_state_dict_pre_hook(refuse)
    for optimizer in optimizers:
        optimizer.register_state_dict_pre_hook(refuse)
