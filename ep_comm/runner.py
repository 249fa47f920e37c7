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

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from .capture import GraphCache
from .devices import free_memory
from .dispatcher import Dispatcher
from .errors import BudgetExceededError, ConfigError, EPError
from .ledger import Demand, StepLedger, Verdict, current_ledger
from .naming import named_dispatchers
from .snapshot import StateSnapshot

__all__ = ["LayerBudget", "StepRunner"]

log = logging.getLogger("ep_comm")


@dataclass(frozen=True)
class LayerBudget:
    """The budget of one layer and its history, all in rows.

    Attributes:
        name: the layer: path of the dispatcher in the model.
        start_rows: budget at the start.
        budget_rows: budget now.
        required_peak_rows: most rows a committed step needed on any rank.
        worst_case_rows: most rows any routing can need.
        pair_rows: budget of token rows between two ranks now.
        overflows: steps in which this layer's rows did not fit.
    """

    name: str
    start_rows: int
    budget_rows: int
    required_peak_rows: int
    worst_case_rows: int
    pair_rows: int
    overflows: int


class StepRunner:
    """Runs training steps so that an overflow of a static budget costs one replay and loses nothing.

    ``step_fn(batch)`` does forward, backward and whatever reduces or clips gradients. The runner zeroes the
    gradients before it and calls ``optimizer.step()`` after it, once the ranks have agreed that nothing
    overflowed. Otherwise gradients, module buffers, random number generators and ``extra_state`` go back to
    what they were and ``step_fn`` runs again on the same batch. ``step_fn`` must therefore not change anything
    else that matters, and must not call ``optimizer.step()``.

    Args:
        step_fn: called with the batch; its result is returned to the caller.
        model: its buffers are rolled back; its module paths name the layers in messages.
        optimizer: one optimizer or several.
        group: all ranks that train together (data-parallel replicas included); None takes the default group.
            Where it is larger than a dispatcher's group, one small all-reduce a step agrees on the verdict.
        capture: CUDA graphs: ``"auto"`` captures on GPUs once a batch shape has been seen twice and goes on
            without where that fails; ``"always"`` raises where it fails; ``"never"``. Batches must then be made
            of tensors and containers. What else ``step_fn`` does on the host happens only while capturing.
        check: ``"every_step"`` reads the verdict of each step before it is committed.
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
        check: Literal["every_step"] = "every_step",
        headroom: float = 0.1,
        extra_state: Iterable[Any] = (),
    ) -> None:
        if capture not in ("auto", "always", "never"):
            raise ConfigError(f"capture must be 'auto', 'always' or 'never', got {capture!r}")
        if capture == "always" and not torch.cuda.is_available():
            raise ConfigError("capture='always' needs a CUDA GPU, and torch sees none; use 'auto' or 'never'")
        if check != "every_step":
            raise ConfigError(f"check must be 'every_step', got {check!r}")
        if isinstance(headroom, bool) or not isinstance(headroom, (int, float)) or not 0.0 <= headroom <= 10.0:
            raise ConfigError(f"headroom must be from 0 to 10 (0.1 is 10 % more than required), got {headroom!r}")
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self._step_fn = step_fn
        self._model = model
        self._optimizers = _as_optimizers(optimizer)
        self._group = group if group is not None or not dist.is_initialized() else dist.group.WORLD
        self._headroom = headroom
        stepped = [p for o in self._optimizers for settings in o.param_groups for p in settings["params"]]
        self._snapshot = StateSnapshot(model, stepped, extra_state)
        self._graphs: GraphCache | None = None
        if capture != "never" and torch.cuda.is_available():
            self._graphs = GraphCache(step_fn, self._optimizers, self._zero_grad, required=capture == "always")
        self._latest: StepLedger | None = None
        self._seen: list[Dispatcher] = []
        self._pending: dict[str, dict[str, Any]] = {}
        self.steps = 0
        """Committed steps."""
        self.replays = 0
        """Steps that had to be replayed."""

    def __call__(self, batch: Any) -> Any:
        """Run one step.

        Returns:
            What ``step_fn`` returned in the attempt that was committed.

        Raises:
            BudgetExceededError: routing needs more rows than the ceiling, or than free memory, allows.
            RoutingError: ``topk_idx`` held ids out of range.
            Exception: whatever ``step_fn`` raised.

            In every case model, optimizer, random number generators and extra state are as before the step. If
            ``step_fn`` raised on some ranks only, the others wait for them in their next collective until the
            process group's timeout: let the job end, as ``torchrun`` does.
        """
        leaves = (leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor))
        self._snapshot.take(leaf for leaf in leaves if leaf.requires_grad and leaf.is_leaf)
        try:
            result, verdict, updated = self._first_attempt(batch)
            self._raise_failure(verdict)
            if verdict.overflow:
                updated = False
                self._snapshot.restore()
                self._count_overflows(verdict)
                result, verdict = self._attempt(batch, exact=True)
                self._raise_failure(verdict)
                self._raise_exceeded(verdict)
                self._grow(verdict)
                self.replays += 1
        except BaseException:
            self._snapshot.restore()
            self._zero_grad()
            raise
        if not updated:
            for optimizer in self._optimizers:
                optimizer.step()
            if self._graphs is not None:
                self._graphs.note_committed(batch)
        for dispatcher, demand in verdict.demands:
            dispatcher.budget.note(demand)
            if dispatcher.drops and demand.overflowed:
                self._note_dropped(dispatcher, demand)
        self.steps += 1
        return result

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
        return [
            LayerBudget(
                name=self._name(dispatcher),
                start_rows=dispatcher.budget.rows.start,
                budget_rows=dispatcher.budget.rows.rows,
                required_peak_rows=dispatcher.budget.rows.peak,
                worst_case_rows=dispatcher.config.worst_case_rows(dispatcher.ep_size),
                pair_rows=dispatcher.budget.pairs.rows,
                overflows=dispatcher.budget.overflows,
            )
            for dispatcher in self._seen
        ]

    def state_dict(self) -> dict[str, Any]:
        """Counters and the budgets of all layers seen, by name; plain Python values."""
        layers = {self._name(dispatcher): dispatcher.state_dict() for dispatcher in self._seen}
        return {"steps": self.steps, "replays": self.replays, "layers": {**self._pending, **layers}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over :meth:`state_dict`. Layers not found in the model get their budget when they first dispatch.

        Raises:
            ConfigError: the state is of another kind, or holds a budget that this configuration does not allow.
        """
        if not isinstance(state, dict) or not {"steps", "replays", "layers"} <= state.keys():
            raise ConfigError("state must be what StepRunner.state_dict() returned, with steps, replays and layers")
        self._pending = dict(state["layers"])
        for dispatcher in named_dispatchers(self._model).values():
            self._adopt(dispatcher)
        for dispatcher in self._seen:
            self._adopt(dispatcher)
        self.steps, self.replays = state["steps"], state["replays"]

    def close(self) -> None:
        """Drop captured graphs. Needed before destroying an NCCL process group by hand, which otherwise waits
        for them for ever; :func:`ep_comm.shutdown` does it for all runners."""
        if self._graphs is not None:
            self._graphs.clear()

    # -- one attempt ---------------------------------------------------------------------------------

    def _first_attempt(self, batch: Any) -> tuple[Any, Verdict, bool]:
        """On the present budgets; says also whether the optimizers have stepped."""
        if self._graphs is not None:
            captured = self._graphs.find(batch, self._latest, self._agreeing_group(self._latest))
            if captured is not None:
                result = captured.launch(batch)
                return result, captured.verdict(), captured.updates
        return *self._attempt(batch, exact=False), False

    def _attempt(self, batch: Any, *, exact: bool) -> tuple[Any, Verdict]:
        self._zero_grad()
        ledger = StepLedger(exact=exact)
        with self._step_stream(), ledger.open():
            result = self._step_fn(batch)
        self._latest = ledger
        self._meet(ledger)
        return result, self._read(ledger)

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

    def _read(self, ledger: StepLedger) -> Verdict:
        """The agreed verdict: one small read."""
        group = self._agreeing_group(ledger)
        if ledger.dispatchers:
            return ledger.parse(ledger.device_words(group).tolist())
        if group is None:
            return Verdict(False, False, [])
        # A rank without a dispatcher of its own, a pipeline stage say, joins the verdict of the others.
        flags = torch.zeros(2, dtype=torch.int64, device=_device_of(group))
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        return Verdict(bool(flags[0]), bool(flags[1]), [])

    def _agreeing_group(self, ledger: StepLedger | None) -> dist.ProcessGroup | None:
        """The group over which the verdict has to be reduced; None where the ranks agree already."""
        if self._group is None or ledger is None:
            return None
        world = dist.get_world_size(self._group)
        if world == 1 or (ledger.dispatchers and all(d.ep_size == world for d in ledger.dispatchers)):
            return None
        return self._group

    def _meet(self, ledger: StepLedger) -> None:
        for dispatcher in ledger.dispatchers:
            if not any(known is dispatcher for known in self._seen):
                self._seen.append(dispatcher)
                self._adopt(dispatcher)

    def _adopt(self, dispatcher: Dispatcher) -> None:
        """Give the dispatcher the budget that was loaded under its name, if any."""
        state = self._pending.pop(self._name(dispatcher), None)
        if state is not None:
            dispatcher.load_state_dict(state)

    def _zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    # -- verdicts ------------------------------------------------------------------------------------

    def _raise_failure(self, verdict: Verdict) -> None:
        if not verdict.failed:
            return
        for dispatcher, demand in verdict.demands:
            if demand.fault_rank >= 0:
                raise dispatcher.recorded_error(demand, layer=self._name(dispatcher))
        raise EPError("the step failed on another data-parallel replica, whose ranks say why")

    def _raise_exceeded(self, verdict: Verdict) -> None:
        """After a replay an overflow means that the ceiling itself was not enough."""
        if not verdict.overflow:
            return
        for dispatcher, demand in verdict.demands:
            if demand.overflowed and not dispatcher.drops:
                required = max(demand.required_rows)
                where = demand.required_rows.index(required)
                raise dispatcher.budget.exceeded(self._name(dispatcher), where, required)
        raise _exceeded_elsewhere()

    def _count_overflows(self, verdict: Verdict) -> None:
        for dispatcher, demand in verdict.demands:
            dispatcher.budget.overflows += demand.overflowed and not dispatcher.drops

    def _note_dropped(self, dispatcher: Dispatcher, demand: Demand) -> None:
        if dispatcher.budget.overflows == 0:
            log.warning(
                "%s: rows were dropped, as overflow='drop' asks: %d rows needed, the budget is %d; said once, counted "
                "in budgets()",
                self._name(dispatcher),
                max(demand.required_rows),
                dispatcher.budget_rows,
            )
        dispatcher.budget.overflows += 1

    def _grow(self, verdict: Verdict) -> None:
        """Grow the budgets that were too small, if the memory is there on every rank."""
        growth = [
            (d, demand, d.budget.growth_bytes(demand, self._headroom)) for d, demand in verdict.demands if not d.drops
        ]
        total = sum(more for _, _, more in growth)
        device = verdict.demands[0][0].device if verdict.demands else _device_of(self._group)
        short = torch.tensor(int(total > free_memory(device)), dtype=torch.int32, device=device)
        if self._group is not None and dist.get_world_size(self._group) > 1:
            dist.all_reduce(short, op=dist.ReduceOp.MAX, group=self._group)
        if bool(short) and not growth:
            raise _exceeded_elsewhere()
        if bool(short):
            dispatcher, demand, _ = max(growth, key=lambda entry: entry[2])
            required = max(demand.required_rows)
            where = demand.required_rows.index(required)
            raise dispatcher.budget.exceeded(self._name(dispatcher), where, required, memory=total)
        for dispatcher, demand, _ in growth:
            dispatcher.budget.grow_to(demand, self._headroom)

    def _name(self, dispatcher: Dispatcher) -> str:
        for name, known in named_dispatchers(self._model).items():
            if known is dispatcher:
                return name
        return dispatcher.name


def _as_optimizers(given: Any) -> list[torch.optim.Optimizer]:
    optimizers = [given] if isinstance(given, torch.optim.Optimizer) else list(given or [])
    if not optimizers or not all(isinstance(entry, torch.optim.Optimizer) for entry in optimizers):
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer or several of them, got {given!r}")
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(_no_step_inside)
    return optimizers


def _no_step_inside(*_: Any) -> None:
    if current_ledger() is not None:
        raise EPError(
            "optimizer.step() was called inside step_fn: the StepRunner calls it, once the ranks have agreed that the "
            "step is good"
        )


def _exceeded_elsewhere() -> BudgetExceededError:
    return BudgetExceededError(
        "the budget was exceeded on other ranks, which say where",
        layer="",
        rank=-1,
        required_rows=0,
        allowed_rows=0,
    )


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    if group is not None and "nccl" in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
