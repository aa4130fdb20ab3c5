"""Confirmation of ranks that are slow for long, and choice of one to replace (spec.straggler).

`paceline_api.slow` makes the judgment, for the coordinator too. Only the action Replace is carried
out here, by a new pod away from the slow node. RestartInPlace belongs to the coordinator, which
knows the rank's agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from paceline_api import slow
from paceline_api.slow import StepTime
from paceline_api.status import RankPhase, RankStatus
from paceline_api.times import seconds_of
from paceline_api.types.enums import StragglerResponse

from paceline_operator.core.decide.backoff import NOTE_CAUSE
from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Observed, Pod
from paceline_operator.core.plan import ReplacementCause, SlowPod

NODES_MAX: Final = 3
"""Upper bound on the number of slow nodes that a replacement avoids."""


@dataclass(frozen=True, slots=True)
class StragglerVerdict:
    """Slow ranks of a job, and the one to replace now."""

    slow: tuple[SlowPod, ...] = ()
    """Ranks that are confirmed to be slow, the slowest first."""
    replace: SlowPod | None = None
    slow_s: Mapping[str, float] = field(default_factory=dict)
    """New values for the clock `Clocks.slow_s`."""
    look_again_s: float | None = None


def verdict(
    job: JobObject, observed: Observed, living: list[Pod], now_s: float
) -> StragglerVerdict:
    """Judge which ranks of a job are slow.

    Args:
        job: The job.
        observed: Everything observed besides the job.
        living: Workers that count.
        now_s: The present time.

    Returns:
        The verdict; empty while the coordinator has not reported.
    """
    coordinator, settings = observed.coordinator, job.settings
    if coordinator is None or settings is None:
        return StragglerVerdict()
    by_place = {(pod.slot, pod.attempt): pod for pod in living}
    ranks = {_key(rank): rank for rank in coordinator.ranks if rank.pod in by_place}
    known = _known_since(job)
    before: dict[str, float] = {}
    confirmed = set()
    for key, rank in ranks.items():
        named = by_place[rank.pod].name, rank.rank
        if named in known:
            confirmed.add(key)
            before[key] = known[named]
        if key in observed.clocks.slow_s:
            before[key] = observed.clocks.slow_s[key]
    judged = slow.judge(
        [
            StepTime(_key(r), r.step_s if r.state is RankPhase.ACTIVE else 0.0)
            for r in coordinator.living
        ],
        settings.straggler,
        round_s=coordinator.log.round_s or 0.0,
        since=before,
        now_s=now_s,
        confirmed=confirmed,
    )
    slow_pods = [
        SlowPod(ranks[s.key], by_place[ranks[s.key].pod], s.percent, s.since_s, s.action)
        for s in judged.slow
        if s.key in ranks
    ]
    replace, free_s = _to_replace(job, observed, slow_pods, now_s)
    looks = [at_s for at_s in (judged.look_again_s, free_s) if at_s is not None]
    slow_s = {key: at_s for key, at_s in judged.since.items() if key in ranks}
    return StragglerVerdict(tuple(slow_pods), replace, slow_s, min(looks, default=None))


def _key(rank: RankStatus) -> str:
    slot, attempt = rank.pod
    return f"{slot}.{rank.member.local}#{attempt}"


def _to_replace(
    job: JobObject, observed: Observed, slow_pods: list[SlowPod], now_s: float
) -> tuple[SlowPod | None, float | None]:
    """Return a rank to replace, or the time at which the cooldown of the last one ends."""
    assert job.settings is not None
    candidates = [s for s in slow_pods if s.action is StragglerResponse.REPLACE and s.pod.node]
    if not candidates:
        return None, None
    replaced = [
        pod.created_s
        for pod in observed.own(job.uid)
        if pod.notes.get(NOTE_CAUSE) == ReplacementCause.SLOW
    ]
    free_s = max(replaced, default=0.0) + slow.cooldown_s(job.settings.straggler)
    if now_s < free_s and replaced:
        return None, free_s
    return candidates[0], None


def _known_since(job: JobObject) -> dict[tuple[str, int | None], float]:
    """Return the start times in the stored status, for an operator that has just started."""
    by_rank: dict[tuple[str, int | None], float] = {}
    for item in job.status.get("stragglers") or ():
        first_s = seconds_of(item.get("since"))
        if first_s is not None:
            by_rank[str(item.get("replica")), item.get("rank")] = first_s
    return by_rank
