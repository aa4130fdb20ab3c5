"""Ranks that are slow for long, and the step to take against them (spec.straggler).

A rank is slow when its median step takes `slowdownFactor` times the median of all ranks for
`windowRounds` rounds. The steps of `respond` follow each other, a cooldown apart, while it stays
slow. Only Replace does something here: a new pod, away from the slow node.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Final

from paceline_api.enums import StragglerResponse

from paceline_operator.core.backoff import NOTE_CAUSE, Cause
from paceline_operator.core.job import Job, seconds_of
from paceline_operator.core.observed import Observed, Pod
from paceline_operator.core.told import ACTIVE, Rank, Told

MIN_S: Final = 1.0
"""Shortest time for which a rank must be slow."""
NODES_MAX: Final = 3
"""Slow nodes that a replacement keeps away from."""


@dataclass(frozen=True, slots=True)
class Slow:
    rank: Rank
    pod: Pod
    slowdown_percent: int
    since_s: float
    action: StragglerResponse


@dataclass(frozen=True, slots=True)
class Verdict:
    slow: tuple[Slow, ...] = ()
    """Confirmed, the slowest first."""
    replace: Slow | None = None
    since: tuple[tuple[str, float], ...] = ()
    look_again_s: float | None = None


def verdict(job: Job, seen: Observed, living: list[Pod], now_s: float) -> Verdict:
    told, settings = seen.told, job.settings
    if told is None or settings is None:
        return Verdict()
    by_place = {(pod.slot, pod.attempt): pod for pod in living}
    window_s = max(MIN_S, settings.straggler.window_rounds * told.round_s)
    known = _known_since(job)
    found: list[Slow] = []
    since: list[tuple[str, float]] = []
    looks: list[float] = []
    for rank, slowdown in _slowdowns(told, settings.straggler.slowdown_factor):
        pod = by_place.get(rank.pod)
        if pod is None:
            continue
        key = f"slow:{rank.slot}.{rank.local}#{rank.attempt}"
        first_s = seen.since.get(key, known.get((pod.name, rank.rank), now_s))
        since.append((key, first_s))
        if now_s - first_s < window_s and (pod.name, rank.rank) not in known:
            looks.append(first_s + window_s)
            continue
        action, next_s = _step(job, now_s - first_s)
        if next_s is not None:
            looks.append(first_s + next_s)
        found.append(Slow(rank, pod, round(100 * slowdown), first_s, action))
    found.sort(key=lambda slow: -slow.slowdown_percent)
    replace, free_s = _to_replace(job, seen, found, now_s)
    if free_s is not None:
        looks.append(free_s)
    return Verdict(tuple(found), replace, tuple(since), min(looks, default=None))


def _slowdowns(told: Told, factor: float) -> list[tuple[Rank, float]]:
    ranks = [rank for rank in told.ranks if rank.state == ACTIVE and rank.step_s > 0]
    if len(ranks) < 2:
        return []
    # The lower median: of two ranks, the faster one is the norm.
    norm = statistics.median_low([rank.step_s for rank in ranks])
    return [(rank, rank.step_s / norm) for rank in ranks if rank.step_s >= factor * norm]


def _step(job: Job, slow_s: float) -> tuple[StragglerResponse, float | None]:
    """The step of the ladder that is in force, and after how long the next one is."""
    assert job.settings is not None
    ladder = job.settings.straggler.respond
    cooldown_s = max(1.0, job.settings.straggler.cooldown_ns / 1e9)
    index = min(int(slow_s // cooldown_s), len(ladder) - 1)
    return ladder[index], (index + 1) * cooldown_s if index + 1 < len(ladder) else None


def _to_replace(
    job: Job, seen: Observed, slow: list[Slow], now_s: float
) -> tuple[Slow | None, float | None]:
    """One at most, and none within the cooldown after the last."""
    assert job.settings is not None
    candidates = [s for s in slow if s.action is StragglerResponse.REPLACE and s.pod.node]
    if not candidates:
        return None, None
    replaced = [
        pod.created_s for pod in seen.own(job.uid) if pod.notes.get(NOTE_CAUSE) == Cause.SLOW
    ]
    free_s = max(replaced, default=0.0) + job.settings.straggler.cooldown_ns / 1e9
    if now_s < free_s and replaced:
        return None, free_s
    return candidates[0], None


def _known_since(job: Job) -> dict[tuple[str, int | None], float]:
    """From the status, for an operator that has just started."""
    found: dict[tuple[str, int | None], float] = {}
    for item in job.status.get("stragglers") or ():
        first_s = seconds_of(item.get("since"))
        if first_s is not None:
            found[str(item.get("replica")), item.get("rank")] = first_s
    return found
