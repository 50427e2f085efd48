"""Statistics of paired rounds: intervals, p-values of a family of metrics, and how many rounds a
difference would need.

docs/decisions/2026-11-29-comparison-statistics.md says why these and not others.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import OctavoError

try:
    from scipy.special import chdtri, chndtrinc, stdtrit
except ImportError:
    raise OctavoError("statistics need scipy: pip install 'octavo[bench]'") from None

Float64 = NDArray[np.float64]

LEAST_ROUNDS = 6
"""With fewer no sign pattern is rarer than 5%: 2 / 2**6 is 0.031."""

RARE = 5
"""Categories with fewer counts are pooled."""

_EXACT = 12  # up to so many rounds all sign patterns are looked at
_DRAWS = 4096


def standard_error(values: Float64) -> float:
    """Of the mean; rounding alone counts as nothing."""
    count = len(values)
    if count < 2:
        return math.inf
    spread = float(values.std(ddof=1))
    noise = 1e-12 * float(np.abs(values).max(initial=0.0))
    return 0.0 if spread <= noise else spread / math.sqrt(count)


def interval(values: Float64, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Confidence interval of the mean of a few independent values, by the studentized bootstrap
    (bootstrap-t: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 12.5; Hall,
    Annals of Statistics 16(3), 1988), never narrower than Student's. Infinite for one value."""
    mean, error = float(values.mean()), standard_error(values)
    if error in (0.0, math.inf):
        return (mean, mean) if error == 0 else (-math.inf, math.inf)
    count, tail = len(values), (1 - level) / 2
    draw = np.random.RandomState(seed)
    resampled = values[draw.randint(0, count, (_DRAWS, count))]
    errors = resampled.std(axis=1, ddof=1) / math.sqrt(count)
    usable = errors > 1e-9 * error  # a resample of one value says nothing of the spread
    ratios = np.sort((resampled.mean(axis=1)[usable] - mean) / errors[usable])
    low, high = np.quantile(ratios, (tail, 1 - tail))
    student = float(stdtrit(count - 1, 1 - tail))
    # What is cut off is bounded: with few values single resamples have hardly any spread.
    bound = 3 * student
    above = min(max(student, -float(low)), bound)
    below = min(max(student, float(high)), bound)
    return mean - below * error, mean + above * error


def _signs(count: int, seed: int) -> Float64:
    """Sign patterns, float64[P, count], the first all plus: every one of them, or random ones."""
    if count <= _EXACT:
        return np.array(list(itertools.product((1.0, -1.0), repeat=count)))
    draw = np.random.RandomState(seed)
    drawn = draw.choice((1.0, -1.0), (_DRAWS, count))
    drawn[0] = 1.0
    return np.asarray(drawn)


def _statistics(differences: Float64, signs: Float64) -> Float64:
    """|t| of every metric under every sign pattern, float64[P, M]. Values that agree exactly have
    an infinite t; nothing but zeros have 0."""
    count = differences.shape[1]
    means = signs @ differences.T / count
    squares = (differences**2).sum(axis=1)
    variances = (squares - count * means**2) / max(1, count - 1)
    largest = np.abs(differences).max(axis=1)
    noise = (1e-9 * largest) ** 2
    errors = np.sqrt(np.maximum(variances, 0) / count)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.abs(means) / errors
    t = np.where(variances <= noise, np.inf, t)
    return np.asarray(np.where(largest == 0, 0.0, t))


def adjusted_p_values(differences: Float64, seed: int = 0) -> Float64:
    """P-values of metrics whose paired differences are the rows of float64[M, n], adjusted so that
    the chance of any false alarm among them is bounded by the level that they are compared with.

    Sign flips (Fisher, The Design of Experiments, 1935) are exact where A and B are exchangeable,
    whatever the distribution; the step-down maximum over the metrics (Westfall and Young,
    Resampling-Based Multiple Testing, 1993; Romano and Wolf, JASA 100, 2005) takes their dependence
    into account.
    """
    metrics, count = differences.shape
    if not metrics:
        return np.empty(0)
    if count < 2:
        return np.ones(metrics)
    t = _statistics(differences, _signs(count, seed))
    observed = t[0]
    order = np.argsort(-observed, kind="stable")
    adjusted, worst = np.ones(metrics), 0.0
    # From the least to the greatest, the maximum over what is not rejected yet grows.
    maxima = np.maximum.accumulate(t[:, order[::-1]], axis=1)[:, ::-1]
    for place, metric in enumerate(order):
        if observed[metric] == 0:
            break
        share = float((maxima[:, place] >= observed[metric] * (1 - 1e-9)).mean())
        worst = max(worst, share)
        adjusted[metric] = worst
    return adjusted


def rounds_needed(
    effect: float, spread: float, metrics: int, *, alpha: float = 0.05, power: float = 0.8
) -> int | None:
    """Rounds with which a mean difference of `effect` with a standard deviation `spread` of single
    rounds is shown among so many metrics, with probability `power`. None: over 1000."""
    if effect == 0:
        return None
    if spread == 0:
        return LEAST_ROUNDS
    for count in range(LEAST_ROUNDS, 1001):
        wanted = _detection_limit(count, metrics, alpha, power)
        if abs(effect) * math.sqrt(count) >= wanted * spread:
            return count
    return None


def detectable(
    spread: float, rounds: int, metrics: int, *, alpha: float = 0.05, power: float = 0.8
) -> float:
    """The smallest mean difference that so many rounds would show with probability `power`."""
    if rounds < LEAST_ROUNDS:
        return math.inf
    return _detection_limit(rounds, metrics, alpha, power) * spread / math.sqrt(rounds)


def _detection_limit(rounds: int, metrics: int, alpha: float, power: float) -> float:
    """Mean difference, in standard errors, that is shown with probability `power`: the sum of two
    quantiles of Student's t, the level divided among the metrics (Bonferroni)."""
    tail = 1 - alpha / 2 / max(1, metrics)
    return float(stdtrit(rounds - 1, tail) + stdtrit(rounds - 1, power))


def two_samples_differ(
    first: NDArray[np.int64], second: NDArray[np.int64], seed: int = 0, draws: int = 2000
) -> float:
    """P-value of the hypothesis that two samples of categories come from one distribution.

    first, second: int64[P, K] counts of K categories for P prompts. Pearson's chi-square summed
    over the prompts, categories with under `RARE` counts in both together pooled; its distribution
    is that of random divisions of the counts (a permutation test)."""
    draw = np.random.default_rng(seed)
    observed, simulated = 0.0, np.zeros(draws)
    for a, b in zip(first, second, strict=True):
        one, both = _pooled(a, b)
        if len(both) < 2:
            continue
        size, whole = int(one.sum()), int(both.sum())
        expected = both * (size / whole)
        scale = expected * (1 - size / whole)
        observed += float(((one - expected) ** 2 / scale).sum())
        drawn = draw.multivariate_hypergeometric(both, size, draws)
        simulated += ((drawn - expected) ** 2 / scale).sum(axis=1)
    return float((1 + (simulated >= observed - 1e-9).sum()) / (1 + draws))


def shown_distance(
    first: NDArray[np.int64], second: NDArray[np.int64], *, alpha: float = 0.01, power: float = 0.8
) -> float | None:
    """The smallest total variation distance, in each of the prompts, that samples of this size
    would show with probability `power` by the test of `two_samples_differ`, however the
    distributions differ. None: they cannot show any.

    Pearson's statistic is then noncentral chi-square. For n draws a side and a distance d its
    noncentrality is n/2 times the sum of (difference of shares)^2 / share, which is at least
    2 n d^2 a prompt (Cauchy and Schwarz). Of the whole distance that much less is seen as may lie
    among the rare categories, which the test sees as one: at most their probability."""
    size = int(min(first.sum(axis=1).min(), second.sum(axis=1).min()))
    if size < RARE:
        return None  # even tokens that only one side draws are pooled
    kinds = [len(_pooled(a, b)[1]) for a, b in zip(first, second, strict=True)]
    freedom = sum(max(1, kind - 1) for kind in kinds)
    hidden = np.array([_unseen(a + b) for a, b in zip(first, second, strict=True)])
    # The noncentrality with which the statistic passes its critical value as often as `power`.
    needed = float(chndtrinc(chdtri(freedom, alpha), freedom, 1 - power)) / (2 * size)
    low, high = 0.0, 1.0
    if (np.maximum(high - hidden, 0) ** 2).sum() < needed:
        return None
    for _ in range(30):
        middle = (low + high) / 2
        enough = (np.maximum(middle - hidden, 0) ** 2).sum() >= needed
        low, high = (low, middle) if enough else (middle, high)
    return high


def _unseen(total: NDArray[np.int64]) -> float:
    """Probability of all categories with under `RARE` counts, those never drawn among them. What
    was drawn k times has together about (k + 1) N(k + 1) / N, N(k) being the number of categories
    drawn k times (Good, The population frequencies of species, Biometrika 40, 1953)."""
    return float(total[total <= RARE].sum() / max(1, total.sum()))


def _pooled(
    a: NDArray[np.int64], b: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first sample's counts and those of both, rare categories together."""
    total = a + b
    rare = total < RARE
    one = np.append(a[~rare], a[rare].sum())
    both = np.append(total[~rare], total[rare].sum())
    return one[both > 0], both[both > 0]
