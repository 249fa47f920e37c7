"""Hold-out check: fit on the first part of the sample, run the rest through the growth policy, compare."""

from __future__ import annotations

from dataclasses import dataclass

from .forecast import Forecast, forecast
from .policy import Replayed, replay_steps
from .recommend import CostModel, recommend
from .risk import Columns, RiskModel
from .sample import Sample
from .target import Target

__all__ = ["HoldOut", "hold_out"]

_LEAST_STEPS = 40


@dataclass(frozen=True)
class HoldOut:
    """Prediction from the first part against what happened in the rest.

    Attributes:
        fitted, checked: steps of the two parts.
        predicted: counts for the second part.
        observed: what the second part did with the budgets chosen on the first.
    """

    fitted: int
    checked: int
    predicted: Forecast
    observed: Replayed
    observed_rows: int

    @property
    def agrees(self) -> bool:
        """Whether overflows and replays are inside their predicted intervals."""
        return self.observed.overflows in self.predicted.overflows and self.observed.replays in self.predicted.replays


def hold_out(
    sample: Sample, target: Target, costs: CostModel, *, pairs: bool, share: float, headroom: float, seed: int,
    max_memory: float | None = None, replays_per_1000: float | None = None,
) -> HoldOut | None:  # fmt: skip
    """Validate the whole procedure on this sample; None where it is too short, or simulated.

    Args:
        share: part of the steps that is fitted, 0.5 = the first half.

    Raises:
        ConfigError: no budget satisfies the limits on the first part.
    """
    cut = int(sample.num_steps * share)
    if sample.source == "model" or cut < _LEAST_STEPS or sample.num_steps - cut < 2:
        return None
    first, rest = sample.part(0, cut), sample.part(cut, sample.num_steps)
    model = RiskModel(Columns.of(first, pairs=pairs), seed)
    choice = recommend(first, target, model, costs, max_memory, replays_per_1000)
    budgets = choice.chosen.budgets_J
    predicted = forecast(model, choice.risk, budgets, rest.num_steps, headroom, seed)
    columns = Columns.of(rest, pairs=pairs)
    observed = replay_steps(columns.values_SJ, budgets, columns.limit_J, columns.unit_J, headroom)
    rows = int(observed.budgets_J[: columns.num_layers].sum())
    return HoldOut(cut, rest.num_steps, predicted, observed, rows)
