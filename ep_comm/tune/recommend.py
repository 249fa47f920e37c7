"""Budgets that minimise the expected cost of a step: padding time + replay probability x replay cost."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..config import round_up
from ..errors import ConfigError
from .risk import Columns, ReplayRisk, RiskModel
from .sample import Sample
from .target import DTYPE_BYTES, Target

__all__ = ["Alternative", "CostModel", "FrontierPoint", "Recommendation", "recommend"]

_POINTS = 41
_GRID = np.logspace(np.log10(0.5), -8, 120)


@dataclass(frozen=True)
class CostModel:
    """What rows and replays cost. All of it are assumptions that the user may replace.

    Attributes:
        step_ms: time of a step.
        replay_ms: what a replay adds; None means ``step_ms``.
        memory_gbps: memory bandwidth in GB/s; a row beyond what is needed is touched ``row_passes`` times in
            forward and backward (zeroed, read and written by the activations, the same for gradients).
        link_gbps: bandwidth between ranks in GB/s, for ``pair_rows``: unused slots travel in four directions.
    """

    step_ms: float = 1000.0
    replay_ms: float | None = None
    memory_gbps: float = 3000.0
    link_gbps: float = 50.0
    row_passes: int = 8

    def __post_init__(self) -> None:
        for name in ("step_ms", "replay_ms", "memory_gbps", "link_gbps", "row_passes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e12:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {value}")

    @property
    def replay(self) -> float:
        """Cost of a replay in ms."""
        return self.step_ms if self.replay_ms is None else self.replay_ms

    def per_unit_ms(self, columns: Columns, target: Target) -> np.ndarray:
        """Cost of one row, or one pair row, of each column in ms a step."""
        row_bytes = target.hidden_size * DTYPE_BYTES[target.dtype]
        row = self.row_passes * row_bytes / (self.memory_gbps * 1e6)
        pair = 4 * target.ep_size * row_bytes / (self.link_gbps * 1e6)
        kinds = np.arange(len(columns.unit_J)) < columns.num_layers
        return np.where(kinds, row, pair)


@dataclass(frozen=True)
class FrontierPoint:
    """One choice of budgets.

    Attributes:
        budgets_J: of every column.
        memory_bytes: of the receive buffers and their gradients, and the exchange buffers.
        probability: of a replay in a step; uncorrected, without interval.
        cost_ms: padding time + probability x replay cost.
    """

    budgets_J: np.ndarray
    memory_bytes: int
    probability: float
    cost_ms: float


@dataclass(frozen=True)
class Alternative:
    """Another way to choose, for comparison.

    Attributes:
        name: of the way.
        point: its budgets, memory and cost.
        probability: of a replay in a step; corrected where the budgets were chosen from the sample.
    """

    name: str
    point: FrontierPoint
    probability: float


@dataclass(frozen=True)
class Recommendation:
    """The choice, and what it was chosen from.

    Attributes:
        chosen: the recommended point.
        risk: of it, with interval.
        frontier: all points, from small budgets to large ones.
        alternatives: one global factor, worst case, the library's default.
    """

    chosen: FrontierPoint
    risk: ReplayRisk
    frontier: list[FrontierPoint]
    alternatives: list[Alternative] = field(default_factory=list)


def recommend(
    sample: Sample,
    target: Target,
    model: RiskModel,
    costs: CostModel,
    max_memory: float | None = None,
    replays_per_1000: float | None = None,
) -> Recommendation:
    """Choose budgets.

    Args:
        max_memory: bytes that all layers' buffers may take.
        replays_per_1000: most replays in a thousand steps.

    Raises:
        ConfigError: no choice satisfies the limits; the message says what is possible.
    """
    maker = _PointMaker(sample, target, model, costs)
    frontier = maker.frontier()
    fits = [point for point in frontier if max_memory is None or point.memory_bytes <= max_memory]
    if not fits:
        least = min(point.memory_bytes for point in frontier)
        raise ConfigError(
            f"--max-memory {max_memory / 2**30:.2f} GiB: the smallest budgets take {least / 2**30:.2f} GiB"
        )
    allowed = np.inf if replays_per_1000 is None else replays_per_1000 / 1000
    # The quick estimate flatters the choice it made, so the corrected one decides.
    for point in sorted((p for p in fits if p.probability <= allowed), key=lambda point: point.cost_ms):
        risk = model.risk(point.budgets_J)
        if risk.probability.value <= allowed:
            return Recommendation(point, risk, frontier, maker.alternatives(point))
    best = model.risk(fits[-1].budgets_J).probability.value * 1000
    limit = "" if max_memory is None else f" with --max-memory {max_memory / 2**30:.2f} GiB"
    raise ConfigError(f"--replays-per-1000 {replays_per_1000:g}: the least{limit} is {best:.3g}")


class _PointMaker:
    def __init__(self, sample: Sample, target: Target, model: RiskModel, costs: CostModel) -> None:
        self.sample, self.target, self.model, self.costs = sample, target, model, costs
        self.columns = model.columns
        self.per_unit = costs.per_unit_ms(self.columns, target)
        self.quantiles_QJ = np.stack([tail.quantile(_GRID) for tail in model.tails], axis=1)
        self.needed_J = model.demand_SJ.mean(0)

    def frontier(self) -> list[FrontierPoint]:
        """Cost-optimal budgets for replay costs around the real one.

        For independent columns the best budget of each minimises ``cost of a row x budget + replay cost x its own
        risk``; scanning the replay cost gives the trade-off between memory and replays.
        """
        points: dict[bytes, FrontierPoint] = {}
        scale = self.costs.replay
        for replay in [scale, *(scale * np.logspace(-4, 4, _POINTS))]:
            objective = self.per_unit * self.quantiles_QJ + replay * _GRID[:, None]
            best = objective.argmin(0)
            point = self.point(np.take_along_axis(self.quantiles_QJ, best[None], 0)[0])
            points.setdefault(point.budgets_J.tobytes(), point)
        return sorted(points.values(), key=lambda point: (point.memory_bytes, -point.probability))

    def point(self, wanted_J: np.ndarray) -> FrontierPoint:
        """Round up to the units, cap at the limits, and price."""
        unit, limit = self.columns.unit_J, self.columns.limit_J
        budgets = np.minimum(np.ceil(np.minimum(np.maximum(wanted_J, 1), limit) / unit) * unit, limit).astype(np.int64)
        probability = self.model.probability(budgets.astype(float))
        padding = float((self.per_unit * np.maximum(budgets - self.needed_J, 0)).sum())
        return FrontierPoint(budgets, self._memory(budgets), probability, padding + probability * self.costs.replay)

    def alternatives(self, chosen: FrontierPoint) -> list[Alternative]:
        """The usual ways: one factor for all layers as safe as the choice, the library's default, the worst case."""
        one = self._one_factor(chosen.probability)
        usual = self._at_factor(1.25)
        worst = self.point(self.columns.limit_J.astype(float))
        return [
            Alternative("one factor for all layers", one, self.model.risk(one.budgets_J).probability.value),
            Alternative("capacity_factor=1.25 (default)", usual, usual.probability),
            Alternative("worst case", worst, worst.probability),
        ]

    def _one_factor(self, probability: float) -> FrontierPoint:
        low, high = 0.5, self.columns.limit_J[0] / self.sample.mean_load
        for _ in range(24):
            middle = (low + high) / 2
            if self._at_factor(middle).probability > probability:
                low = middle
            else:
                high = middle
        return self._at_factor(high)

    def _at_factor(self, factor: float) -> FrontierPoint:
        rows = round_up(int(np.ceil(self.sample.mean_load * factor)), self.sample.alignment)
        wanted = np.full(len(self.per_unit), float(rows))
        share = 1.0 - (1.0 - 1.0 / self.sample.ep_size) ** self.sample.top_k
        wanted[self.columns.num_layers :] = np.ceil(self.sample.tokens_per_rank * share * factor)
        return self.point(wanted)

    def _memory(self, budgets_J: np.ndarray) -> int:
        rows, pairs = np.split(budgets_J, [self.columns.num_layers])
        # Layers keep their rows until the backward pass; what is exchanged is needed one layer at a time.
        exchange = int(pairs.max(initial=0)) * self.sample.ep_size * self.target.row_bytes()
        return int(rows.sum()) * self.target.row_bytes() + exchange
