"""Optimizers as a step needs them: steps skipped on the device's own word, and settings that come back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from .errors import ConfigError, EPError
from .ledger import current_ledger

__all__ = ["OptimizerSettings", "as_optimizers", "optimizers_can_be_captured", "optimizers_can_skip", "step_unless"]


_guarded: WeakSet[torch.optim.Optimizer] = WeakSet()


def as_optimizers(given: Any) -> list[torch.optim.Optimizer]:
    """One optimizer or several as a list; from now on they refuse to step while a step function runs.

    Raises:
        ConfigError: it is something else.
    """
    optimizers = [given] if isinstance(given, torch.optim.Optimizer) else list(given or [])
    if not optimizers or not all(isinstance(entry, torch.optim.Optimizer) for entry in optimizers):
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer or several of them, got {given!r}")
    for optimizer in optimizers:
        if optimizer not in _guarded:
            _guarded.add(optimizer)
            optimizer.register_step_pre_hook(_no_step_inside)
    return optimizers


def _no_step_inside(*_: Any) -> None:
    if current_ledger() is not None:
        raise EPError(
            "optimizer.step() was called inside step_fn: the StepRunner calls it, once the ranks have agreed that the "
            "step is good"
        )


def optimizers_can_skip(optimizers: list[torch.optim.Optimizer]) -> bool:
    """Whether every optimizer skips its step on a device-side flag (``found_inf``)."""
    return all(
        getattr(optimizer, "_step_supports_amp_scaling", False)
        and all(group.get("fused") for group in optimizer.param_groups)
        for optimizer in optimizers
    )


def optimizers_can_be_captured(optimizers: list[torch.optim.Optimizer]) -> bool:
    """Whether every optimizer's step may stand in a CUDA graph."""
    return all(group.get("capturable", True) for group in _groups(optimizers))


def step_unless(optimizers: list[torch.optim.Optimizer], skip: Tensor) -> None:
    """``optimizer.step()`` that leaves parameters and state alone where ``skip`` (fp32, no dimensions) is 1."""
    for optimizer in optimizers:
        optimizer.grad_scale, optimizer.found_inf = None, skip
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf


class OptimizerSettings:
    """What stands beside the parameters in the optimizers, as it is now: groups, learning rates and so on; and which
    parameters have a state."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._groups = [list(optimizer.param_groups) for optimizer in optimizers]
        # A tensor is kept as itself and its value: graphs read this very tensor.
        self._values = [
            {
                name: (value, value.clone() if isinstance(value, Tensor) else None)
                for name, value in group.items()
                if name != "params"
            }
            for group in _groups(optimizers)
        ]
        self._stateful = [set(optimizer.state) for optimizer in optimizers]

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Within the block the optimizers have these settings; afterwards the present ones again."""
        present = OptimizerSettings(self._optimizers)
        self._put()
        try:
            yield
        finally:
            present._put()

    def forget_later_state(self) -> bool:
        """Drop the state of parameters that have got theirs since; whether there was any.

        A skipped step makes state, too: SGD's momentum is then uninitialised memory, and counts as the first one.
        """
        found = False
        for optimizer, stateful in zip(self._optimizers, self._stateful, strict=True):
            for parameter in [parameter for parameter in optimizer.state if parameter not in stateful]:
                del optimizer.state[parameter]
                found = True
        return found

    @torch.no_grad()
    def _put(self) -> None:
        for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
            optimizer.param_groups[:] = groups
        for group, values in zip(_groups(self._optimizers), self._values, strict=True):
            for name, (value, kept) in values.items():
                if kept is not None:
                    value.copy_(kept)
                group[name] = value


def _groups(optimizers: list[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]
