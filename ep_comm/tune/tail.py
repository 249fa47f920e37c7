"""How likely is it that a value beyond the sample occurs: extreme-value fit with bootstrap intervals.

Above a high threshold ``u`` the excesses of (nearly) any distribution follow a generalised Pareto distribution
(Pickands 1975, Balkema and de Haan 1974)::

    P(X > x) = P(X > u) * (1 + shape * (x - u) / scale) ** (-1 / shape)

The shape and scale are estimated by weighting the profile likelihood over a grid (Zhang and Stephens, "A new and
efficient estimation method for the generalized Pareto distribution", Technometrics 51, 2009), which never fails
to converge; a weak prior on the shape keeps it in the range of sums of counts. Steps next to each other are alike,
so the bootstrap draws blocks of steps (Kuensch 1989), not steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Interval", "TailFit", "block_weights", "correlation_length", "fit_tail", "tail_share"]

_GRID = 64
_SHAPE_PRIOR = (0.0, 0.25)
_MIN_EXCESSES = 20
_MAX_EXCESSES = 400
_SHARES = (0.1, 0.05, 0.025)
# With estimated parameters the distance, times the root of the count, is above this in about one case of ten.
_KS_LIMIT = 0.85


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval.

    Attributes:
        value: the estimate.
        low, high: ends of the interval.
        level: probability that the interval is meant to have, 0.95 unless said otherwise.
    """

    value: float
    low: float
    high: float
    level: float = 0.95

    @classmethod
    def of(cls, value: float, draws: np.ndarray, level: float = 0.95) -> Interval:
        """Quantiles of bootstrap draws around ``value``."""
        low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
        return cls(float(value), float(min(low, value)), float(max(high, value)), level)

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class TailFit:
    """Distribution of a sample's upper part; arrays over bootstrap draws, the first entry being the fit itself.

    Attributes:
        threshold: u; the fit holds above it.
        above_D: probability to be above u.
        shape_D, scale_D: of the excesses.
        values: the sample, sorted.
        order: the sample's order, as of ``argsort``.
        weights_DX: how often each value was drawn, ``[D, S]``, in the sample's own order.
    """

    threshold: float
    above_D: np.ndarray
    shape_D: np.ndarray
    scale_D: np.ndarray
    values: np.ndarray
    order: np.ndarray
    weights_DX: np.ndarray

    def exceedance(self, level: float) -> np.ndarray:
        """P(X > level) of every draw, ``[D]``."""
        if level < self.threshold:
            at = np.searchsorted(self.values, level, side="right")
            return self.weights_DX[:, self.order[at:]].sum(1) / self.weights_DX.sum(1)
        return self.above_D * _survival(level - self.threshold, self.shape_D, self.scale_D)

    def risk(self, level: float) -> float:
        """P(X > level) by the fit itself, without the draws."""
        if level < self.threshold:
            return float(self.values.size - np.searchsorted(self.values, level, side="right")) / self.values.size
        return float(self.above_D[0] * _survival(level - self.threshold, self.shape_D[:1], self.scale_D[:1])[0])

    def quantile(self, probability: np.ndarray) -> np.ndarray:
        """Values that are exceeded with ``probability`` (any shape), by the fit itself."""
        probability = np.asarray(probability, dtype=float)
        inside = np.quantile(self.values, np.clip(1 - probability, 0, 1))
        share = np.maximum(probability, 1e-300) / max(float(self.above_D[0]), 1e-300)
        shape, scale = float(self.shape_D[0]), float(self.scale_D[0])
        beyond = self.threshold + scale * np.expm1(-shape * np.log(share)) / shape
        return np.where(share >= 1, np.minimum(inside, self.threshold), np.maximum(beyond, self.threshold))

    def quantile_of_draws(self, probability: float) -> np.ndarray:
        """The value that is exceeded with ``probability`` in each draw, ``[D]``."""
        share = probability / np.maximum(self.above_D, 1e-12)
        with np.errstate(over="ignore"):
            values = self.threshold + self.scale_D * np.expm1(-self.shape_D * np.log(share)) / self.shape_D
        for draw in np.flatnonzero(share >= 1):
            weights = self.weights_DX[draw, self.order[::-1]].cumsum()
            at = np.searchsorted(weights, probability * weights[-1])
            values[draw] = self.values[::-1][min(at, self.values.size - 1)]
        return values


def tail_share(values: np.ndarray) -> float:
    """The largest share of ``values`` whose excesses look like a generalised Pareto distribution.

    A mixture (a second domain in one batch out of twenty) has a tail of its own above which the law holds. Shares
    are tried from large to small until the Kolmogorov-Smirnov distance of the fit is unremarkable.
    """
    share = _SHARES[0]
    for share in _SHARES:
        fit = fit_tail(values, share=share)
        excess = values[values > fit.threshold] - fit.threshold
        if excess.size < 2 * _MIN_EXCESSES:
            break
        fitted = 1 - _survival(np.sort(excess), fit.shape_D[0], fit.scale_D[0])
        steps = np.arange(excess.size + 1) / excess.size
        distance = max(float(np.abs(fitted - steps[1:]).max()), float(np.abs(fitted - steps[:-1]).max()))
        if distance * np.sqrt(excess.size) < _KS_LIMIT:
            break
    return share


def fit_tail(
    values: np.ndarray, weights_DX: np.ndarray | None = None, *, share: float = 0.1,
    draw_shapes: np.random.Generator | None = None,
) -> TailFit:  # fmt: skip
    """Fit the upper tail of ``values``.

    Args:
        share: part of the values that is taken as the tail; see :func:`tail_share`.
        values: ``[S]``, continuous (add a jitter to counts).
        weights_DX: bootstrap weights of each value, ``[D, S]`` from :func:`block_weights`; None fits only once.
        draw_shapes: draw theta = shape / scale of every entry but the first from its profile likelihood, instead of
            taking the mean.
    """
    if weights_DX is None:
        weights_DX = np.ones((1, values.size), dtype=np.float32)
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    count = int(np.clip(values.size * share, min(_MIN_EXCESSES, values.size // 2), _MAX_EXCESSES))
    threshold = float(ordered[-count - 1]) if values.size > count else float(ordered[0])
    tail = order[values.size - count :]
    excess = np.maximum(values[tail] - threshold, 1e-12)
    weights_DK = weights_DX[:, tail].astype(np.float64)
    above_D = weights_DK.sum(1) / weights_DX.sum(1)
    shape_D, scale_D = _fit_excesses(excess, weights_DK, draw_shapes)
    return TailFit(threshold, above_D, shape_D, scale_D, ordered, order, weights_DX)


def _fit_excesses(
    excess: np.ndarray, weights_DK: np.ndarray, draw: np.random.Generator | None
) -> tuple[np.ndarray, np.ndarray]:
    if excess.size < 3:
        scale = float(excess.mean()) if excess.size else 1e-12
        return np.full(len(weights_DK), 1e-6), np.full(len(weights_DK), scale)
    # theta = shape / scale, from just above the smallest one that the largest excess allows.
    quartile, largest = np.quantile(excess, 0.25), excess[-1]
    grid = np.arange(1, _GRID + 1) - 0.5
    theta_M = -(1.0 / largest + (1.0 - np.sqrt(_GRID / grid)) / (3.0 * max(quartile, 1e-9 * largest)))
    theta_M = theta_M[theta_M * largest > -1 + 1e-9]
    theta_M = np.where(np.abs(theta_M * largest) < 1e-9, 1e-9 / largest, theta_M)
    logs_MK = np.log1p(theta_M[:, None] * excess)
    total_D = np.maximum(weights_DK.sum(1), 1e-9)
    shape_DM = weights_DK @ logs_MK.T / total_D[:, None]
    ratio_DM = np.where(np.abs(shape_DM) < 1e-12, 1e-12, shape_DM) / theta_M
    log_likelihood = -total_D[:, None] * (np.log(np.maximum(ratio_DM, 1e-300)) + shape_DM + 1)
    mean, spread = _SHAPE_PRIOR
    log_likelihood -= (shape_DM - mean) ** 2 / (2 * spread**2)
    weight_DM = np.exp(log_likelihood - log_likelihood.max(1, keepdims=True))
    weight_DM /= weight_DM.sum(1, keepdims=True)
    theta_D = weight_DM @ theta_M
    if draw is not None:
        at = (weight_DM.cumsum(1) < draw.random(len(weight_DM))[:, None]).sum(1).clip(max=theta_M.size - 1)
        theta_D = np.concatenate([theta_D[:1], theta_M[at[1:]]])
    theta_D = np.where(np.abs(theta_D * largest) < 1e-9, 1e-9 / largest, theta_D)
    shape_D = (weights_DK * np.log1p(theta_D[:, None] * excess)).sum(1) / total_D
    # Shape and theta have the same sign, except for rounding where both are next to nothing.
    shape_D = np.where(shape_D * theta_D > 0, shape_D, 1e-9 * np.sign(theta_D))
    return shape_D, shape_D / theta_D


def _survival(excess: float | np.ndarray, shape: np.ndarray, scale: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", over="ignore"):
        # Beyond the end of a bounded tail (shape < 0) log1p(-1) makes the result exactly 0.
        return np.exp(np.minimum(-np.log1p(np.maximum(shape * excess / scale, -1.0)) / shape, 0.0))


def correlation_length(values: np.ndarray) -> float:
    """Integrated autocorrelation time in steps: 1 for independent steps (Sokal's automatic window)."""
    size = values.size
    if size < 8:
        return 1.0
    centred = values - values.mean()
    spectrum = np.abs(np.fft.rfft(centred, 2 * size)) ** 2
    covariance = np.fft.irfft(spectrum)[:size]
    if covariance[0] <= 0:
        return 1.0
    rho = covariance / covariance[0]
    tau = 1.0
    for lag in range(1, size // 2):
        tau += 2 * rho[lag]
        if lag >= 5 * tau:
            break
    return float(np.clip(tau, 1.0, size / 4))


def block_weights(size: int, block: int, draws: int, rng: np.random.Generator) -> np.ndarray:
    """Bootstrap weights ``[1 + draws, size]``: how often each step is drawn; the first row is the sample itself."""
    blocks = -(-size // block)
    drawn = rng.multinomial(blocks, np.full(blocks, 1 / blocks), size=draws)
    weights = np.repeat(drawn, block, axis=1)[:, :size]
    return np.concatenate([np.ones((1, size)), weights]).astype(np.float32)
