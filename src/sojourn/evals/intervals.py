"""95 % confidence intervals: Wilson's for shares, the bootstrap for means and differences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_Z = 1.959963984540054  # of 95 %
_RESAMPLES = 2000
_NUMBERS_AT_A_TIME = 1 << 22


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % confidence interval, which is NaN where a single example gives none."""

    value: float
    low: float
    high: float


def share(scores: np.ndarray) -> Estimate:
    """The mean of zeros and ones, with Wilson's interval."""
    count = len(scores)
    if not count:
        return Estimate(math.nan, math.nan, math.nan)
    mean, z2 = float(scores.mean()), _Z**2 / count
    centre = (mean + z2 / 2) / (1 + z2)
    half = _Z / (1 + z2) * math.sqrt(mean * (1 - mean) / count + z2 / count / 4)
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half))


def mean(scores: np.ndarray) -> Estimate:
    """The bootstrap's percentiles over examples."""
    return ratio(scores, np.ones(len(scores)))


def ratio(sums: np.ndarray, weights: np.ndarray) -> Estimate:
    """sum(sums) / sum(weights), such as a loss over tokens; whole examples are drawn again."""
    total = float(weights.sum())
    if not total:
        return Estimate(math.nan, math.nan, math.nan)
    drawn = _resample(np.stack([sums, weights]).astype(np.float64)) if len(sums) > 1 else np.full((2, 1), math.nan)
    return _percentiles(float(sums.sum()) / total, drawn[0] / drawn[1])


def difference(ours: tuple[np.ndarray, np.ndarray], theirs: tuple[np.ndarray, np.ndarray]) -> Estimate:
    """Of two ratios over the same examples, (sums, weights) each: both are drawn again together."""
    value = float(ours[0].sum() / ours[1].sum() - theirs[0].sum() / theirs[1].sum())
    if len(ours[0]) < 2:
        return Estimate(value, math.nan, math.nan)
    drawn = _resample(np.stack([*ours, *theirs]).astype(np.float64))
    return _percentiles(value, drawn[0] / drawn[1] - drawn[2] / drawn[3])


def _resample(columns: np.ndarray) -> np.ndarray:
    """Sums of each column over examples drawn with replacement, 2,000 times; the same draws each time."""
    rng, count = np.random.default_rng(0), columns.shape[1]
    at_a_time = max(1, _NUMBERS_AT_A_TIME // count)
    parts = []
    for start in range(0, _RESAMPLES, at_a_time):
        rows = rng.integers(0, count, (min(at_a_time, _RESAMPLES - start), count))
        parts.append(columns[:, rows].sum(-1))
    return np.concatenate(parts, 1)


def _percentiles(value: float, drawn: np.ndarray) -> Estimate:
    with np.errstate(invalid="ignore"):
        low, high = np.nanpercentile(drawn, (2.5, 97.5)) if np.isfinite(drawn).any() else (math.nan, math.nan)
    return Estimate(value, float(low), float(high))
