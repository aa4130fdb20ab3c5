"""The status of a job, and when a change of it is worth a request (C12).

Transitions and counts are written at once, at most ten times a second, but for workers that come
one after the other: they share a write of each second, or of five before there is a membership.
Round, progress, ranks and the other figures that move all the time are written once a minute, and
every five seconds while somebody says that he looks at them (C17).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline_api.names import NOTE_WATCHED, worker_selector
from paceline_api.reasons import ConditionType
from paceline_api.times import seconds_of, timestamp
from paceline_api.types.status import RANK_STATE_MAX, RANKS_MAX, STRAGGLERS_MAX

from paceline_operator.core.coordinator_status import (
    ACTIVE,
    DEAD,
    FINISHED,
    WHOLE_MAX,
    CoordinatorStatus,
    Rank,
)
from paceline_operator.core.decide import backoff
from paceline_operator.core.job import Job
from paceline_operator.core.observed import Observed
from paceline_operator.core.plan import Plan
from paceline_operator.core.report import conditions
from paceline_operator.core.report.standing import standing, stored
from paceline_operator.core.report.transport_status import transport_status, without_carrier

COALESCE_S: Final = 0.1
ARRIVALS_S: Final = 1.0
"""Workers that are placed or ready, and nothing else: each write costs as much as two pods."""
STARTING_S: Final = 5.0
"""The same before they train: what is waited for is told by the membership."""
WORDS_S: Final = 2.0
"""Reasons and messages without a transition."""
FIGURES_S: Final = 60.0
WATCHED_S: Final = 5.0
"""As often as a coordinator is heard with which all is well."""
WATCHED_MAX_S: Final = 300.0
"""Nobody is believed to look on for longer without saying so again; the clocks of those who say so
may differ from the operator's by some minutes."""
FIGURES: Final = ("round", "progress", "ranks")
US_PER_S: Final = 1_000_000
PARTIAL: Final = ("quorum", "deadline", "initiator")
"""Triggers of rounds that did not wait for everybody."""


def running(
    job: Job, seen: Observed, plan: Plan, wanted: list[conditions.Wanted], now_s: float
) -> dict[str, Any]:
    """Status of a job with a valid spec."""
    assert job.settings is not None
    status = carried(job, wanted, now_s)
    coordinator = seen.coordinator
    status["replicas"] = len(plan.living) + len(plan.new)
    if coordinator is not None:
        full = coordinator.full_pods(job.settings.procs_per_replica)
        ready = sum((pod.slot, pod.attempt) in full for pod in plan.living)
        status["readyReplicas"] = ready
        status["activeRanks"] = sum(rank.state == ACTIVE for rank in coordinator.ranks)
        if coordinator.generation:
            status["membershipGeneration"] = coordinator.generation
        status["round"] = max(coordinator.version, job.round)
        status["collective"] = _collective(job, seen)
        if moved := transport_status(job, seen, now_s):
            status["transport"] = moved
        if progress := _progress(coordinator):
            status["progress"] = progress
        status |= figures(seen)
    elif job.holds(ConditionType.SUSPENDED):
        status.pop("ranks", None)  # how those before the suspension have ended
    # As the first answer of a coordinator will be, so that it is no news.
    status.setdefault("readyReplicas", 0)
    status.setdefault("activeRanks", 0)
    status.setdefault("round", 0)
    status.setdefault("collective", {"mode": str(job.settings.collective.mode)})
    status["ready"] = f"{status['readyReplicas']}/{job.settings.replicas}"
    status["restarts"] = _restarts(job, seen, plan)
    attempts = [job.highest_attempt, *seen.used.values()]
    attempts += [pod.attempt for pod in seen.own(job.uid)] + [new.attempt for new in plan.new]
    status["highestAttempt"] = max(attempts, default=0)
    status["stragglers"] = [
        {
            "rank": slow.rank.rank if slow.rank.rank is not None else -1,
            "replica": slow.pod.name,
            "node": slow.pod.node,
            "slowdownPercent": slow.slowdown_percent,
            "since": timestamp(slow.since_s),
            "action": str(slow.action),
        }
        for slow in plan.slow[:STRAGGLERS_MAX]
    ]
    status["stragglerCount"] = len(plan.slow)
    if job.start_s is None and any(w.type is ConditionType.RING_READY and w.holds for w in wanted):
        status["startTime"] = timestamp(now_s)
    status["state"] = state_word(status)
    return status


def carried(job: Job, wanted: list[conditions.Wanted], now_s: float) -> dict[str, Any]:
    """The stored status with new conditions: the part that every status has. Nothing below its
    first level is changed by anybody."""
    status = dict(job.status)
    status["observedGeneration"] = job.generation
    status["selector"] = worker_selector(job.name)
    before = {kind: stored(kind, c) for kind in ConditionType if (c := job.condition(kind))}
    wanted = [*wanted, *standing(before, wanted)]
    status["conditions"] = conditions.merged(job, wanted, now_s)
    if job.frozen:
        status["resolved"] = job.frozen
    return status


def ended(
    job: Job, seen: Observed, wanted: list[conditions.Wanted], now_s: float, *, complete: bool
) -> dict[str, Any]:
    """The last status: written once and then left alone."""
    status = carried(job, wanted, now_s)
    if seen.coordinator is not None:
        status["round"] = max(seen.coordinator.version, job.round)
        status["collective"] = _collective(job, seen)
        if moved := transport_status(job, seen, now_s):
            status["transport"] = moved
        if progress := _progress(seen.coordinator):
            status["progress"] = progress
    status["ranks"] = ranks_at_rest(job, seen, complete=complete)
    status |= {"stragglers": [], "stragglerCount": 0}
    without_eta(status)
    replicas = job.settings.replicas if job.settings else 0
    status |= {"replicas": 0, "readyReplicas": 0, "activeRanks": 0, "ready": f"0/{replicas}"}
    status["completionTime"] = timestamp(now_s)
    status.setdefault("startTime", timestamp(job.created_s))
    status["state"] = state_word(status)
    return status


def _progress(coordinator: CoordinatorStatus) -> dict[str, int] | None:
    if coordinator.progress is None:
        return None
    # Rounded down, but for what a float lacks: 0.57 is 56.99999999999999 percent.
    found = {"percent": int(round(100 * min(1.0, coordinator.progress), 6))}
    if coordinator.left_s is not None:
        found["etaSeconds"] = round(coordinator.left_s)
    return found


def figures(seen: Observed) -> dict[str, Any]:
    """Of the ranks that live, by slot; of many those that are waited for the longest."""
    assert seen.coordinator is not None
    last = sorted(seen.coordinator.living, key=lambda rank: rank.lag_s or 0.0, reverse=True)
    chosen = sorted(last[:RANKS_MAX], key=lambda rank: (rank.slot, rank.local))
    return {
        "ranks": [_row(rank) for rank in chosen],
        "figuresTime": timestamp(seen.coordinator_heard_s),
    }


def ranks_at_rest(job: Job, seen: Observed, *, complete: bool) -> list[dict[str, Any]]:
    """Return how the last process at each place has ended, once nothing of a job runs any more.

    `complete`: all of them have made the last round, whoever has not heard of it."""
    if seen.coordinator is None:
        return [
            {**row, "state": FINISHED if complete or row["state"] == FINISHED else DEAD}
            for row in job.status.get("ranks") or ()
        ]
    last: dict[tuple[int, int], Rank] = {}
    for rank in sorted(seen.coordinator.ranks, key=lambda rank: (rank.attempt, rank.restarts)):
        last[rank.slot, rank.local] = rank
    rows = [_row_at_rest(last[key], complete=complete) for key in sorted(last)]
    # Slots above have left when fewer replicas were wanted: that is no end of the job.
    wanted = job.settings.replicas if job.settings else len(rows)
    kept = [
        row
        for (slot, _), row in zip(sorted(last), rows, strict=True)
        if slot < wanted or row["state"] == FINISHED
    ]
    return kept[:RANKS_MAX]


def _row_at_rest(rank: Rank, *, complete: bool) -> dict[str, Any]:
    finished = rank.finished or rank.state == FINISHED or (complete and rank.state != DEAD)
    return {**_row(rank), "state": FINISHED if finished else DEAD}


def _row(rank: Rank) -> dict[str, Any]:
    state = rank.state[:RANK_STATE_MAX]
    found: dict[str, Any] = {"member": rank.member, "state": state, "round": rank.version}
    if rank.pid:
        found["pid"] = rank.pid
    if rank.step_s:
        found["stepMicroseconds"] = _us(rank.step_s)
    if rank.lag_s is not None:
        found["lagMicroseconds"] = _us(rank.lag_s)
    if rank.share is not None:
        found["sharePercent"] = round(100 * max(0.0, min(rank.share, 1.0)))
    return found


def _us(seconds: float) -> int:
    return max(0, min(round(seconds * US_PER_S), WHOLE_MAX))


def without_eta(status: dict[str, Any]) -> None:
    """Nothing runs any more."""
    if status.get("progress"):
        status["progress"] = {"percent": status["progress"]["percent"]}


def _collective(job: Job, seen: Observed) -> dict[str, Any]:
    assert seen.coordinator is not None
    coordinator = seen.coordinator
    mode = coordinator.settings.get("mode") or (
        job.settings.collective.mode if job.settings else ""
    )
    found: dict[str, Any] = {"mode": str(mode)}
    total = sum(coordinator.rounds.values())
    if total:
        partial = sum(coordinator.rounds.get(name, 0) for name in PARTIAL)
        found["partialPercent"] = round(100 * partial / total)
    found["waitAvoidedSeconds"] = int(coordinator.avoided_s)
    if coordinator.round_s:
        found["roundMicroseconds"] = _us(coordinator.round_s)
    return found


def _restarts(job: Job, seen: Observed, plan: Plan) -> dict[str, int]:
    before = job.status.get("restarts") or {}
    version = seen.coordinator.version if seen.coordinator is not None else job.round
    told = seen.coordinator.restarts if seen.coordinator is not None else 0
    workers = [pod for pod in seen.own(job.uid) if pod.is_worker]
    rules = job.settings.failure_rules if job.settings else ()
    return {
        # One that was made anew does not know of pods that were gone by then.
        "ranks": max(int(before.get("ranks") or 0), told),
        "replicas": plan.replaced,
        "failures": backoff.failures(workers, version, rules),
    }


def state_word(status: Mapping[str, Any]) -> str:
    """The conditions in one word, for people."""
    holding = {c["type"]: c for c in status.get("conditions") or () if c.get("status") == "True"}
    for final in (ConditionType.COMPLETE, ConditionType.FAILED):
        if final in holding:
            return str(final)
    suspended = holding.get(ConditionType.SUSPENDED)
    if suspended is not None:
        return str(suspended["reason"]) if suspended["reason"] == "Suspending" else "Suspended"
    degraded = holding.get(ConditionType.DEGRADED)
    ring = ConditionType.RING_READY in holding
    if degraded is not None and (not ring or degraded["reason"] not in ("RankSlow", "RankBenched")):
        return str(degraded["reason"])
    if ConditionType.RESIZING in holding:
        return "Resizing"
    return "Training" if ring else "Starting"


def without_figures(status: Mapping[str, Any]) -> dict[str, Any]:
    """What is written at once when it changes."""
    status = without_carrier(dict(status))
    fast = {k: v for k, v in status.items() if k not in FIGURES}
    collective = status.get("collective") or {}
    fast["collective"] = {"mode": collective.get("mode")} if collective else {}
    fast["stragglers"] = [
        {k: v for k, v in item.items() if k != "slowdownPercent"}
        for item in status.get("stragglers") or ()
    ]
    return fast


def without_words(status: Mapping[str, Any]) -> dict[str, Any]:
    """The transitions and counts."""
    held = {c["type"]: c.get("status") for c in status.get("conditions") or ()}
    transport = {k: v for k, v in (status.get("transport") or {}).items() if k != "message"}
    return {**status, "conditions": held, "state": None, "transport": transport}


def _pause_s(old: Mapping[str, Any], new: Mapping[str, Any]) -> float:
    if not _others_arrived(old, new):
        return COALESCE_S
    trains = new["conditions"].get(str(ConditionType.RING_READY)) == "True"
    return ARRIVALS_S if trains else STARTING_S


def _others_arrived(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """No other difference than more workers that are placed or ready."""
    placed = str(ConditionType.SCHEDULED)
    if old["conditions"].get(placed) == "True" != new["conditions"].get(placed):
        return False
    if (new.get("readyReplicas") or 0) < (old.get("readyReplicas") or 0):
        return False
    return _without_arrivals(old) == _without_arrivals(new)


def _without_arrivals(status: Mapping[str, Any]) -> dict[str, Any]:
    counts = ("ready", "readyReplicas", "activeRanks", "membershipGeneration")
    held = {k: v for k, v in status["conditions"].items() if k != ConditionType.SCHEDULED}
    return {**{k: v for k, v in status.items() if k not in counts}, "conditions": held}


def _figures_pause_s(job: Job, now_s: float) -> float:
    until_s = seconds_of(job.annotations.get(NOTE_WATCHED))
    watched = until_s is not None and now_s < until_s <= now_s + WATCHED_MAX_S
    return WATCHED_S if watched else FIGURES_S


def due(
    job: Job, status: Mapping[str, Any], seen: Observed, now_s: float
) -> tuple[bool, float | None]:
    """Whether to write now; else when to look again, if at all."""
    before = job.status
    if _normal(before) == _normal(status):
        return False, None
    old, new = without_figures(_normal(before)), without_figures(_normal(status))
    told, found = without_words(old), without_words(new)
    if told != found:
        at_s = seen.sent.status_s + _pause_s(told, found)
    elif old != new:
        at_s = seen.sent.status_s + WORDS_S
    else:
        at_s = max(seen.sent.figures_s, seen.sent.status_s) + _figures_pause_s(job, now_s)
    return (True, None) if now_s >= at_s else (False, at_s)


def _normal(status: Mapping[str, Any]) -> dict[str, Any]:
    """Nothing and an empty list are the same to the API server; that the same was told again is no
    news."""
    return {k: v for k, v in status.items() if v not in (None, [], {}, "") and k != "figuresTime"}
