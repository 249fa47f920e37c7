"""What a training step changes besides gradients, kept so that a discarded step leaves no trace.

The gradients of what the optimizers step are dropped before every attempt, and parameters and optimizer state
change only when a step is committed. So the snapshot holds what else a forward and backward pass touches: module
buffers (router biases, statistics), gradients of other leaves, random number generators, and whatever was
registered.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ConfigError

__all__ = ["SavedState", "StateSnapshot", "rng_state", "set_rng_state"]


_MAX_SHOWN = 60  # letters of a value in a message


@dataclass(frozen=True)
class _Buffer:
    """A buffer's place, the tensor that was there (or None), and its values."""

    module: nn.Module
    name: str
    tensor: Tensor | None
    saved: Tensor | None


@dataclass(frozen=True)
class SavedState:
    """A state to go back to.

    Attributes:
        buffers: of the model.
        gradients: leaves, the tensor that held their gradient, and its values.
        extra: what ``extra_state`` held.
        rng: random number generators.
    """

    buffers: list[_Buffer]
    gradients: list[tuple[Tensor, Tensor | None, Tensor | None]]
    extra: list[Any]
    rng: dict[str, Any]


class StateSnapshot:
    """Takes and restores the state of one model. Any number of states may be kept.

    Args:
        model: its buffers are kept.
        stepped: parameters whose gradients are dropped before every attempt; the gradients of the model's other
            parameters are kept.
        extra_state: tensors, generators, or objects with ``state_dict`` and ``load_state_dict``.

    Raises:
        ConfigError: ``extra_state`` is no iterable, or an entry is something else.
    """

    def __init__(self, model: nn.Module, stepped: Iterable[Tensor] = (), extra_state: Iterable[Any] = ()) -> None:
        self._model = model
        self._stepped = {id(parameter) for parameter in stepped}
        allowed = "tensors, torch.Generators, or objects with state_dict() and load_state_dict()"
        try:
            self._extra = list(extra_state)
        except TypeError as error:
            raise ConfigError(
                f"extra_state must be a list or another iterable of {allowed}, got {_shown(extra_state)}"
            ) from error
        for place, item in enumerate(self._extra):
            if not (isinstance(item, (Tensor, torch.Generator)) or _has_state(item)):
                raise ConfigError(f"extra_state must hold {allowed}, got {_shown(item)} at place {place}")

    @torch.no_grad()
    def take(self, leaves: Iterable[Tensor] = ()) -> SavedState:
        """The present state, with the gradients of ``leaves`` (of the batch, say). No host sync."""
        others = [p for p in self._model.parameters() if id(p) not in self._stepped]
        return SavedState(
            buffers=[
                _Buffer(module, name, buffer, None if buffer is None else buffer.detach().clone())
                for module in self._model.modules()
                for name, buffer in module._buffers.items()
            ],
            gradients=[
                (leaf, leaf.grad, None if leaf.grad is None else leaf.grad.detach().clone())
                for leaf in (*others, *leaves)
            ],
            extra=[_saved(item) for item in self._extra],
            rng=rng_state(),
        )

    @torch.no_grad()
    def restore(self, state: SavedState) -> None:
        """Go back to ``state``."""
        kept = {(id(entry.module), entry.name) for entry in state.buffers}
        for module in self._model.modules():
            for name in [name for name in module._buffers if (id(module), name) not in kept]:
                del module._buffers[name]
        for entry in state.buffers:
            # A step may also have put another tensor into the buffer's place.
            entry.module._buffers[entry.name] = entry.tensor
            if entry.tensor is not None:
                entry.tensor.copy_(entry.saved)
        for leaf, gradient, saved in state.gradients:
            leaf.grad = gradient
            if gradient is not None:
                gradient.copy_(saved)
        for item, saved in zip(self._extra, state.extra, strict=True):
            if isinstance(item, Tensor):
                item.copy_(saved)
            elif isinstance(item, torch.Generator):
                item.set_state(saved)
            else:
                item.load_state_dict(copy.deepcopy(saved))
        set_rng_state(state.rng)


def _has_state(item: Any) -> bool:
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))


def _shown(value: Any) -> str:
    """A value in a message; of what prints at length only the type."""
    text = repr(value)
    kind = type(value).__name__
    return f"{text} of type {kind}" if len(text) <= _MAX_SHOWN and "\n" not in text else f"a value of type {kind}"


def _saved(item: Any) -> Any:
    if isinstance(item, Tensor):
        return item.detach().clone()
    if isinstance(item, torch.Generator):
        return item.get_state()
    return copy.deepcopy(item.state_dict())


def rng_state() -> dict[str, Any]:
    """The state of the generators of torch (CPU and current GPU), Python and, where it is imported, NumPy."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Go back to what :func:`rng_state` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
