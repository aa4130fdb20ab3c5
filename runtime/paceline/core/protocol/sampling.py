"""The samples of each lease: index arithmetic over keyed permutations.

An epoch is one permutation of all sample numbers, cut into leases. A lease is what one optimizer
step of one rank consumes: `accumulate` batches (D1). Leases are numbered through all epochs. So the
number of a lease and the plan give its epoch, its samples and their order, on every rank and
without a message.

The permutation is our own, in integer arithmetic over SHAKE-256, because torch.randperm changes
with versions and devices. It is a Feistel network over pairs (left, right) of numbers below about
sqrt(samples), whose round functions are random tables. An index costs O(1) and an epoch keeps
O(sqrt(samples)) numbers, so a rank pays only for the leases that it holds.
"""

from __future__ import annotations

import sys
from array import array
from functools import lru_cache
from hashlib import shake_256
from math import isqrt
from typing import Final

from paceline.core.protocol.records import DataPlan

FEISTEL_ROUNDS: Final = 6
"""Number of Feistel rounds. Four make a strong permutation of large domains (Luby and Rackoff); two
more help small ones."""


def leases_per_epoch(plan: DataPlan) -> int:
    """Return the optimizer steps in one pass over the data, all ranks together; 0 without data."""
    if plan.samples <= 0:
        return 0
    size = plan.batch * plan.accumulate
    return plan.samples // size if plan.drop_last else -(-plan.samples // size)


def left_out_per_epoch(plan: DataPlan) -> int:
    """Return how many samples of an epoch are in no lease because of `drop_last`."""
    if not plan.drop_last or plan.samples <= 0:
        return 0
    return plan.samples % (plan.batch * plan.accumulate)


def total_leases(plan: DataPlan) -> int:
    """Return the number of leases in all epochs; they are numbered from 0."""
    return leases_per_epoch(plan) * plan.epochs


def epoch_of(plan: DataPlan, lease: int) -> int:
    """Return the epoch of a lease, from 0."""
    return lease // leases_per_epoch(plan)


def samples_of(plan: DataPlan, lease: int) -> int:
    """Return the number of samples in a lease; only the last lease of an epoch can have fewer."""
    size = plan.batch * plan.accumulate
    start = lease % leases_per_epoch(plan) * size
    return min(size, plan.samples - start)


def batches_of(plan: DataPlan, lease: int) -> list[list[int]]:
    """Return the sample numbers of a lease as `accumulate` batches, or fewer at an epoch's end."""
    epoch, index = divmod(lease, leases_per_epoch(plan))
    start = index * plan.batch * plan.accumulate
    numbers = Permutation.of(plan.samples, plan.seed, epoch).range(
        start, start + samples_of(plan, lease)
    )
    return [numbers[at : at + plan.batch] for at in range(0, len(numbers), plan.batch)]


class Permutation:
    """Order of one epoch: a bijection of range(samples), keyed by (seed, epoch)."""

    def __init__(self, samples: int, seed: int, epoch: int) -> None:
        assert samples >= 1, samples
        self.samples = samples
        # The sides left x right are the smallest rectangle that holds all samples. At most
        # 2 sqrt(samples) pairs stand for no sample, so `range` seldom has to skip one.
        self._left = isqrt(samples - 1) + 1
        self._right = -(-samples // self._left)
        self._tables = self._draw(f"paceline permutation 1:{samples}:{seed}:{epoch}")

    @staticmethod
    @lru_cache(maxsize=4)
    def of(samples: int, seed: int, epoch: int) -> Permutation:
        """Return a cached permutation; a rank works in at most two epochs at once (D8)."""
        return Permutation(samples, seed, epoch)

    def range(self, start: int, stop: int) -> list[int]:
        """Return the sample numbers at the positions start <= position < stop."""
        left, right, samples, tables = self._left, self._right, self.samples, self._tables
        numbers = []
        for position in range(start, stop):
            value = position
            while True:
                high, low = divmod(value, left)
                for to_low, to_high in tables:
                    low = (low + to_low[high]) % left
                    high = (high + to_high[low]) % right
                value = high * left + low
                if value < samples:  # else this pair stands for no sample: follow the cycle
                    break
            numbers.append(value)
        return numbers

    def _draw(self, key: str) -> list[tuple[array[int], array[int]]]:
        """Return random tables, two for each two rounds: what a half adds to the other half."""
        pairs = FEISTEL_ROUNDS // 2
        words = array("Q")
        words.frombytes(shake_256(key.encode()).digest(8 * pairs * (self._left + self._right)))
        if sys.byteorder == "big":
            words.byteswap()
        tables = []
        for at in range(0, len(words), self._left + self._right):
            middle = at + self._right
            to_low = array("Q", (word % self._left for word in words[at:middle]))
            to_high = array(
                "Q", (word % self._right for word in words[middle : middle + self._left])
            )
            tables.append((to_low, to_high))
        return tables
