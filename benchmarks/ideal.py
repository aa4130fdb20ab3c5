"""What drawn step times allow: rounds that cost nothing, on a virtual clock. Pure.

A rank that arrives on the newest weights waits for the next round; one that comes too late leaves
its gradient for that round and begins its next step on the newest weights at once, as the protocol
has it.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

StepTime = Callable[[int, int, int], float]
"""(rank, number of its step, version of the weights) -> seconds."""


@dataclass(frozen=True)
class Rates:
    rounds_per_s: float
    gradients_per_s: float
    """Applied."""
    fresh: float
    """Mean per round."""


def rates(step_s: StepTime, *, ranks: int, quorum: int, rounds: int, drawn: bool = False) -> Rates:
    """`quorum`: fresh ranks that start a round; with `drawn` it is one rank that is drawn for each
    round instead, as soon as it is there."""
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
