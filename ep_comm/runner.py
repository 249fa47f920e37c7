"""StepRunner: a training step as a transaction.

    attempt ──▶ verdict ──▶ fits ─────────────▶ optimizer.step(), committed
                   │
                   └──────▶ does not fit ─▶ roll back ─▶ replay with exact buffers ─▶ grow budgets ─▶ committed

At most one replay a step. What a layer needs depends on the outputs of the layers before it, so after an
overflow the demand of deeper layers is not yet known; a replay sized by it could overflow again. The replay
therefore sizes every buffer exactly, as eager mode does, and gives the same bits as eager mode. What it
needed is what the budgets grow to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal
from weakref import WeakSet, finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from .attempt import LaunchedStep, copied
from .capture import CapturedStep, GraphCache
from .deferred import LAG, SETTLED_FIRST, Latch, PendingStep, Refusal, check_batch
from .errors import ConfigError, EPError, PeerLostError
from .failure import FailureCount, failing_fast
from .layers import LayerBudget, StaticLayers
from .ledger import AgreeingGroup, StepLedger, Verdict
from .optimizers import OptimizerSettings, as_optimizers, optimizers_can_skip, step_unless
from .snapshot import SavedState, StateSnapshot, rng_state, set_rng_state

__all__ = ["LayerBudget", "StepRunner"]


class StepRunner:
    """Runs training steps so that an overflow of a static budget costs one replay and loses nothing.

    ``step_fn(batch)`` does forward, backward and whatever reduces or clips gradients. The runner zeroes the
    gradients before it and calls ``optimizer.step()`` after it, once the ranks have agreed that nothing
    overflowed. Otherwise gradients, module buffers, random number generators and ``extra_state`` go back to
    what they were and ``step_fn`` runs again on the same batch: it gets a copy each time (of tensors, NumPy arrays and
    the containers that ``torch.utils._pytree`` knows), and may change it. It must not change anything else that
    matters, and must not call ``optimizer.step()``.

    Args:
        step_fn: called with the batch; its result is returned to the caller.
        model: its buffers are rolled back; its module paths name the layers in messages.
        optimizer: one optimizer or several.
        group: all ranks that train together (data-parallel replicas included); None takes the default group.
            Where it is larger than a dispatcher's group, one small all-reduce a step agrees on the verdict.
        capture: CUDA graphs: ``"auto"`` captures on GPUs once a batch shape has been seen twice and goes on
            without where that fails; ``"always"`` raises where it fails; ``"never"``. Batches must then be made
            of tensors and containers. What else ``step_fn`` does on the host happens only while capturing.
        check: ``"every_step"`` reads the verdict of each step before the next begins. ``"deferred"`` reads it two
            steps later, so that the GPU never waits for the host: steps are launched one behind the other, and
            where one does not fit, it and those behind it change nothing and are run again in order. Until
            :meth:`flush`, parameters and returned values may be behind; everything that a step changes must
            happen inside ``step_fn``. It takes optimizers that can be told on the device to skip a step
            (``fused=True``, the same on all ranks); with others every step is checked.
        headroom: how much more than required a grown budget holds, 0.1 = 10 %.
        extra_state: further things a step changes: tensors, generators, or objects with ``state_dict`` and
            ``load_state_dict``.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        step_fn: Callable[[Any], Any],
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        capture: Literal["auto", "always", "never"] = "auto",
        check: Literal["every_step", "deferred"] = "every_step",
        headroom: float = 0.1,
        extra_state: Iterable[Any] = (),
    ) -> None:
        if capture not in ("auto", "always", "never"):
            raise ConfigError(f"capture must be 'auto', 'always' or 'never', got {capture!r}")
        if capture == "always" and not torch.cuda.is_available():
            raise ConfigError("capture='always' needs a CUDA GPU, and torch sees none; use 'auto' or 'never'")
        if check not in ("every_step", "deferred"):
            raise ConfigError(f"check must be 'every_step' or 'deferred', got {check!r}")
        if not callable(step_fn):
            raise ConfigError(f"step_fn must be callable, got {type(step_fn).__name__}")
        if isinstance(headroom, bool) or not isinstance(headroom, (int, float)) or not 0.0 <= headroom <= 10.0:
            raise ConfigError(f"headroom must be from 0 to 10 (0.1 is 10 % more than required), got {headroom!r}")
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self._step_fn = step_fn
        self._optimizers = as_optimizers(optimizer)
        self._group = group if group is not None or not dist.is_initialized() else dist.group.WORLD
        stepped = [p for o in self._optimizers for settings in o.param_groups for p in settings["params"]]
        self._snapshot = StateSnapshot(model, stepped, extra_state)
        self._layers = StaticLayers(model, self._group, headroom)
        self._deferred = check == "deferred"
        self._latch = Latch(latching=self._deferred)
        self._pending: deque[PendingStep] = deque()
        self._settled_first = 0
        self._busy = False
        self._graphs: GraphCache | None = None
        if capture != "never" and torch.cuda.is_available():
            self._graphs = GraphCache(
                step_fn, self._optimizers, self._zero_grad, self._latch, required=capture == "always"
            )
        self._latest: StepLedger | None = None
        self._model = model
        self._agreement = AgreeingGroup(self._group)
        self._failures = FailureCount(self._group, lambda: self._agreement.number)
        if self._deferred:
            runner = ref(self)
            for handle in Refusal(lambda: _open_verdicts(runner())).register(model, self._optimizers):
                finalize(self, handle.remove)
            _deferring.add(self)
        self.steps = 0
        """Committed steps."""
        self.replays = 0
        """Steps that had to be replayed."""
        self.replayed_steps: list[int] = []
        """Which ones since this runner was made, counted from 0."""

    def __call__(self, batch: Any) -> Any:
        """Run one step.

        Returns:
            What ``step_fn`` returned in the attempt that was committed. With ``check="deferred"`` its tensors have
            the right values after :meth:`flush`, or after two more steps; anything else is of the first attempt.

        Raises:
            BudgetExceededError: routing needs more rows than the ceiling, or than free memory, allows.
            RoutingError: ``topk_idx`` held ids out of range.
            ArgumentError: ``check="deferred"``, and the batch cannot be kept (a tensor that requires a gradient, an
                object that is neither a tensor nor a plain value).
            EPError: another runner of this model has open verdicts; or after a step that failed on this rank alone,
                so that it has fallen behind the others.
            Exception: whatever ``step_fn`` raised.
            PeerLostError: ``step_fn`` raised on another rank, or a rank was lost; see :func:`ep_comm.failing_fast`.

            In every case model, optimizer, random number generators and extra state are as before the step (where an
            optimizer's own ``step`` raises, what it and others before it have stepped stays). With
            ``check="deferred"`` the error may be that of an earlier step; that step and all behind it are then undone.
        """
        self._failures.check(self.steps)
        with self._being_busy():
            try:
                return self._run_ahead(batch) if self._deferred else self._run(batch)
            except (PeerLostError, _CommittedError):
                raise  # nobody goes on, or the step is not undone
            except BaseException:
                self._failures.note(self.steps)
                raise

    def flush(self) -> None:
        """Wait for all open verdicts and replay what does not fit. Call it on all ranks, after the same step, before
        reading or saving weights. Nothing to do with ``check="every_step"``.

        Raises:
            BudgetExceededError, RoutingError: as calling the runner.
        """
        with self._being_busy():
            self._settle_all()

    @property
    def pending(self) -> int:
        """Steps launched whose verdict is open; always 0 with ``check="every_step"``."""
        return len(self._pending)

    @property
    def captures(self) -> int:
        """CUDA graphs captured so far."""
        return self._graphs.captures if self._graphs is not None else 0

    @property
    def graph_replays(self) -> int:
        """Steps that were launched as a CUDA graph so far."""
        return self._graphs.replays if self._graphs is not None else 0

    def budgets(self) -> list[LayerBudget]:
        """The static dispatchers seen so far, in the order of their first dispatch."""
        return self._layers.budgets()

    def state_dict(self) -> dict[str, Any]:
        """Counters and the budgets of all layers seen, by name; plain Python values. Flushes."""
        self.flush()
        return {"steps": self.steps, "replays": self.replays, "layers": self._layers.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over :meth:`state_dict`. Layers not found in the model get their budget when they first dispatch.

        Raises:
            ConfigError: the state is of another kind, or holds a budget that this configuration does not allow.
        """
        if not isinstance(state, dict) or not {"steps", "replays", "layers"} <= state.keys():
            raise ConfigError("state must be what StepRunner.state_dict() returned, with steps, replays and layers")
        counts = state["steps"], state["replays"]
        if not all(isinstance(count, int) and count >= 0 for count in counts) or not isinstance(state["layers"], dict):
            raise ConfigError("state must hold numbers of steps and replays from 0 on, and a dictionary of layers")
        self.flush()
        self._layers.load_state_dict(state["layers"])
        self.steps, self.replays = state["steps"], state["replays"]

    def close(self) -> None:
        """Flush, and drop captured graphs. Needed before destroying an NCCL process group by hand, which otherwise
        waits for them for ever; :func:`ep_comm.shutdown` drops the graphs of all runners."""
        self.flush()
        if self._graphs is not None:
            self._graphs.clear()

    # -- a step that is checked before the next ---------------------------------------------------------

    def _run(self, batch: Any) -> Any:
        """One step, committed or undone."""
        leaves = (leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor))
        before = self._snapshot.take(leaf for leaf in leaves if leaf.requires_grad and leaf.is_leaf)
        with self._undoing(before), failing_fast(f"step {self.steps}", group=self._group):
            step = self._launch(batch)
            result, verdict = step.result, step.verdict()
            self._layers.raise_failure(verdict)
            if verdict.overflow:
                step, verdict = self._replay(batch, verdict, before)
                result = step.result
            self._commit(step, verdict)
        return result

    @contextmanager
    def _undoing(self, before: SavedState) -> Iterator[None]:
        """Where the block raises, everything is as before the step."""
        try:
            yield
        except BaseException:
            if not self._pending:  # otherwise it is closed for their sake
                self._latch.open()
            self._snapshot.restore(before)
            self._zero_grad()
            raise

    def _replay(self, batch: Any, verdict: Verdict, before: SavedState) -> tuple[LaunchedStep, Verdict]:
        """After an overflow: the step again with exact buffers, then larger budgets."""
        self._latch.open()
        self._snapshot.restore(before)
        self._layers.count_overflows(verdict)
        step = self._attempt(batch, exact=True)
        verdict = step.verdict()
        self._layers.raise_failure(verdict)
        self._layers.raise_exceeded(verdict)
        self._layers.grow(verdict)
        self.replays += 1
        self.replayed_steps.append(self.steps)
        return step, verdict

    def _commit(self, step: LaunchedStep, verdict: Verdict) -> None:
        if not step.updated:
            for optimizer in self._optimizers:
                optimizer.step()
        if not step.captured and self._graphs is not None:
            self._graphs.note_committed(step.batch)
        self._layers.note_committed(verdict)
        self.steps += 1

    # -- steps that are checked later -------------------------------------------------------------------

    def _run_ahead(self, batch: Any) -> Any:
        """Launch a step, and check the one LAG steps before it."""
        if self._settled_first < SETTLED_FIRST or not optimizers_can_skip(self._optimizers):
            self._settle_all()
            result = self._run(batch)
            self._settled_first += 1
            return result
        before, settings = self._snapshot.take(), OptimizerSettings(self._optimizers)
        with self._undoing(before), failing_fast(f"step {self.steps + self.pending}", group=self._group):
            step = self._launch(batch, keep_batch=True)
            if not step.updated:
                step_unless(self._optimizers, self._latch.skip(step.words))
                step = replace(step, updated=True)
        self._pending.append(PendingStep(step, before, settings))
        if len(self._pending) > LAG:
            self._settle()
        return step.result

    def _settle_all(self) -> None:
        while self._pending:
            self._settle()

    def _settle(self) -> None:
        """Close the oldest open verdict: commit the step, or turn back to it."""
        step = self._pending.popleft()
        try:
            with failing_fast(f"step {self.steps}", group=self._group):
                verdict = step.launched.verdict()
        except BaseException:
            self._pending.clear()
            raise
        if verdict.overflow or verdict.failed:
            self._turn_back(step, verdict)
        else:
            self._commit(step.launched, verdict)

    def _turn_back(self, first: PendingStep, verdict: Verdict) -> None:
        """Run ``first`` and the steps launched behind it again, in order and one at a time.

        Buffers of the model evolve from the state in front of ``first``; random number generators are set for each
        step, because the caller may have drawn from them in between.
        """
        behind = list(self._pending)
        self._pending.clear()
        rng = rng_state()
        with self._undoing(first.before):
            first.settings.forget_later_state()
            self._layers.raise_failure(verdict)
            with first.settings.in_force(), failing_fast(f"step {self.steps}", group=self._group):
                replayed, verdict = self._replay(first.launched.batch, verdict, first.before)
                self._commit(replayed, verdict)
        results = [replayed.result]
        for step in behind:
            set_rng_state(step.before.rng)
            with step.settings.in_force():
                results.append(self._run(step.launched.batch))
        set_rng_state(rng)
        # Only now: the steps are done whatever becomes of their results.
        wrong = [
            f"step {self.steps - len(results) + number}: {problem}"
            for number, (step, result) in enumerate(zip((first, *behind), results, strict=True))
            if (problem := step.deliver(result)) is not None
        ]
        if wrong:
            raise _CommittedError(
                f"after a replay the result of step_fn cannot be put right in place ({'; '.join(wrong)}); the steps "
                f"are committed. With check='deferred' return tensors whose shapes do not depend on the routing"
            )

    @contextmanager
    def _being_busy(self) -> Iterator[None]:
        """Our own reading of states is not the caller's."""
        for other in list(_deferring):
            if other is not self and other.pending and other._model is self._model:
                raise EPError(
                    f"another StepRunner of this model has {other.pending} open verdicts (check='deferred'), and may "
                    f"have to turn back: call its flush() on every rank first"
                )
        self._busy, outer = True, self._busy
        try:
            yield
        finally:
            self._busy = outer

    # -- one attempt ---------------------------------------------------------------------------------

    def _find(self, batch: Any) -> CapturedStep | None:
        """The graph for this batch, if there is or should be one."""
        if self._graphs is None:
            return None
        return self._graphs.find(batch, self._latest, self._agreement.settled)

    def _launch(self, batch: Any, *, keep_batch: bool = False) -> LaunchedStep:
        """The first attempt, on the present budgets, as a graph where there is one."""
        if self._deferred:
            check_batch(batch)
        captured = self._find(batch)
        if captured is not None:
            return self._graphs.launch(captured, batch, keep_batch=keep_batch)
        return self._attempt(copied(batch) if keep_batch else batch, exact=False)

    def _attempt(self, batch: Any, *, exact: bool) -> LaunchedStep:
        self._zero_grad()
        ledger = StepLedger(exact=exact)
        own = copied(batch)  # for the step to do with as it likes: it may have to run again
        with self._step_stream(), ledger.open():
            result = self._step_fn(own)
        self._latest = ledger
        self._layers.meet(ledger)
        words = ledger.device_words(self._agreement.group_of(ledger))
        self._latch.place(words.device)
        return LaunchedStep.of(batch, result, ledger, words)

    @contextmanager
    def _step_stream(self) -> Iterator[None]:
        """Where graphs are made, the stream on which they are captured; else the current one."""
        if self._graphs is None:
            yield
            return
        caller = torch.cuda.current_stream()
        self._graphs.stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._graphs.stream):
                yield
        finally:
            caller.wait_stream(self._graphs.stream)

    def _zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)


class _CommittedError(EPError):
    """Something is wrong, but the step was made."""


_deferring: WeakSet[StepRunner] = WeakSet()


def _open_verdicts(runner: StepRunner | None) -> int:
    """How many, for somebody who asks from outside a step."""
    return 0 if runner is None or runner._busy else runner.pending
