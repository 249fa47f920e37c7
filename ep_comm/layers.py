"""The static layers that a training run has met: their names, their budgets, and what a verdict means for them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .budget import check_saved_budget
from .devices import free_memory, group_device
from .dispatcher import Dispatcher
from .errors import BudgetExceededError, ConfigError, EPError
from .ledger import Demand, StepLedger, Verdict
from .naming import named_dispatchers

__all__ = ["LayerBudget", "StaticLayers"]

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


class StaticLayers:
    """The static dispatchers of one training run.

    Args:
        model: its module paths name the layers.
        group: all ranks that train together, or None for one process.
        headroom: how much more than required a grown budget holds, 0.1 = 10 %.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None, headroom: float) -> None:
        self._model = model
        self._group = group
        self._headroom = headroom
        self._seen: list[Dispatcher] = []
        self._pending: dict[str, dict[str, Any]] = {}

    def meet(self, ledger: StepLedger) -> None:
        """Take in the dispatchers of an attempt; one whose budget was loaded before gets it now."""
        for dispatcher in ledger.dispatchers:
            if not any(known is dispatcher for known in self._seen):
                self._seen.append(dispatcher)
                self._adopt(dispatcher)

    def budgets(self) -> list[LayerBudget]:
        """The layers met so far, in the order of their first dispatch."""
        return [
            LayerBudget(
                name=self.name(dispatcher),
                start_rows=dispatcher.budget.rows.start,
                budget_rows=dispatcher.budget.rows.rows,
                required_peak_rows=dispatcher.budget.rows.peak,
                worst_case_rows=dispatcher.config.worst_case_rows(dispatcher.ep_size),
                pair_rows=dispatcher.budget.pairs.rows,
                overflows=dispatcher.budget.overflows,
            )
            for dispatcher in self._seen
        ]

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Budgets by layer name, those that no layer has taken up yet too."""
        return {**self._pending, **{self.name(dispatcher): dispatcher.state_dict() for dispatcher in self._seen}}

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Take over :meth:`state_dict`. Layers not found in the model get their budget when they are met.

        Raises:
            ConfigError: an entry is no saved budget, or one that its layer's configuration does not allow. Then nothing
                has changed.
        """
        dispatchers = [*named_dispatchers(self._model).values(), *self._seen]
        by_name = {self.name(dispatcher): dispatcher for dispatcher in dispatchers}
        rank = dist.get_rank(self._group) if self._group is not None else 0
        if not isinstance(state, dict):
            raise ConfigError(f"rank {rank}: layers must be a dictionary of saved budgets, got {type(state).__name__}")
        for name, saved in state.items():
            if not isinstance(name, str):
                raise ConfigError(f"rank {rank}: the names of saved layers must be strings, got {name!r}")
            if name in by_name:
                by_name[name].check_state_dict(saved, name)
            elif saved != {}:
                check_saved_budget(saved, f"rank {rank}: {name}")
        self._pending = dict(state)
        for dispatcher in dispatchers:
            self._adopt(dispatcher)

    def name(self, dispatcher: Dispatcher) -> str:
        """The path of the dispatcher in the model, or its own name outside of it."""
        for name, known in named_dispatchers(self._model).items():
            if known is dispatcher:
                return name
        return dispatcher.name

    # -- what a verdict means --------------------------------------------------------------------------

    def raise_failure(self, verdict: Verdict) -> None:
        """Raise what some rank recorded on its device, if anything: RoutingError, or EPError for another replica's."""
        if not verdict.failed:
            return
        for dispatcher, demand in verdict.demands:
            if demand.fault_rank >= 0:
                raise dispatcher.recorded_error(demand, layer=self.name(dispatcher))
        raise EPError("the step failed on another data-parallel replica, whose ranks say why")

    def raise_exceeded(self, verdict: Verdict) -> None:
        """After a replay an overflow means that the ceiling itself was not enough."""
        if not verdict.overflow:
            return
        for dispatcher, demand in verdict.demands:
            if demand.overflowed and not dispatcher.drops:
                required = max(demand.required_rows)
                where = demand.required_rows.index(required)
                raise dispatcher.budget.exceeded(self.name(dispatcher), where, required, group=dispatcher.group)
        raise _exceeded_elsewhere()

    def count_overflows(self, verdict: Verdict) -> None:
        """Count the layers whose rows did not fit in an attempt."""
        for dispatcher, demand in verdict.demands:
            dispatcher.budget.overflows += demand.overflowed and not dispatcher.drops

    def note_committed(self, verdict: Verdict) -> None:
        """Remember what a committed step needed, and say once where rows were dropped by choice."""
        for dispatcher, demand in verdict.demands:
            dispatcher.budget.note(demand)
            if dispatcher.drops and demand.overflowed:
                self._note_dropped(dispatcher, demand)

    def grow(self, verdict: Verdict) -> None:
        """Grow the budgets that were too small, if the memory is there on every rank. Collective.

        Raises:
            BudgetExceededError: the rows needed do not fit into free memory.
        """
        growth = [
            (d, demand, d.budget.growth_bytes(demand, self._headroom)) for d, demand in verdict.demands if not d.drops
        ]
        total = sum(more for _, _, more in growth)
        device = verdict.demands[0][0].device if verdict.demands else group_device(self._group)
        short = torch.tensor(int(total > free_memory(device)), dtype=torch.int32, device=device)
        if self._group is not None and dist.get_world_size(self._group) > 1:
            dist.all_reduce(short, op=dist.ReduceOp.MAX, group=self._group)
        if bool(short) and not growth:
            raise _exceeded_elsewhere()
        if bool(short):
            dispatcher, demand, _ = max(growth, key=lambda entry: entry[2])
            required = max(demand.required_rows)
            where = demand.required_rows.index(required)
            raise dispatcher.budget.exceeded(
                self.name(dispatcher), where, required, memory=total, group=dispatcher.group
            )
        for dispatcher, demand, _ in growth:
            dispatcher.budget.grow_to(demand, self._headroom)

    def _note_dropped(self, dispatcher: Dispatcher, demand: Demand) -> None:
        if dispatcher.budget.overflows == 0:
            log.warning(
                "%s: rows were dropped, as overflow='drop' asks: %d rows needed, the budget is %d; said once, counted "
                "in budgets()",
                self.name(dispatcher),
                max(demand.required_rows),
                dispatcher.budget_rows,
            )
        dispatcher.budget.overflows += 1

    def _adopt(self, dispatcher: Dispatcher) -> None:
        """Give the dispatcher the budget that was loaded under its name, if any."""
        state = self._pending.pop(self.name(dispatcher), None)
        if state is not None:
            dispatcher.load_state_dict(state)


def _exceeded_elsewhere() -> BudgetExceededError:
    return BudgetExceededError(
        "the budget was exceeded on other ranks, which say where",
        layer="",
        rank=-1,
        required_rows=0,
        allowed_rows=0,
    )
