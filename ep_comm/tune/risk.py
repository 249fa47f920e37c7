"""The probability that a step is replayed, over all layers together, with its interval.

A step is replayed if any layer overflows, so layers must not be judged one by one. With budgets ``b`` the step's
*utilisation* is ``Z = max over layers of demand / b``; it is replayed if ``Z > 1``. The tail of Z is fitted as it
is: however the layers hang together is in it.

Budgets chosen from a sample look better on that sample than they are. The bootstrap repeats the choice: each draw
fits the layers' tails anew, takes the budgets of the same marginal risk, and compares what the draw predicts for
them with what the sample says. The logarithms of these ratios correct the estimate and span its interval, which is
widened for the few independent extremes it rests on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .drift import Drift, find_drift
from .optional import scipy_stats
from .sample import Sample
from .tail import Interval, TailFit, block_weights, correlation_length, fit_tail, tail_share

__all__ = ["Columns", "ReplayRisk", "RiskModel"]

_DRAWS = 200
_LATEST = 20_000
_FLOOR = 1e-9
# Widening of the bootstrap's quantiles, from the coverage on the laws of tests/tune/test_coverage.py.
_WIDENING = 1.5


@dataclass(frozen=True)
class Columns:
    """Demands side by side: rows of every layer, then pairs of every layer.

    Attributes:
        values_SJ: int64.
        unit_J: demands are multiples of it: the alignment for rows, 1 for pairs.
        limit_J: no demand is above it.
        num_layers: the first so many columns are rows.
    """

    values_SJ: np.ndarray
    unit_J: np.ndarray
    limit_J: np.ndarray
    num_layers: int

    @classmethod
    def of(cls, sample: Sample, *, pairs: bool) -> Columns:
        """The sample's columns, with those of ``pair_rows`` if the collective transport will be used."""
        layers = len(sample.layers)
        unit, limit = np.full(layers, sample.alignment), np.full(layers, sample.worst_case_rows)
        values = sample.rows_SL
        if pairs:
            values = np.concatenate([values, sample.pairs_SL], axis=1)
            unit = np.concatenate([unit, np.ones(layers, dtype=int)])
            limit = np.concatenate([limit, np.full(layers, sample.tokens_per_rank)])
        return cls(values, unit, limit, layers)


@dataclass(frozen=True)
class ReplayRisk:
    """Probability of a replay in one step at fixed budgets.

    Attributes:
        probability: the estimate with its 95 % interval.
        draws: bootstrap draws of it.
        tail: fit of the utilisation's tail.
        observed: share of the sample's own steps that would overflow.
    """

    probability: Interval
    draws: np.ndarray
    tail: TailFit | None
    observed: float


class RiskModel:
    """Fitted to a sample once; answers for any budgets.

    Args:
        columns: the demands.
        seed: of jitter and bootstrap.
        draws: bootstrap draws.

    Attributes:
        drift: what changed over the sample.
        demand_SJ: the demands used: the steps that are like the latest ones, brought to the end of the trace.
    """

    def __init__(self, columns: Columns, seed: int = 0, draws: int = _DRAWS) -> None:
        self.columns = columns
        rng = np.random.default_rng(seed)
        values = columns.values_SJ[-_LATEST:]
        self.drift: Drift = find_drift(values)
        # Demands come in multiples of the unit. Lowered by less than one unit they are continuous, and whether
        # they are above a budget, itself a multiple, stays the same.
        jitter = columns.unit_J * rng.random((len(values), len(columns.unit_J)))
        self.demand_SJ = self.drift.recentre(np.maximum(values - jitter, 1e-6))
        self.correlation = self._correlation()
        block = int(np.ceil(3 * self.correlation)) if self.correlation > 1.5 else 1
        self.block = min(block, max(1, len(self.demand_SJ) // 4))
        self._weights_DX = block_weights(len(self.demand_SJ), self.block, draws, rng)
        self._seed = seed

    @property
    def num_steps(self) -> int:
        """Steps the fit rests on."""
        return len(self.demand_SJ)

    @cached_property
    def tails(self) -> list[TailFit]:
        """Fit of each column, over all bootstrap draws."""
        return [fit_tail(column, self._weights_DX, share=tail_share(column)) for column in self.demand_SJ.T]

    def utilisation(self, budgets_J: np.ndarray) -> np.ndarray:
        """Share of the tightest budget that each step uses, ``[S]``."""
        return (self.demand_SJ / budgets_J).max(1)

    def probability(self, budgets_J: np.ndarray) -> float:
        """Probability of a replay, without interval and without correction for the choice."""
        able = budgets_J < self.columns.limit_J
        if not able.any():
            return 0.0
        utilisation = self.utilisation(np.where(able, budgets_J, np.inf))
        joint = fit_tail(utilisation, share=tail_share(utilisation)).risk(1.0)
        return max(joint, self._largest_of_layers(budgets_J, able))

    def _largest_of_layers(self, budgets_J: np.ndarray, able_J: np.ndarray) -> float:
        """The risk of the layer that overflows most often: all together cannot overflow less."""
        return max(tail.risk(float(b)) for tail, b, able in zip(self.tails, budgets_J, able_J, strict=True) if able)

    def risk(self, budgets_J: np.ndarray) -> ReplayRisk:
        """Probability of a replay with its interval."""
        budgets_J = np.asarray(budgets_J, dtype=float)
        # Budgets were rounded up to units: on average half a unit less was wanted.
        wanted_J = budgets_J - self.columns.unit_J / 2
        marginal_J = np.array([tail.risk(float(wanted)) for tail, wanted in zip(self.tails, wanted_J, strict=True)])
        able = (budgets_J < self.columns.limit_J) & (marginal_J > 0)
        if not able.any():
            bound = (
                min(1.0, 3.0 * self.correlation / self.num_steps) if (budgets_J < self.columns.limit_J).any() else 0.0
            )
            zeros = np.zeros(len(self._weights_DX) - 1)
            return ReplayRisk(Interval(0.0, 0.0, bound), zeros, None, 0.0)
        utilisation = (self.demand_SJ[:, able] / budgets_J[able]).max(1)
        share = tail_share(utilisation)
        tail = fit_tail(utilisation, share=share)
        plain = max(tail.risk(1.0), self._largest_of_layers(budgets_J, able))
        observed = float((utilisation > 1).mean())
        ratios, middle = self._log_ratios(able, marginal_J, share)
        draws = np.maximum(plain, _FLOOR) * np.exp(ratios)
        if plain < _FLOOR:
            # A bounded tail that ends below the budgets: only other shapes say how wrong that may be.
            rng = np.random.default_rng(self._seed + 3)
            direct = fit_tail(utilisation, self._weights_DX, share=share, draw_shapes=rng).exceedance(1.0)[1:]
            draws = np.maximum(draws, direct)
        draws = draws * self._drifted(tail, len(draws))
        draws = np.minimum(draws, self._most(observed, int(able.sum())))
        value = min(plain * float(np.exp(middle)), float(draws.max()))
        return ReplayRisk(Interval.of(value, draws), draws, tail, observed)

    def _drifted(self, tail: TailFit, count: int) -> np.ndarray:
        """Factors on the draws for what is not known about the level at the end of a drifting trace."""
        error = self.drift.level_error
        if error == 0:
            return np.ones(count)
        levels = np.exp(error * np.random.default_rng(self._seed + 5).standard_normal(count))
        at = np.array([tail.risk(1.0 / level) for level in levels])
        return np.maximum(at, _FLOOR) / max(tail.risk(1.0), _FLOOR)

    def _most(self, observed: float, columns: int) -> float:
        """A bound that needs no fit: what the number of overflows in the sample allows (Clopper and Pearson 1934).

        A budget put right above a column's largest demand has been overflowed by a future step about as often as
        one put below it, once: one more overflow is counted for each column.
        """
        steps = self.num_steps / self.correlation
        seen = observed * steps + columns
        return 1.0 if seen >= steps else float(scipy_stats().beta.ppf(0.975, seen + 1, steps - seen))

    def tail_band(self, budgets_J: np.ndarray, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """95 % bootstrap interval of P(utilisation > level) for each of ``levels``, at fixed budgets."""
        usable = np.where(budgets_J < self.columns.limit_J, budgets_J, np.inf)
        rng = np.random.default_rng(self._seed + 4)
        utilisation = self.utilisation(usable)
        tail = fit_tail(utilisation, self._weights_DX, share=tail_share(utilisation), draw_shapes=rng)
        low, high = np.quantile([tail.exceedance(level) for level in levels], [0.025, 0.975], axis=1)
        return low, high

    def _log_ratios(self, able_J: np.ndarray, marginal_J: np.ndarray, share: float) -> tuple[np.ndarray, float]:
        """log(sample's risk / draw's risk) for the budgets that each draw would have chosen; their median."""
        rng = np.random.default_rng(self._seed + 1)
        chosen = [
            tail.quantile_of_draws(p) for tail, p, able in zip(self.tails, marginal_J, able_J, strict=True) if able
        ]
        unit = self.columns.unit_J[able_J]
        budgets_DJ = np.maximum(np.ceil(np.stack(chosen, axis=1) / unit), 1) * unit
        demand = self.demand_SJ[:, able_J]
        drawn, blurred, plain = [], [], []
        for draw in range(1, len(budgets_DJ)):
            utilisation = (demand / budgets_DJ[draw]).max(1)
            fit = fit_tail(utilisation, self._weights_DX[[0, draw]], share=share)
            own, of_draw = fit.exceedance(1.0)
            # The sample's own fit is uncertain as well, so its shape is drawn.
            spread = fit_tail(utilisation, self._weights_DX[[0, 0]], share=share, draw_shapes=rng).exceedance(1.0)[1]
            drawn.append(of_draw), plain.append(own), blurred.append(spread)
        # Any layer's own risk is a lower bound of the risk of all. By construction every draw's budgets have the
        # layers' risks of the choice, up to rounding, so a fit that says much less says nothing.
        least = max(_FLOOR, float(marginal_J[able_J].max()) / 8)
        logs = [
            np.log(np.maximum(np.array(each), floor))
            for each, floor in ((plain, _FLOOR), (blurred, _FLOOR), (drawn, least))
        ]
        middle = float(np.median(logs[0] - logs[2]))
        return middle + self._widening() * (logs[0] - logs[2] - middle) + (logs[1] - logs[0]), middle

    def _widening(self) -> float:
        """Student's factor for the number of independent blocks, times a constant found by calibration."""
        blocks = max(5.0, self.num_steps / (3 * self.correlation))
        return _WIDENING * float(scipy_stats().t.ppf(0.975, blocks - 1)) / 1.96

    def _correlation(self) -> float:
        """Steps over which demands, and in particular large ones, hang together."""
        demand = self.demand_SJ
        median = np.maximum(np.median(demand, axis=0), 1e-9)
        series = [*demand.T, (demand / median).max(1)]
        lengths = [correlation_length(np.argsort(np.argsort(each)).astype(float)) for each in series]
        lengths += [correlation_length((each > np.quantile(each, 0.9)).astype(float)) for each in series]
        return max(lengths)
