"""A training step as one CUDA graph: when to capture, what is captured, and how it is fed.

A captured step holds forward, backward, gradient reduction, the agreed verdict and, where the optimizers can
be told on the device to skip, the optimizer step. Graphs are kept by signature: the structure, shapes and
dtypes of the batch, and the budgets in force. A batch of another shape is another signature, so that a graph
is never fed what it was not captured for.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from .attempt import LaunchedStep, copied, detached
from .deferred import Latch
from .errors import EPError
from .ledger import StepLedger
from .optimizers import OptimizerSettings, optimizers_can_be_captured, optimizers_can_skip, step_unless
from .unblock import on_break

__all__ = ["CapturedStep", "GraphCache", "release_graphs"]

log = logging.getLogger("ep_comm")

# Steps of a signature that run uncaptured first: lazy initialisation, and the optimizer's state, must not
# end up inside a graph.
_WARM_UP = 2
_MAX_SIGNATURES = 1000


@dataclass
class CapturedStep:
    """One graph with its static inputs and outputs.

    Attributes:
        batch: the static batch, which the graph reads.
        result: the static result, which the graph writes.
        words: the static verdict words.
        ledger: the dispatchers whose records the verdict words hold.
        updates: the optimizer step is inside the graph, and is skipped on the device on a bad verdict.
    """

    graph: torch.cuda.CUDAGraph
    batch: Any
    result: Any
    words: Tensor
    ledger: StepLedger
    gradients: list[tuple[torch.nn.Parameter, Tensor | None]]
    updates: bool

    def launch(self, batch: Any, *, keep_batch: bool = False) -> LaunchedStep:
        """Copy the batch in and replay. Does not wait.

        Args:
            batch: of the structure and shapes that were captured.
            keep_batch: copy the batch on the device, so that it can run again later. From pinned host memory the
                copy is not waited for.
        """
        for static, given in zip(_tensors(self.batch), _tensors(batch), strict=True):
            static.copy_(given, non_blocking=True)
        kept = copied(self.batch) if keep_batch else batch
        self.graph.replay()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        return LaunchedStep.of(
            kept, detached(self.result), self.ledger, self.words, captured=True, updated=self.updates
        )


class GraphCache:
    """Decides when a step is captured and keeps the graphs.

    Args:
        step_fn: the user's step.
        optimizers: stepped inside the graph where they can skip.
        zero_grad: drops all gradients.
        required: ``capture="always"``: raise where a step cannot be captured, instead of going on without.
        latch: decides on the device whether a step inside a graph updates.
        max_graphs: the least recently used graph is dropped beyond this.
    """

    def __init__(
        self,
        step_fn: Callable[[Any], Any],
        optimizers: list[torch.optim.Optimizer],
        zero_grad: Callable[[], None],
        latch: Latch,
        *,
        required: bool,
        max_graphs: int = 8,
    ) -> None:
        self._step_fn = step_fn
        self._optimizers = optimizers
        self._zero_grad = zero_grad
        self._required = required
        self._max_graphs = max_graphs
        self._graphs: OrderedDict[Hashable, CapturedStep] = OrderedDict()
        self._seen: dict[Hashable, int] = {}
        self._pool: Any = None
        self._given_up = False
        self._numbers: list[dict[str, Any]] | None = None
        self._numbers_change = False
        self._latch = latch
        self.stream = torch.cuda.Stream()
        """Steps run on it, captured or not: autograd remembers the stream on which a gradient is accumulated,
        and a capture must not meet another one."""
        self.captures = 0
        """Graphs captured so far."""
        self.replays = 0
        """Graph launches so far."""
        _caches.add(self)
        on_break(self)

    def launch(self, captured: CapturedStep, batch: Any, *, keep_batch: bool = False) -> LaunchedStep:
        """:meth:`CapturedStep.launch`, counted."""
        self.replays += 1
        return captured.launch(batch, keep_batch=keep_batch)

    def clear(self) -> None:
        """Drop all graphs, after what runs has finished. NCCL cannot be shut down while one holds its kernels."""
        if self._graphs:
            torch.cuda.synchronize()
        for captured in self._graphs.values():
            captured.graph.reset()
        self._graphs.clear()

    def stop_waiting(self) -> None:
        """Let go of the graphs, running ones too: NCCL's abort waits until nothing holds its kernels."""
        self._given_up = True
        while self._graphs:
            self._graphs.popitem()[1].graph.reset()

    def note_committed(self, batch: Any) -> None:
        """Count a step towards the warm-up of its batch signature, now that the optimizers have their state."""
        key = _batch_signature(batch)
        if len(self._seen) >= _MAX_SIGNATURES:
            self._seen.clear()  # a batch that holds the step's number, say, never repeats
        self._seen[key] = self._seen.get(key, 0) + 1

    def find(self, batch: Any, ledger: StepLedger | None, group: dist.ProcessGroup | None) -> CapturedStep | None:
        """The graph for this batch under the present budgets, captured now if it is time; else None.

        Args:
            ledger: of the latest uncaptured attempt: the dispatchers that take part.
            group: over which the verdict must be agreed, or None.
        """
        if self._given_up or ledger is None:
            return None
        if ledger.eager:
            return self._give_up(EPError("a dispatcher in eager mode takes part; use mode='static' everywhere"))
        if not ledger.dispatchers:
            return self._give_up(EPError("no dispatcher takes part in it on this rank"))
        batch_key = _batch_signature(batch)
        updates = self._can_update()
        key = (batch_key, tuple((d.ordinal, d.budget_rows, d.pair_rows) for d in ledger.dispatchers), updates)
        captured = self._graphs.get(key)
        if captured is None:
            if self._seen.get(batch_key, 0) < _WARM_UP:
                return None
            for dispatcher in ledger.dispatchers:
                dispatcher.prepare_capture()
            settings = OptimizerSettings(self._optimizers)
            try:
                captured = self._capture(batch, group, updates)
            except Exception as error:
                return self._give_up(error)
            if settings.forget_later_state():
                # Some parameter has its first gradient in this step: its state would be made anew in every launch.
                captured.graph.reset()
                return None
            self._graphs[key] = captured
            if len(self._graphs) > self._max_graphs:
                torch.cuda.synchronize()  # it may have been launched and not finished
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return captured

    def _can_update(self) -> bool:
        """Whether the optimizer step belongs into the graph, which would keep plain numbers for ever.

        Not any more once a scheduler has changed one, a learning rate that is no tensor, say.
        """
        numbers = [
            {name: value for name, value in settings.items() if isinstance(value, (bool, int, float, tuple))}
            for optimizer in self._optimizers
            for settings in optimizer.param_groups
        ]
        if self._numbers is not None and numbers != self._numbers:
            self._numbers_change = True
        self._numbers = numbers
        return (
            not self._numbers_change
            and optimizers_can_skip(self._optimizers)
            and optimizers_can_be_captured(self._optimizers)
        )

    def _capture(self, batch: Any, group: dist.ProcessGroup | None, updates: bool) -> CapturedStep:
        leaves, spec = tree_flatten(batch)
        device = torch.device("cuda", torch.cuda.current_device())
        static = [
            torch.empty_like(leaf, device=device).copy_(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        self._zero_grad()
        graph = torch.cuda.CUDAGraph()
        ledger = StepLedger(exact=False)
        with torch.cuda.graph(graph, pool=self._pool, stream=self.stream):
            with ledger.open():
                result = self._step_fn(tree_unflatten(static, spec))
            words = ledger.device_words(group)
            if updates:
                step_unless(self._optimizers, self._latch.skip(words))
        self.captures += 1
        log.info("captured a training step in a CUDA graph (%d so far)", self.captures)
        parameters = [p for o in self._optimizers for g in o.param_groups for p in g["params"]]
        return CapturedStep(
            graph=graph,
            batch=tree_unflatten(static, spec),
            result=result,
            words=words,
            ledger=ledger,
            gradients=[(parameter, parameter.grad) for parameter in parameters],
            updates=updates,
        )

    def _give_up(self, error: Exception) -> None:
        if self._required:
            raise EPError(f"capture='always': the step cannot be captured in a CUDA graph: {error}") from error
        self._given_up = True
        log.warning("training goes on without CUDA graphs: the step cannot be captured: %s", error)


_caches: WeakSet[GraphCache] = WeakSet()


def release_graphs() -> None:
    """Drop the graphs of all runners; before a process group is destroyed."""
    for cache in list(_caches):
        cache.clear()


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]


def _batch_signature(batch: Any) -> Hashable:
    """Structure, shapes and dtypes; values of what is not a tensor, as a graph would keep them for ever."""
    leaves, spec = tree_flatten(batch)
    return (
        str(spec),
        tuple(
            (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else repr(leaf)
            for leaf in leaves
        ),
    )
