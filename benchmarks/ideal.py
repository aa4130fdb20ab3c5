"""Rates that drawn step times allow if rounds cost nothing, on a virtual clock. Pure.

A rank that arrives on the newest weights waits for the next round. A rank that arrives too late
leaves its gradient for that round and begins its next step on the newest weights at once, as the
protocol does.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

StepTime = Callable[[int, int, int], float]
"""Function from rank, number of its step, and version of the weights to seconds."""


@dataclass(frozen=True)
class Rates:
    """Rates of a simulated job."""

    rounds_per_s: float
    gradients_per_s: float
    """Applied gradients per second, late ones included."""
    fresh: float
    """Mean number of fresh ranks per round."""


def rates(step_s: StepTime, *, ranks: int, quorum: int, rounds: int, drawn: bool = False) -> Rates:
    """Simulate rounds that cost nothing and return their rates.

    Args:
        step_s: Step times.
        ranks: World size.
        quorum: Number of fresh ranks that start a round.
        rounds: Number of rounds to simulate.
        drawn: True if a rank that is drawn for each round starts it as soon as it arrives, instead
            of a quorum.

    Returns:
        Rounds and applied gradients per second, and mean fresh ranks.
    """
    dice = random.Random("paceline initiators")
    version, applied, fresh, late = 0, 0, 0, 0
    steps, waiting = [0] * ranks, set[int]()
    coming = [(step_s(rank, 0, 0), rank, 0) for rank in range(ranks)]
    heapq.heapify(coming)
    initiator, now_s = dice.randrange(ranks), 0.0

    def begin(rank: int) -> None:
        steps[rank] += 1
        ends_s = now_s + step_s(rank, steps[rank], version)
        heapq.heappush(coming, (ends_s, rank, version))

    while version < rounds:
        now_s, rank, computed_on = heapq.heappop(coming)
        if computed_on < version:
            late += 1
            begin(rank)
            continue
        waiting.add(rank)
        if initiator not in waiting if drawn else len(waiting) < quorum:
            continue
        version += 1
        fresh += len(waiting)
        applied += len(waiting) + late
        late, initiator = 0, dice.randrange(ranks)
        for each in sorted(waiting):
            begin(each)
        waiting.clear()
    return Rates(rounds / now_s, applied / now_s, fresh / rounds)
