"""What one job, and one namespace, may take of something that all jobs share.

Token buckets: each has so much at once and so much per second. A job takes from its own bucket and
from that of its namespace, or from neither, so many jobs of one tenant get together no more than
their namespace's share, and nothing that one namespace does empties the bucket of another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeVar

Key = tuple[str, str]
"""(namespace, name) of a job."""
Owner = TypeVar("Owner", Key, str)
KEPT: Final = 1024
"""Buckets of jobs that are gone are looked for when there are so many more."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Over any window of `t` seconds, `burst + per_s * t` at most."""

    per_s: float
    burst: float


@dataclass(slots=True)
class Bucket:
    rate: Rate
    level: float
    at_s: float

    def fill(self, rate: Rate, now_s: float) -> None:
        """Let the time until `now_s` pass; from now on `rate` holds."""
        gained = max(0.0, now_s - self.at_s) * self.rate.per_s
        self.level = min(self.level + gained, self.rate.burst, rate.burst)
        self.rate, self.at_s = rate, max(now_s, self.at_s)

    def missing_s(self, amount: float) -> float:
        """Return how long it takes until `amount` is there; no bucket holds more than its burst."""
        lacking = min(amount, self.rate.burst) - self.level
        return max(0.0, lacking / self.rate.per_s)


@dataclass(slots=True)
class Shares:
    """The shares of one thing, such as bytes read or seconds of decoding."""

    namespace: Rate
    jobs: dict[Key, Bucket] = field(default_factory=dict)
    namespaces: dict[str, Bucket] = field(default_factory=dict)
    _look_at: int = KEPT

    def take(self, key: Key, rate: Rate, amount: float, now_s: float) -> float:
        """Take `amount` for a job, if its own bucket and that of its namespace have it.

        Args:
            key: The job.
            rate: Its own share.
            amount: What it asks for. More than a burst is given to nobody at once, so a full bucket
                is enough for it, and is in debt afterwards.
            now_s: Seconds of a clock that never goes back.

        Returns:
            0.0 if it was taken; else nothing was, and it may be there after so many seconds.
        """
        both = self._both(key, rate, now_s)
        wait_s = max(bucket.missing_s(amount) for bucket in both)
        if wait_s == 0.0:
            for bucket in both:
                bucket.level -= amount
        return wait_s

    def spend(self, key: Key, rate: Rate, amount: float, now_s: float) -> None:
        """Take `amount` that is known only now, such as how long something took: the buckets may be
        in debt afterwards, and nothing more is given until it is paid."""
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
        """A full bucket is as good as a new one. One that is not full stays though its job is gone:
        a job that is made anew under its name must not get a second burst."""
        self.jobs = _not_full(self.jobs, now_s)
        self.namespaces = _not_full(self.namespaces, now_s)
        self._look_at = len(self.jobs) + len(self.namespaces) + KEPT


def _not_full(buckets: dict[Owner, Bucket], now_s: float) -> dict[Owner, Bucket]:
    for bucket in buckets.values():
        bucket.fill(bucket.rate, now_s)
    return {owner: each for owner, each in buckets.items() if each.level < each.rate.burst}
