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
        start_steps: how many of them are the beginning of the trace, which the fit left out.
        start_replays: replays in these steps, included in ``replays``: the trace's own, with no interval, because
            one beginning does not say how another (other weights, other data) would be.
        overflows: steps that overflow budgets that never grow.
        replays: steps replayed while budgets grow.
        final_rows: rows of all layers' budgets together at the end.
    """

    steps: int
    start_steps: int
    start_replays: int
    overflows: Interval
    replays: Interval
    final_rows: Interval


def forecast(
    model: RiskModel, risk: ReplayRisk, budgets_J: np.ndarray, steps: int, headroom: float, seed: int = 0,
    *, from_start: bool = False,
) -> Forecast:  # fmt: skip
    """Simulate runs of ``steps`` steps.

    Args:
        from_start: the run begins as the trace did, with the steps that the fit left out as unlike the later ones.
            Otherwise it goes on where the trace ends.

    Each run has its own truth: a replay probability from the risk's draws, and a level that may wander as it did in
    the trace. Steps are drawn in blocks; the utilisation of those in the tail is drawn from the fit.
    """
    columns = model.columns
    start_SJ = (
        columns.values_SJ[: len(columns.values_SJ) - model.num_steps][:steps] if from_start else columns.values_SJ[:0]
    )
    rest = steps - len(start_SJ)
    length = min(rest, _MAX_STEPS)
    noise = level_noise(model.demand_SJ, length)
    rng = np.random.default_rng(seed + 2)
    levels = np.exp(noise * rng.standard_normal(len(risk.draws)))
    start = replay_steps(start_SJ, budgets_J, columns.limit_J, columns.unit_J, headroom)
    counts = []
    for probability, level in zip(risk.draws, levels, strict=True):
        demand = _overflowing(model, risk, budgets_J, probability, level, length, rng)
        run = replay_steps(demand, start.budgets_J, columns.limit_J, columns.unit_J, headroom)
        overflows = start.overflows + len(demand) * rest / max(length, 1)
        counts.append((overflows, start.replays + run.replays, run.budgets_J[: columns.num_layers].sum()))
    figures = [Interval.of(float(np.median(each)), each) for each in np.array(counts, dtype=float).T]
    if risk.tail is None:
        bound = float(np.ceil(risk.probability.high * rest))
        figures[:2] = [Interval(each.value, each.low, each.high + bound) for each in figures[:2]]
    return Forecast(steps, len(start_SJ), start.replays, *figures)


def _overflowing(
    model: RiskModel, risk: ReplayRisk, budgets_J: np.ndarray, probability: float, level: float, steps: int,
    rng: np.random.Generator,
) -> np.ndarray:  # fmt: skip
    """Demands of those of ``steps`` simulated steps that overflow the starting budgets, in their order."""
    columns = model.columns
    if risk.tail is None or steps == 0:
        return columns.values_SJ[:0]
    utilisation = model.utilisation(np.where(budgets_J < columns.limit_J, budgets_J, _ROOM))
    chosen = _block_indices(model.num_steps, model.block, steps, rng)
    drawn = _smoothed(utilisation[chosen], risk, rng)
    # Scaled so that this run's steps overflow with this run's probability.
    stretch = level / float(risk.tail.quantile(np.array(max(probability, 1e-12))))
    hit = np.flatnonzero(drawn * stretch > 1)
    demand = model.demand_SJ[chosen[hit]] * (drawn[hit] / utilisation[chosen[hit]] * stretch)[:, None]
    return np.minimum(np.ceil(demand / columns.unit_J) * columns.unit_J, columns.limit_J)


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
