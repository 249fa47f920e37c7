"""An attempt at a step that has been launched: its verdict may still be on the way to the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .ledger import StepLedger, Verdict

__all__ = ["LaunchedStep", "copied", "detached"]


@dataclass(frozen=True)
class LaunchedStep:
    """One run of ``step_fn``, as a graph or not, finished or not.

    Attributes:
        batch: what it ran on; a copy where it may have to run again later.
        result: what ``step_fn`` returned; right once the verdict says so.
        ledger: the dispatchers that took part.
        words: their verdict on the device, for the latch.
        captured: it ran as a CUDA graph.
        updated: the optimizers have been told to step, on the device, if the verdict is good.
    """

    batch: Any
    result: Any
    ledger: StepLedger
    words: Tensor
    captured: bool
    updated: bool
    _host_words: Tensor
    _event: torch.cuda.Event | None

    @classmethod
    def of(
        cls,
        batch: Any,
        result: Any,
        ledger: StepLedger,
        words: Tensor,
        *,
        captured: bool = False,
        updated: bool = False,
    ) -> LaunchedStep:
        """Send the verdict words on their way to the host, without waiting."""
        host_words, event = words, None
        if words.is_cuda:
            # Pinned memory comes from a cache that waits for the copy before it hands the same bytes out again.
            host_words = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
            host_words.copy_(words, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return cls(batch, result, ledger, words, captured, updated, host_words, event)

    def verdict(self) -> Verdict:
        """Wait until the verdict has arrived: one small read.

        Raises:
            PeerLostError: a kernel gave up waiting for a peer.
        """
        if self._event is not None:
            self._event.synchronize()
        return self.ledger.parse(self._host_words.tolist())


def copied(tree: Any) -> Any:
    """The same structure with copies of its tensors and NumPy arrays.

    Tensors that require a gradient stay themselves, because the gradient belongs to them.
    """
    return tree_map(_copied_leaf, tree)


def _copied_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        if leaf.requires_grad:
            return leaf
        if leaf.device.type == "cpu" and torch.cuda.is_available() and leaf.is_pinned():
            return torch.empty_like(leaf, pin_memory=True).copy_(leaf)
        return leaf.detach().clone()
    return leaf.copy() if type(leaf).__module__ == "numpy" and hasattr(leaf, "copy") else leaf


def detached(tree: Any) -> Any:
    """The same structure with copies of its tensors that no gradient flows to."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)
