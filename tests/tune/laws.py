"""Demands with a known law: the truth that predictions are held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ep_comm.tune.risk import Columns

ALIGNMENT = 16
LAYERS = 4
_TRUTH_STEPS = 200_000

Draw = Callable[[int, np.random.Generator], np.ndarray]


def independent(steps: int, rng: np.random.Generator) -> np.ndarray:
    return 1300 + 50 * rng.standard_normal((steps, LAYERS))


def correlated_layers(steps: int, rng: np.random.Generator) -> np.ndarray:
    common = rng.standard_normal((steps, 1))
    return 1300 + 50 * (0.8 * common + 0.6 * rng.standard_normal((steps, LAYERS)))


def heavy_tail(steps: int, rng: np.random.Generator) -> np.ndarray:
    return 1200 + 50 * rng.pareto(4, size=(steps, LAYERS))


def log_normal(steps: int, rng: np.random.Generator) -> np.ndarray:
    return 1000 + 100 * np.exp(0.7 * rng.standard_normal((steps, LAYERS)))


def two_domains(steps: int, rng: np.random.Generator) -> np.ndarray:
    """One document type in twelve, ten steps at a time, loads some layers much more."""
    other = np.repeat(rng.random(-(-steps // 10)) < 0.08, 10)[:steps, None]
    return 1200 + 40 * rng.standard_normal((steps, LAYERS)) + other * np.linspace(100, 500, LAYERS)


def slow_steps(steps: int, rng: np.random.Generator) -> np.ndarray:
    """Neighbouring steps are alike: an autoregression with coefficient 0.8."""
    noise = rng.standard_normal((steps, LAYERS))
    values = np.empty_like(noise)
    values[0] = noise[0]
    for step in range(1, steps):
        values[step] = 0.8 * values[step - 1] + 0.6 * noise[step]
    return 1300 + 50 * values


@dataclass(frozen=True)
class Law:
    """A law of demands; ``drift`` is the relative change of all demands over a trace."""

    draw: Draw
    drift: float = 0.0

    def trace(self, steps: int, seed: int) -> Columns:
        """A trace of ``steps`` steps, in multiples of the alignment."""
        values = self.draw(steps, np.random.default_rng(seed))
        values = values * (1 + self.drift * np.linspace(-1, 0, steps)[:, None])
        return _columns(values)

    def truth(self) -> np.ndarray:
        """Many steps of the law as it is at the end of a trace."""
        return _columns(self.draw(_TRUTH_STEPS, np.random.default_rng(10**6))).values_SJ


def _columns(values: np.ndarray) -> Columns:
    rows = (np.ceil(values / ALIGNMENT) * ALIGNMENT).astype(np.int64)
    return Columns(rows, np.full(LAYERS, ALIGNMENT), np.full(LAYERS, 10**6), LAYERS)


LAWS = {
    "independent": Law(independent),
    "correlated layers": Law(correlated_layers),
    "heavy tail": Law(heavy_tail),
    "log-normal": Law(log_normal),
    "two domains": Law(two_domains),
    "slow steps": Law(slow_steps),
    "drift": Law(independent, drift=0.15),
}
