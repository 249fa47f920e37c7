"""How many replays will a run have, with budgets that grow as they go: simulated runs, and the hold-out check."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .drift import level_noise
from .policy import replay_steps
from .risk import ReplayRisk, RiskModel
from .tail import Interval

__all__ = ["Forecast", "forecast"]

_MAX_STEPS = 200_000
_ROOM = 1e12


@dataclass(frozen=True)
class Forecast:
    """Counts over a run, each with the interval in which the count itself is to be expected.

    Attributes:
        steps: of the run.
        overflows: steps that overflow budgets that never grow.
        replays: steps replayed while budgets grow.
        final_rows: rows of all layers' budgets together at the end.
    """

    steps: int
    overflows: Interval
    replays: Interval
    final_rows: Interval


def forecast(
    model: RiskModel, risk: ReplayRisk, budgets_J: np.ndarray, steps: int, headroom: float, seed: int = 0
) -> Forecast:
    """Simulate runs of ``steps`` steps.

    Each run has its own truth: a replay probability from the risk's draws, and a level that may wander as it did in
    the trace. Steps are drawn in blocks; the utilisation of those in the tail is drawn from the fit.
    """
    length = min(steps, _MAX_STEPS)
    scale = steps / length
    columns = model.columns
    noise = level_noise(model.columns.values_SJ[-model.num_steps :], length)
    rng = np.random.default_rng(seed + 2)
    rows_now = float(budgets_J[: columns.num_layers].sum())
    if risk.tail is None:
        zero = Interval(0.0, 0.0, float(np.ceil(risk.probability.high * steps)))
        return Forecast(steps, zero, zero, Interval(rows_now, rows_now, rows_now))
    utilisation = model.utilisation(np.where(budgets_J < columns.limit_J, budgets_J, _ROOM))
    levels = np.exp(noise * rng.standard_normal(len(risk.draws)))
    counts = []
    for probability, level in zip(risk.draws, levels):
        chosen = _block_indices(model.num_steps, model.block, length, rng)
        drawn = _smoothed(utilisation[chosen], risk, rng)
        # Scaled so that this run's steps overflow with this run's probability.
        stretch = level / float(risk.tail.quantile(np.array(max(probability, 1e-12))))
        hit = np.flatnonzero(drawn * stretch > 1)
        demand = model.demand_SJ[chosen[hit]] * (drawn[hit] / utilisation[chosen[hit]] * stretch)[:, None]
        demand = np.minimum(np.ceil(demand / columns.unit_J) * columns.unit_J, columns.limit_J)
        run = replay_steps(demand, budgets_J, columns.limit_J, columns.unit_J, headroom)
        counts.append((len(hit) * scale, run.replays, run.budgets_J[: columns.num_layers].sum()))
    overflows, replays, final = np.array(counts, dtype=float).T
    return Forecast(steps, *(Interval.of(float(np.median(each)), each) for each in (overflows, replays, final)))


def _block_indices(size: int, block: int, count: int, rng: np.random.Generator) -> np.ndarray:
    starts = rng.integers(0, max(1, size - block + 1), -(-count // block))
    return (starts[:, None] + np.arange(block)).ravel()[:count]


def _smoothed(utilisation: np.ndarray, risk: ReplayRisk, rng: np.random.Generator) -> np.ndarray:
    """Values in the tail are replaced by draws from its fit; the others stay."""
    tail = risk.tail
    in_tail = utilisation > tail.threshold
    share = rng.random(int(in_tail.sum())) * float(tail.above_D[0])
    drawn = utilisation.copy()
    # The order of the replaced values is kept, so that neighbours stay alike.
    ranks = np.argsort(np.argsort(utilisation[in_tail]))
    drawn[in_tail] = np.sort(tail.quantile(share))[ranks]
    return drawn
