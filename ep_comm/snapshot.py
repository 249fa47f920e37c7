"""What a training step changes besides gradients, kept so that a discarded step leaves no trace.

Gradients are zeroed before every attempt and parameters and optimizer state change only when a step is
committed, so the snapshot holds what a forward and backward pass itself touches: module buffers (router
biases, statistics), random number generators, and whatever else was registered.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["StateSnapshot"]


class StateSnapshot:
    """Takes and restores the state of one model.

    Args:
        model: its buffers are kept.
        extra_state: tensors, or objects with ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, model: nn.Module, extra_state: Iterable[Any] = ()) -> None:
        self._model = model
        self._extra = list(extra_state)
        for item in self._extra:
            if not (isinstance(item, Tensor) or hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise TypeError(
                    "extra_state: every entry must be a tensor or have state_dict() and load_state_dict(), got "
                    f"{type(item).__name__}"
                )
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        self._saved_extra: list[Any] = []
        self._rng: dict[str, Any] = {}

    @torch.no_grad()
    def take(self) -> None:
        """Remember the present state."""
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in self._model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._saved_extra = [
            item.detach().clone() if isinstance(item, Tensor) else copy.deepcopy(item.state_dict())
            for item in self._extra
        ]
        self._rng = _rng_state()

    @torch.no_grad()
    def restore(self) -> None:
        """Go back to the state that was taken last."""
        for module, name, buffer, saved in self._buffers:
            # A step may also have put another tensor into the buffer's place.
            module._buffers[name] = buffer
            buffer.copy_(saved)
        for item, saved in zip(self._extra, self._saved_extra, strict=True):
            if isinstance(item, Tensor):
                item.copy_(saved)
            else:
                item.load_state_dict(copy.deepcopy(saved))
        _set_rng_state(self._rng)


def _rng_state() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
