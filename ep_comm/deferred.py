"""Steps that are launched before the verdicts of the steps in front of them are known.

A captured step whose verdict is bad changes no parameter and no optimizer state, and closes a latch on the device, so
that the steps launched behind it change none either. The host learns of it a fixed number of steps later:
fixed, not "when the verdict happens to be there", because all ranks must turn back at the same step. What turns
back is what the host keeps here for every launched step: the batch, the state in front of it, and the settings of
the optimizers, which a scheduler may have changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from .capture import LaunchedStep
from .errors import EPError
from .snapshot import SavedState

__all__ = ["LAG", "OptimizerSettings", "PendingStep", "refuse_state_dict"]

LAG = 2
"""Launched steps whose verdict may be open. With two, the GPU has one step in front of it while the host waits."""


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


class OptimizerSettings:
    """Learning rates and whatever else stands beside the parameters in the optimizers' groups, as it is now."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._values = [
            {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in group.items()
                if name != "params"
            }
            for group in _groups(optimizers)
        ]

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Within the block the optimizers have these settings; afterwards the present ones again."""
        present = OptimizerSettings(self._optimizers)
        self._put()
        try:
            yield
        finally:
            present._put()

    @torch.no_grad()
    def _put(self) -> None:
        for group, values in zip(_groups(self._optimizers), self._values, strict=True):
            for name, value in values.items():
                if isinstance(value, Tensor):
                    group[name].copy_(value)  # graphs read this very tensor
                else:
                    group[name] = value


def _groups(optimizers: list[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


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
