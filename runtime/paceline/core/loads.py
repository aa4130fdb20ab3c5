"""How long the steps of a rank take: drawn from a distribution, each rank and step by itself.

A load is a lognormal that begins at `min_ns` and is cut off at `max_ns`. What is given are mean and
standard deviation of what remains, as papers publish them, so the parameters are solved for. Draws
are a function of seed, rank and step: the n-th step of a rank is the same one in every mode.
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
_FARTHEST: Final = 30.0
"""Standard deviations by which the cut may lie below the middle of the uncut curve: what is left
above zero in a double ends near 37."""
_SIGMA_LEAST: Final = 1e-6
_SIGMA_MOST: Final = 1000.0


class LoadError(ValueError):
    """No lognormal is like that; the text says why."""


class Curve(NamedTuple):
    """Of the logarithm of what is above `min_ns`, before the cut."""

    mu: float
    sigma: float
    kept: float
    """Share that lies below the cut."""


@dataclass(frozen=True, slots=True)
class Load:
    """Mean and standard deviation are those of the draws: the cut is accounted for."""

    mean_ns: int
    sd_ns: int
    min_ns: int
    max_ns: int

    def draw_ns(self, *, seed: int, rank: int, step: int) -> int:
        """What step `step` (0, 1, ...) of `rank` takes. Raises LoadError as `curve` does."""
        curve = self.curve()
        key = f"{seed}:{rank}:{step}".encode()
        share = int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big") / 2**48
        at = share * curve.kept
        # A probability of 0 has no place on the curve.
        above = math.exp(curve.mu + curve.sigma * _NORMAL.inv_cdf(max(at, 1e-300)))
        return min(self.min_ns + round(above), self.max_ns)

    def curve(self) -> Curve:
        """Raises LoadError if nothing has this mean and deviation between these bounds."""
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
        """log(sd / mean) of what is kept, at the mu that gives the mean."""
        return _log_deviation(_mu(sigma, math.log(mean), top), sigma, top)

    # With sigma the curve goes to a power law of this exponent - 1, whose cut is exponent x sigma
    # below its middle, and whose deviation is the largest that there is.
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
    """That gives the mean; the mean grows with it. Without a cut it is the lower end."""

    def mean_of(mu: float) -> float:
        at = (top - mu) / sigma
        return mu + sigma**2 / 2 + _log_below(at - sigma) - _log_below(at)

    low = log_mean - sigma**2 / 2
    reach = sigma**2 + sigma
    while mean_of(low + reach) < log_mean:
        reach *= 2
    return _where(mean_of, log_mean, low, low + reach)


def _log_deviation(mu: float, sigma: float, top: float) -> float:
    at = (top - mu) / sigma
    moments = _log_below(at - 2 * sigma) + _log_below(at) - 2 * _log_below(at - sigma)
    squared = math.expm1(sigma**2 + moments)
    return math.log(squared) / 2 if squared > 0 else -math.inf


def _where(grows: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Where a growing function has the wanted value."""
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
    """Logarithm of the share of a standard normal below `at`, far out too."""
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
"""Times of a step that eager-SGD's paper (arXiv 1908.04207) gives: an LSTM on the videos of UCF101,
a Transformer on WMT16, ResNet-50 on a virtual machine of a cloud."""


def shifted_ns(least_ns: int, most_ns: int, *, rank: int, step: int, ranks: int) -> int:
    """One of `ranks` delays, evenly from the least to the most; each step it is the next one, so
    that all ranks have each of them in turn."""
    at = (rank + step) % ranks
    return least_ns + (most_ns - least_ns) * at // max(1, ranks - 1)
