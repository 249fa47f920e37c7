"""Steps with known demands through the growth policy of :class:`ep_comm.StepRunner`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..budget import Limit

__all__ = ["Replayed", "replay_steps"]


@dataclass(frozen=True)
class Replayed:
    """What happened to a row of steps.

    Attributes:
        replays: steps that were replayed, with budgets growing after each.
        overflows: steps that do not fit the starting budgets, as if they did not grow.
        overflows_J: for each column, replayed steps in which it overflowed.
        budgets_J: limits at the end.
    """

    replays: int
    overflows: int
    overflows_J: np.ndarray
    budgets_J: np.ndarray


def replay_steps(
    demand_SJ: np.ndarray, budgets_J: np.ndarray, limit_J: np.ndarray, unit_J: np.ndarray, headroom: float
) -> Replayed:
    """Run demands ``[S, J]`` through the policy; growth is the runner's own code, :class:`ep_comm.budget.Limit`.

    Args:
        budgets_J: at the start.
        limit_J: ceilings.
        unit_J: multiples of which budgets are.
        headroom: of the runner, 0.1 = 10 %.
    """
    limits = [Limit(int(b), int(c), int(u)) for b, c, u in zip(budgets_J, limit_J, unit_J, strict=True)]
    # Budgets never shrink, so a step that fits the first ones fits always.
    suspects = np.flatnonzero((demand_SJ > budgets_J).any(1))
    now = np.array(budgets_J, dtype=np.int64)
    replays, overflows_J = 0, np.zeros(len(limits), dtype=np.int64)
    for step in suspects:
        over = demand_SJ[step] > now
        if not over.any():
            continue
        replays += 1
        overflows_J += over
        for column in np.flatnonzero(over):
            limits[column].rows = limits[column].target(int(np.ceil(demand_SJ[step, column])), headroom)
            now[column] = limits[column].rows
    return Replayed(replays, len(suspects), overflows_J, now)
