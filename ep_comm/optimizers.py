"""Optimizers as a step needs them: steps skipped on the device's own word, and settings that come back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["OptimizerSettings", "optimizers_can_be_captured", "optimizers_can_skip", "step_unless"]


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
