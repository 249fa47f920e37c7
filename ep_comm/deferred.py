"""Steps that are launched before the verdicts of the steps in front of them are known.

A step whose verdict is bad changes no parameter and no optimizer state, and closes a latch on the device, so that
the steps launched behind it change none either. The host learns of it a fixed number of steps later: fixed, not
"when the verdict happens to be there", because all ranks must turn back at the same step. For the same reason it
does not matter whether a step ran as a CUDA graph, which ranks may find out differently. What turns back is what
the host keeps here for every launched step: the batch, the state in front of it, and the settings of the
optimizers, which a scheduler may have changed since.
"""

from __future__ import annotations

import enum
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

__all__ = ["LAG", "SETTLED_FIRST", "Latch", "PendingStep", "Refusal", "check_batch"]

LAG = 2
"""Launched steps whose verdict may be open. With two, the GPU has one step in front of it while the host waits."""

SETTLED_FIRST = 2
"""Steps of a runner that are checked at once: in the first one optimizers make their state."""

_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size)


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

    @torch.no_grad()
    def deliver(self, result: Any) -> str | None:
        """Put the right values into the result that the caller was given.

        Returns:
            What cannot be put right, or None.
        """
        (given, spec), (right, other) = tree_flatten(self.launched.result), tree_flatten(result)
        if spec != other:
            return "the result has another structure"
        problem = None
        for number, (old, new) in enumerate(zip(given, right, strict=True)):
            if not isinstance(old, Tensor):
                continue
            if not isinstance(new, Tensor) or old.shape != new.shape or old.dtype != new.dtype:
                problem = f"tensor {number} of the result has another shape or dtype"
                continue
            try:
                old.copy_(new)
            except RuntimeError as error:  # an expanded tensor, say
                problem = f"tensor {number} of the result cannot be written to: {error}"
        return problem


def check_batch(batch: Any) -> None:
    """A step must be able to run again later, on the same batch.

    Raises:
        ArgumentError: a tensor of the batch requires a gradient, or something in it cannot be kept.
    """
    for number, leaf in enumerate(tree_flatten(batch)[0]):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                raise ArgumentError(
                    f"batch: tensor {number} of it, of shape {list(leaf.shape)}, requires a gradient, which "
                    f"check='deferred' cannot give; use check='every_step', or detach it"
                )
        elif not isinstance(leaf, _IMMUTABLE) and type(leaf).__module__ != "numpy":
            raise ArgumentError(
                f"batch: entry {number} of it is of type {type(leaf).__name__}, which check='deferred' cannot keep for "
                f"running the step again; make it of tensors, NumPy arrays, plain values and containers"
            )


class Refusal:
    """A hook that makes reading or loading states an error while verdicts are open.

    An error rather than a flush: it may be called on one rank only, and a step can only be replayed on all.
    """

    def __init__(self, num_pending: Callable[[], int]) -> None:
        self._num_pending = num_pending

    def __call__(self, *_: Any) -> None:
        count = self._num_pending()
        if count:
            raise EPError(
                f"state_dict() or load_state_dict() while the verdicts of {count} steps are open (check='deferred'): "
                f"call flush() of the StepRunner on every rank first"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # A saved model carries its hooks: there they do nothing.
        return (Refusal, (int,))

    def register(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> list[Any]:
        """Put it in front of everything that reads or loads states of these.

        Returns:
            The handles to take it away with.
        """
        handles = []
        for module in model.modules():  # of a wrapped model only the inner one may be saved
            handles.append(module.register_state_dict_pre_hook(self))
            handles.append(module.register_load_state_dict_pre_hook(self))
        for optimizer in optimizers:
            handles.append(optimizer.register_state_dict_pre_hook(self))
            handles.append(optimizer.register_load_state_dict_pre_hook(self))
        return handles
