"""Token buckets that divide a shared resource between jobs and namespaces.

Each bucket has a burst and a rate per second. A request of a job is taken from the job's bucket and
from the bucket of its namespace, or from neither. All jobs of a tenant together therefore get at
most their namespace's share, and one namespace cannot empty the bucket of another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeVar

Key = tuple[str, str]
"""Namespace and name of a job."""
Owner = TypeVar("Owner", Key, str)
KEPT: Final = 1024
"""Number of additional buckets after which full ones are dropped, such as of deleted jobs."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Limit of a bucket: at most `burst + per_s * t` over any window of `t` seconds."""

    per_s: float
    burst: float


@dataclass(slots=True)
class Bucket:
    """A token bucket; `level` is negative while it is in debt."""

    rate: Rate
    level: float
    at_s: float

    def fill(self, rate: Rate, now_s: float) -> None:
        """Add what was gained until `now_s`, and apply `rate` from now on."""
        gained = max(0.0, now_s - self.at_s) * self.rate.per_s
        self.level = min(self.level + gained, self.rate.burst, rate.burst)
        self.rate, self.at_s = rate, max(now_s, self.at_s)

    def missing_s(self, amount: float) -> float:
        """Return the seconds until `amount`, capped at the burst, is available."""
        lacking = min(amount, self.rate.burst) - self.level
        return max(0.0, lacking / self.rate.per_s)


@dataclass(slots=True)
class Shares:
    """Buckets of all jobs and namespaces for one resource, such as bytes read."""

    namespace: Rate
    jobs: dict[Key, Bucket] = field(default_factory=dict)
    namespaces: dict[str, Bucket] = field(default_factory=dict)
    _look_at: int = KEPT

    def take(self, key: Key, rate: Rate, amount: float, now_s: float) -> float:
        """Take `amount` for a job if both its own and its namespace's bucket hold it.

        Args:
            key: The job.
            rate: Limit of the job's own bucket.
            amount: The amount to take. No bucket holds more than its burst, so a full bucket is
                enough for a larger amount; it is in debt afterwards.
            now_s: Seconds of a monotonic clock.

        Returns:
            0.0 if the amount was taken; otherwise the seconds until it may be available, and
            nothing was taken.
        """
        both = self._both(key, rate, now_s)
        wait_s = max(bucket.missing_s(amount) for bucket in both)
        if wait_s == 0.0:
            for bucket in both:
                bucket.level -= amount
        return wait_s

    def spend(self, key: Key, rate: Rate, amount: float, now_s: float) -> None:
        """Take an amount that is known only afterwards, such as the duration of an operation.

        The buckets may be in debt afterwards. `take` then gives nothing until the debt is paid.
        """
        for bucket in self._both(key, rate, now_s):
            bucket.level -= amount

    def _both(self, key: Key, rate: Rate, now_s: float) -> tuple[Bucket, Bucket]:
        if len(self.jobs) + len(self.namespaces) >= self._look_at:
            self._drop_full(now_s)
        own = self.jobs.setdefault(key, Bucket(rate, rate.burst, now_s))
        shared = self.namespaces.setdefault(
            key[0], Bucket(self.namespace, self.namespace.burst, now_s)
        )
        own.fill(rate, now_s)
        shared.fill(self.namespace, now_s)
        return own, shared

    def _drop_full(self, now_s: float) -> None:
        """Drop buckets that are full, since they are the same as new ones.

        A bucket that is not full stays even if its job is gone. A job that is recreated under the
        same name must not get a second burst.
        """
        self.jobs = _not_full(self.jobs, now_s)
        self.namespaces = _not_full(self.namespaces, now_s)
        self._look_at = len(self.jobs) + len(self.namespaces) + KEPT


def _not_full(buckets: dict[Owner, Bucket], now_s: float) -> dict[Owner, Bucket]:
    for bucket in buckets.values():
        bucket.fill(bucket.rate, now_s)
    return {owner: each for owner, each in buckets.items() if each.level < each.rate.burst}
