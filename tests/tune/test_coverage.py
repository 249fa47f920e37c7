"""The interval holds what it says: on traces with a known law the true replay rate is inside it."""

from __future__ import annotations

import numpy as np
import pytest

from ep_comm.tune.risk import RiskModel
from ep_comm.tune.tail import Interval

from .laws import ALIGNMENT, LAWS, LAYERS, Law

REPETITIONS = 40
STEPS = 1000
WANTED = 0.005


def coverage(law: Law, interval_of: object = None) -> tuple[float, float]:
    """(share of repetitions whose interval holds the truth, median ratio of the interval's ends to the estimate)."""
    truth_SL = law.truth()
    inside, width = 0, []
    for repetition in range(REPETITIONS):
        model = RiskModel(law.trace(STEPS, repetition + 1), seed=repetition, draws=100)
        # Chosen from the very trace that the risk is then estimated from, as recommend() does.
        budgets = np.array([float(tail.quantile(np.array(WANTED / LAYERS))) for tail in model.tails])
        budgets = np.ceil(budgets / ALIGNMENT) * ALIGNMENT
        truth = float((truth_SL > budgets).any(1).mean())
        interval = (interval_of or risk_interval)(model, budgets)
        inside += truth in interval
        width.append(interval.high / max(interval.value, 1e-6))
    return inside / REPETITIONS, float(np.median(width))


def risk_interval(model: RiskModel, budgets: np.ndarray) -> Interval:
    return model.risk(budgets).probability


def layers_alone(model: RiskModel, budgets: np.ndarray) -> Interval:
    """Broken on purpose: the layers' risks added up, and only the bootstrap of steps, without the choice."""
    draws = sum(tail.exceedance(budget) for tail, budget in zip(model.tails, budgets, strict=True))
    return Interval.of(draws[0], draws[1:])


def counted(model: RiskModel, budgets: np.ndarray) -> Interval:
    """Broken on purpose: overflows counted in the sample that the budgets were made for."""
    over = (model.demand_SJ > budgets).any(1)
    draws = model._weights_DX @ over / model._weights_DX.sum(1)
    return Interval.of(draws[0], draws[1:])


@pytest.mark.parametrize("name", LAWS)
def test_truth_is_inside_the_interval(name: str) -> None:
    share, width = coverage(LAWS[name])
    assert share >= 0.9
    # An interval that says nothing would always hold the truth.
    assert width < 40


@pytest.mark.parametrize("broken", [layers_alone, counted])
def test_a_broken_estimator_fails(broken: object) -> None:
    shares = [coverage(LAWS[name], broken)[0] for name in ("independent", "two domains")]
    assert min(shares) < 0.85
