"""Durations of steps that are drawn from a distribution, independently for each rank and step.

A load is a lognormal distribution that begins at `min_ns` and is truncated at `max_ns`. Its mean
and standard deviation are given for the truncated distribution, as papers publish them, and the
parameters are solved for. A draw is a function of seed, rank and step, so the n-th step of a rank
has the same duration in every mode.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from types import MappingProxyType
from typing import Final, NamedTuple

_NORMAL: Final = NormalDist()
_HALVINGS: Final = 100
"""Upper bound on the steps of a bisection."""
_FARTHEST: Final = 30.0
"""Largest distance, in standard deviations, by which the cut may lie below the middle of the uncut
curve. The tail of a double underflows to zero near 37."""
_SIGMA_LEAST: Final = 1e-6
"""Smallest sigma that is tried."""
_SIGMA_MOST: Final = 1000.0
"""Largest sigma that is tried."""


class LoadError(ValueError):
    """Raised if no truncated lognormal has the given properties; the text says why."""


class Curve(NamedTuple):
    """Parameters of the logarithm of the part above `min_ns`, before truncation."""

    mu: float
    """Mean of the logarithm of nanoseconds."""
    sigma: float
    """Standard deviation of the logarithm."""
    kept: float
    """Probability of a value below the cut."""


@dataclass(frozen=True, slots=True)
class Load:
    """A truncated lognormal distribution; mean and deviation are those after truncation."""

    mean_ns: int
    sd_ns: int
    min_ns: int
    max_ns: int

    def draw_ns(self, *, seed: int, rank: int, step: int) -> int:
        """Draw the duration of one step.

        Parameters that fit no curve raise LoadError, as in `curve`.

        Args:
            seed: Seed of the draws.
            rank: Number of the rank.
            step: Number of the step, from 0.

        Returns:
            Nanoseconds, at most `max_ns`.
        """
        curve = self.curve()
        key = f"{seed}:{rank}:{step}".encode()
        share = int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big") / 2**48
        at = share * curve.kept
        # inv_cdf is not defined at 0.
        above = math.exp(curve.mu + curve.sigma * _NORMAL.inv_cdf(max(at, 1e-300)))
        return min(self.min_ns + round(above), self.max_ns)

    def curve(self) -> Curve:
        """Return the fitted curve; raises LoadError if none has this mean and deviation."""
        return _fit(self)


@cache
def _fit(load: Load) -> Curve:
    if not load.min_ns < load.mean_ns < load.max_ns:
        raise LoadError("mean is not between min and max")
    if load.sd_ns <= 0:
        raise LoadError("sd is not above 0")
    mean, top = load.mean_ns - load.min_ns, math.log(load.max_ns - load.min_ns)
    wanted = math.log(load.sd_ns / mean)

    def deviation(sigma: float) -> float:
        """Return log(sd / mean) after truncation, at the mu that gives the wanted mean."""
        return _log_deviation(_mu(sigma, math.log(mean), top), sigma, top)

    # With a growing sigma the curve approaches a power law with this exponent - 1. Its cut then
    # lies exponent x sigma below the middle, and its deviation is the largest possible.
    exponent = mean / (load.max_ns - load.mean_ns)
    most = min(_FARTHEST / exponent, _SIGMA_MOST)
    if deviation(most) <= wanted:
        limit_ms = mean * math.exp(deviation(most)) / 1e6
        raise LoadError(
            f"sd is too large: with this mean, min and max it is below {limit_ms:.4g} ms"
        )
    sigma = _where(deviation, wanted, min(_SIGMA_LEAST, most), most)
    mu = _mu(sigma, math.log(mean), top)
    return Curve(mu, sigma, math.exp(_log_below((top - mu) / sigma)))


def _mu(sigma: float, log_mean: float, top: float) -> float:
    """Return the mu at which the truncated distribution has the wanted mean.

    The mean grows with mu. Without a cut, the lower end of the search interval is the result.

    Args:
        sigma: Standard deviation of the logarithm.
        log_mean: Logarithm of the wanted mean.
        top: Logarithm of the cut.

    Returns:
        mu.
    """

    def mean_of(mu: float) -> float:
        at = (top - mu) / sigma
        return mu + sigma**2 / 2 + _log_below(at - sigma) - _log_below(at)

    low = log_mean - sigma**2 / 2
    reach = sigma**2 + sigma
    while mean_of(low + reach) < log_mean:
        reach *= 2
    return _where(mean_of, log_mean, low, low + reach)


def _log_deviation(mu: float, sigma: float, top: float) -> float:
    """Return log(sd / mean) of the truncated distribution."""
    at = (top - mu) / sigma
    moments = _log_below(at - 2 * sigma) + _log_below(at) - 2 * _log_below(at - sigma)
    squared = math.expm1(sigma**2 + moments)
    return math.log(squared) / 2 if squared > 0 else -math.inf


def _where(grows: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Return the point at which a growing function has the wanted value."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if grows(middle) < wanted:
            low = middle
        else:
            high = middle
        if not low < (low + high) / 2 < high:
            break
    return (low + high) / 2


def _log_below(at: float) -> float:
    """Return the log of the standard normal probability below `at`, also far in the tail."""
    if at > -_FARTHEST:
        return math.log(math.erfc(-at / math.sqrt(2)) / 2)
    inverse = 1 / at**2
    series = 1 - inverse * (1 - 3 * inverse * (1 - 5 * inverse))
    return math.log(series) - at**2 / 2 - math.log(-at * math.sqrt(2 * math.pi))


def _published(mean_ms: int, sd_ms: int, min_ms: int, max_ms: int) -> Load:
    return Load(*(value * 10**6 for value in (mean_ms, sd_ms, min_ms, max_ms)))


LOADS: Final = MappingProxyType(
    {
        "lstm": _published(1235, 706, 201, 3410),
        "transformer": _published(475, 144, 179, 3482),
        "cloud": _published(454, 116, 399, 1892),
    }
)
"""Published distributions of step times, from the paper on eager-SGD (arXiv 1908.04207): an LSTM on
the videos of UCF101, a Transformer on WMT16, and ResNet-50 on a virtual machine of a cloud."""


def shifted_ns(least_ns: int, most_ns: int, *, rank: int, step: int, ranks: int) -> int:
    """Return the delay of a rank in a step, one of `ranks` delays between a least and a most.

    The delays are evenly spaced. In each step a rank has the next one, so all ranks have each of
    them in turn.

    Args:
        least_ns: Shortest delay.
        most_ns: Longest delay.
        rank: Number of the rank.
        step: Number of the step.
        ranks: Number of ranks, and of delays.

    Returns:
        Nanoseconds.
    """
    at = (rank + step) % ranks
    return least_ns + (most_ns - least_ns) * at // max(1, ranks - 1)
