"""Does the demand change over the training? Then old steps say little about coming ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .optional import scipy_stats
from .tail import correlation_length

__all__ = ["Drift", "find_drift", "level_noise"]

_LEAST_STEPS = 64
_CHANCE = 1e-3
_BLOCKS = 8
# Standard error of the difference between a block and the line through the seven after it, in those of a block.
_EXTRAPOLATED = math.sqrt(1 + 1 / 7 + 16 / 28)


@dataclass(frozen=True)
class Drift:
    """Change of the demand over a trace.

    Attributes:
        changed: whether there is a change that chance does not explain.
        first: steps before this one are left out, because the demand was another then.
        slope_J: what remains: trend of log(rows) over the steps used, for each column, 0 where not significant.
        change: relative change of the mean demand from the first to the last eighth of the trace.
        level_error: standard error of the relative level at the end of the trace, where a trend was removed: that
            of the slope, and of taking the trend as straight, which may miss a twelfth of the square of the change.
    """

    changed: bool
    first: int
    slope_J: np.ndarray
    change: float
    level_error: float = 0.0

    def recentre(self, columns_SJ: np.ndarray) -> np.ndarray:
        """The steps used, as they would be at the end of the trace."""
        used = columns_SJ[self.first :].astype(float)
        ahead = np.arange(len(used) - 1, -1, -1)[:, None]
        return used * np.exp(self.slope_J * ahead)


def find_drift(columns_SJ: np.ndarray) -> Drift:
    """Test ``[S, J]`` demands (rows or pairs of the layers) for drift.

    While the beginning of the steps differs from the rest by more than chance, in level or in spread, and enough
    steps are left, the beginning is dropped: an eighth of them (the first steps of a training), or the first half.
    A remaining linear trend of the logarithm is then estimated.
    """
    logs = np.log(np.maximum(columns_SJ.astype(float), 1.0))
    size = len(logs)
    eighth = max(1, size // _BLOCKS)
    change = float(np.expm1(logs[-eighth:].mean() - logs[:eighth].mean()))
    first, least = 0, max(_LEAST_STEPS, size // 5)
    while size - first > least:
        cut = _beginning_to_drop(logs[first:])
        if not cut or size - first - cut < least:
            break
        first += cut
    slope_J, error_J = _slopes(logs[first:])
    used = size - first
    # At the end, half a trace from its middle, and as much again for the mean that the trend turns around.
    level = np.hypot(error_J * used / 2 * math.sqrt(4 / 3), (slope_J * used) ** 2 / 12)
    level_error = float(level[slope_J != 0].max()) if slope_J.any() else 0.0
    return Drift(first > 0 or bool(slope_J.any()), first, slope_J, change, level_error)


def _beginning_to_drop(logs_SJ: np.ndarray) -> int:
    """Steps at the beginning that are unlike the rest; 0 where there are none."""
    length = len(logs_SJ) // _BLOCKS
    blocks = logs_SJ[-length * _BLOCKS :].reshape(_BLOCKS, length, -1)
    means = blocks.mean(1)
    beginning = len(logs_SJ) - length * (_BLOCKS - 1)
    # A steady trend is no reason to drop anything: the first block is held against the line through the others.
    difference_J = means[0] - _line_at_zero(means[1:])
    if _significant(difference_J, _block_error(blocks) * _EXTRAPOLATED, 4 * _BLOCKS):
        return beginning
    spread = np.log(np.maximum(np.quantile(blocks, 0.9, axis=1) - np.quantile(blocks, 0.1, axis=1), 1e-6))
    error_J = spread[1:].std(0, ddof=1) * math.sqrt(1 + 1 / (_BLOCKS - 1))
    if _significant(spread[0] - spread[1:].mean(0), error_J, _BLOCKS - 2):
        return beginning
    half = _BLOCKS // 2
    error_J = np.sqrt((means[:half].var(0, ddof=1) + means[half:].var(0, ddof=1)) / half)
    if _significant(means[half:].mean(0) - means[:half].mean(0), error_J, _BLOCKS - 2):
        return len(logs_SJ) // 2
    return 0


def _line_at_zero(means_BJ: np.ndarray) -> np.ndarray:
    """Value at block 0 of the line through blocks 1, 2, ...: median of slopes (Theil 1950), median of intercepts."""
    at = np.arange(1, len(means_BJ) + 1)
    first, second = np.triu_indices(len(at), 1)
    slope_J = np.median((means_BJ[second] - means_BJ[first]) / (at[second] - at[first])[:, None], axis=0)
    return np.median(means_BJ - slope_J * at[:, None], axis=0)


def _block_error(blocks_BSJ: np.ndarray) -> np.ndarray:
    """Standard error of a block's mean, from what varies within blocks; the typical block's."""
    length, columns = blocks_BSJ.shape[1:]
    residual = blocks_BSJ - blocks_BSJ.mean(1, keepdims=True)
    series = residual.reshape(-1, columns)
    lengths = np.array([correlation_length(column) for column in series.T])
    return np.sqrt(np.median(residual.var(1), axis=0) * lengths / length)


def _significant(difference_J: np.ndarray, error_J: np.ndarray, freedom: int) -> bool:
    """Whether any column differs by more than chance, with Bonferroni's bound for the number of columns."""
    limit = scipy_stats().t.ppf(1 - _CHANCE / (2 * difference_J.size), freedom)
    return bool((np.abs(difference_J) > limit * np.maximum(error_J, 1e-12)).any())


def _slopes(logs_SJ: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Trend of each column a step, 0 where it is not significant, and its standard error."""
    size, columns = logs_SJ.shape
    if size < 20:
        return np.zeros(columns), np.zeros(columns)
    errors = np.zeros(columns)
    time = np.arange(size) - (size - 1) / 2
    slopes = time @ logs_SJ / (time @ time)
    for column in range(columns):
        residual = logs_SJ[:, column] - logs_SJ[:, column].mean() - slopes[column] * time
        length = correlation_length(residual)
        error = math.sqrt(residual.var() * length / (time @ time))
        if not _significant(slopes[column : column + 1], np.array([error]), max(2, int(size / length) - 2)):
            slopes[column] = 0.0
        errors[column] = error
    return slopes, errors


def level_noise(columns_SJ: np.ndarray, horizon: int) -> float:
    """Standard deviation of the relative level of the next ``horizon`` steps, beyond what chance explains.

    The mean level of eight blocks is taken as a random walk seen through sampling noise; its increments'
    variance grows with the horizon, and the mean over the horizon has a third of the end's.
    """
    size = len(columns_SJ)
    if size < 5 * _BLOCKS:
        return 0.0
    logs = np.log(np.maximum(columns_SJ.astype(float), 1.0)).mean(1)
    length = size // _BLOCKS
    blocks = logs[-length * _BLOCKS :].reshape(_BLOCKS, length)
    residual = (blocks - blocks.mean(1, keepdims=True)).ravel()
    noise = residual.var() * correlation_length(residual) / length
    walk = max(0.0, float(np.mean(np.diff(blocks.mean(1)) ** 2)) - 2 * noise)
    return math.sqrt(walk * (horizon / length) / 3)
