"""The status of a job, and the time at which a change of it is worth a request (C12).

Transitions and counts are written at once, at most ten times a second. Workers that arrive one
after the other share one write per second, or one in five seconds before the first membership.
Round, progress, ranks and other figures that change all the time are written once a minute, and
every five seconds while a user watches the job (C17).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline_api.names import NOTE_WATCHED, worker_selector
from paceline_api.rank_rows import microseconds, rank_row
from paceline_api.reasons import ConditionType
from paceline_api.status import RankPhase, RankStatus, Status
from paceline_api.times import seconds_of, timestamp
from paceline_api.types.status import RANKS_MAX, STRAGGLERS_MAX

from paceline_operator.core.decide import backoff
from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Observed
from paceline_operator.core.plan import PodPlan
from paceline_operator.core.providers.choice import provider_of
from paceline_operator.core.report import conditions
from paceline_operator.core.report.standing import standing, stored
from paceline_operator.core.report.transport_status import transport_status, without_carrier

COALESCE_S: Final = 0.1
"""Least number of seconds between two writes of transitions and counts."""
ARRIVALS_S: Final = 1.0
"""Seconds between two writes if only workers were placed or became ready: a write costs as much as
two pods."""
STARTING_S: Final = 5.0
"""Seconds between such writes before the job trains, when users wait for the membership and not for
single workers."""
WORDS_S: Final = 2.0
"""Seconds between two writes if only reasons and messages change."""
FIGURES_S: Final = 60.0
"""Seconds between two writes if only figures change."""
WATCHED_S: Final = 5.0
"""Seconds between two writes of figures while a user watches the job: as often as a coordinator
without problems is asked."""
WATCHED_MAX_S: Final = 300.0
"""Longest time ahead that the annotation of a watching user may name. The clocks of users may
differ from the operator's by some minutes."""
FIGURES: Final = ("round", "progress", "ranks")
"""Fields of the status that count as figures."""
WITH_LESS: Final = ("RankSlow", "RankBenched", "Unschedulable")
"""Reasons of Degraded with which a job that trains is shown as training."""
PARTIAL: Final = ("quorum", "deadline", "initiator")
"""Triggers of rounds that did not wait for all ranks."""


def running(
    job: JobObject,
    observed: Observed,
    plan: PodPlan,
    wanted: list[conditions.WantedCondition],
    now_s: float,
) -> dict[str, Any]:
    """Return the status of a job with a valid spec that has not ended.

    Args:
        job: The job with its stored status.
        observed: Everything observed besides the job.
        plan: The plan for its workers.
        wanted: Conditions of this decision.
        now_s: The present time.

    Returns:
        The whole status.
    """
    assert job.settings is not None
    status = carried(job, wanted, now_s)
    coordinator = observed.coordinator
    status["replicas"] = len(plan.living) + len(plan.new)
    if coordinator is not None:
        full = coordinator.full_pods(job.settings.procs_per_replica)
        ready = sum((pod.slot, pod.attempt) in full for pod in plan.living)
        status["readyReplicas"] = ready
        status["activeRanks"] = sum(rank.state is RankPhase.ACTIVE for rank in coordinator.ranks)
        if coordinator.membership:
            status["membershipGeneration"] = coordinator.membership
        status["round"] = max(coordinator.version, job.round)
        status["collective"] = _collective(job, observed)
        if moved := transport_status(job, observed, now_s):
            status["transport"] = moved
        if progress := _progress(coordinator):
            status["progress"] = progress
        status |= figures(observed)
    elif job.holds(ConditionType.SUSPENDED):
        status.pop("ranks", None)  # these rows describe the ranks before the suspension
    # Use the values of a coordinator's first answer, so that the answer changes nothing.
    status.setdefault("readyReplicas", 0)
    status.setdefault("activeRanks", 0)
    status.setdefault("round", 0)
    status.setdefault("collective", {"mode": str(job.settings.collective.mode)})
    status["ready"] = f"{status['readyReplicas']}/{job.settings.replicas}"
    status["restarts"] = _restarts(job, observed, plan)
    attempts = [job.highest_attempt, *observed.used.values()]
    attempts += [pod.attempt for pod in observed.own(job.uid)] + [new.attempt for new in plan.new]
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
    if provider_of(job).waits(job, plan):
        status.pop("activeTime", None)
    else:
        status.setdefault("activeTime", timestamp(now_s))
    status["state"] = state_word(status)
    return status


def carried(
    job: JobObject, wanted: list[conditions.WantedCondition], now_s: float
) -> dict[str, Any]:
    """Return the stored status with new conditions: the part that every status has.

    Args:
        job: The job with its stored status.
        wanted: Conditions of this decision.
        now_s: The present time.

    Returns:
        A shallow copy of the status: callers replace its fields and never modify a value below
        them.
    """
    status = dict(job.status)
    status["observedGeneration"] = job.generation
    status["selector"] = worker_selector(job.name)
    before = {kind: stored(kind, c) for kind in ConditionType if (c := job.condition(kind))}
    wanted = [*wanted, *standing(before, wanted)]
    status["conditions"] = conditions.merged(job, wanted, now_s)
    if job.resolved:
        status["resolved"], status["explicit"] = job.resolved, list(job.explicit)
    if job.runtime:
        status["runtime"] = job.runtime
    return status


def ended(
    job: JobObject,
    observed: Observed,
    wanted: list[conditions.WantedCondition],
    now_s: float,
    *,
    complete: bool,
) -> dict[str, Any]:
    """Return the last status of a job; it is written once and then never changed.

    Args:
        job: The job with its stored status.
        observed: Everything observed besides the job.
        wanted: Conditions of this decision.
        now_s: The present time.
        complete: True if the job is Complete, False if it has failed.

    Returns:
        The whole status.
    """
    status = carried(job, wanted, now_s)
    if observed.coordinator is not None:
        status["round"] = max(observed.coordinator.version, job.round)
        status["collective"] = _collective(job, observed)
        if moved := transport_status(job, observed, now_s):
            status["transport"] = moved
        if progress := _progress(observed.coordinator):
            status["progress"] = progress
    status["ranks"] = ranks_at_rest(job, observed, complete=complete)
    status |= {"stragglers": [], "stragglerCount": 0}
    without_eta(status)
    replicas = job.settings.replicas if job.settings else 0
    status |= {"replicas": 0, "readyReplicas": 0, "activeRanks": 0, "ready": f"0/{replicas}"}
    status["completionTime"] = timestamp(now_s)
    status.setdefault("startTime", timestamp(job.created_s))
    status["state"] = state_word(status)
    return status


def _progress(coordinator: Status) -> dict[str, int] | None:
    log = coordinator.log
    if log.progress is None:
        return None
    # Round down, but not because of float errors: 0.57 would be 56.99999999999999 percent.
    progress = {"percent": int(round(100 * min(1.0, log.progress), 6))}
    if log.left_s is not None:
        progress["etaSeconds"] = round(log.left_s)
    return progress


def figures(observed: Observed) -> dict[str, Any]:
    """Return `ranks` (if too many, those with the largest lag) and `figuresTime` of the status."""
    assert observed.coordinator is not None
    last = sorted(observed.coordinator.living, key=lambda rank: rank.lag_s or 0.0, reverse=True)
    chosen = sorted(last[:RANKS_MAX], key=lambda rank: rank.member[:2])
    return {
        "ranks": [_row(rank, observed.coordinator) for rank in chosen],
        "figuresTime": timestamp(observed.coordinator_heard_s),
    }


def ranks_at_rest(job: JobObject, observed: Observed, *, complete: bool) -> list[dict[str, Any]]:
    """Return how the last process of each rank ended, once nothing of a job runs any more.

    Args:
        job: The job with its stored status.
        observed: Everything observed besides the job.
        complete: True if all ranks have made the last round, even those that have not learned it.

    Returns:
        The rows of `status.ranks`.
    """
    if observed.coordinator is None:
        return [
            {**row, "state": _end(finished=complete or row["state"] == RankPhase.FINISHED)}
            for row in job.status.get("ranks") or ()
        ]
    last: dict[tuple[int, int], RankStatus] = {}
    for rank in sorted(observed.coordinator.ranks, key=lambda rank: rank.member.attempt):
        last[rank.member.slot, rank.member.local] = rank
    rows = [
        _row_at_rest(last[key], observed.coordinator, complete=complete) for key in sorted(last)
    ]
    # Ranks in higher slots left when the job was scaled down; they do not belong to its end.
    wanted = job.settings.replicas if job.settings else len(rows)
    kept = [
        row
        for (slot, _), row in zip(sorted(last), rows, strict=True)
        if slot < wanted or row["state"] == RankPhase.FINISHED
    ]
    return kept[:RANKS_MAX]


def _row_at_rest(rank: RankStatus, status: Status, *, complete: bool) -> dict[str, Any]:
    finished = rank.finished or rank.state is RankPhase.FINISHED
    finished = finished or (complete and rank.state is not RankPhase.DEAD)
    return {**_row(rank, status), "state": _end(finished=finished)}


def _end(*, finished: bool) -> str:
    return str(RankPhase.FINISHED if finished else RankPhase.DEAD)


def _row(rank: RankStatus, status: Status) -> dict[str, Any]:
    return rank_row(rank, status.log.shares.get(str(rank.member)))


def without_eta(status: dict[str, Any]) -> None:
    """Remove the estimated end from a status, since nothing runs any more."""
    if status.get("progress"):
        status["progress"] = {"percent": status["progress"]["percent"]}


def _collective(job: JobObject, observed: Observed) -> dict[str, Any]:
    assert observed.coordinator is not None
    coordinator = observed.coordinator
    mode = coordinator.settings.get("mode") or (
        job.settings.collective.mode if job.settings else ""
    )
    collective: dict[str, Any] = {"mode": str(mode)}
    log = coordinator.log
    total = sum(log.rounds.values())
    if total:
        partial = sum(log.rounds.get(name, 0) for name in PARTIAL)
        collective["partialPercent"] = round(100 * partial / total)
    collective["waitAvoidedSeconds"] = int(log.avoided_s or 0.0)
    if log.round_s:
        collective["roundMicroseconds"] = microseconds(log.round_s)
    return collective


def _restarts(job: JobObject, observed: Observed, plan: PodPlan) -> dict[str, int]:
    before = job.status.get("restarts") or {}
    version = observed.coordinator.version if observed.coordinator is not None else job.round
    reported = observed.coordinator.restarts if observed.coordinator is not None else 0
    workers = [pod for pod in observed.own(job.uid) if pod.is_worker]
    rules = job.settings.failure_rules if job.settings else ()
    return {
        # A recreated coordinator does not know the restarts in pods that were gone by then.
        "ranks": max(int(before.get("ranks") or 0), reported),
        "replicas": plan.replaced,
        "failures": backoff.failures(workers, version, rules),
    }


def state_word(status: Mapping[str, Any]) -> str:
    """Return the field `state`: the conditions summed up for people."""
    holding = {c["type"]: c for c in status.get("conditions") or () if c.get("status") == "True"}
    for final in (ConditionType.COMPLETE, ConditionType.FAILED):
        if final in holding:
            return str(final)
    suspended = holding.get(ConditionType.SUSPENDED)
    if suspended is not None:
        return str(suspended["reason"]) if suspended["reason"] == "Suspending" else "Suspended"
    degraded = holding.get(ConditionType.DEGRADED)
    ring = ConditionType.RING_READY in holding
    if degraded is not None and (not ring or degraded["reason"] not in WITH_LESS):
        return str(degraded["reason"])
    if ConditionType.RESIZING in holding:
        return "Resizing"
    return "Training" if ring else "Starting"


def without_figures(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a status whose changes are written soon."""
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
    """Return the transitions and counts of a status, without reasons and messages."""
    held = {c["type"]: c.get("status") for c in status.get("conditions") or ()}
    transport = {k: v for k, v in (status.get("transport") or {}).items() if k != "message"}
    return {**status, "conditions": held, "state": None, "transport": transport}


def _pause_s(old: Mapping[str, Any], new: Mapping[str, Any]) -> float:
    if not _others_arrived(old, new):
        return COALESCE_S
    trains = new["conditions"].get(str(ConditionType.RING_READY)) == "True"
    return ARRIVALS_S if trains else STARTING_S


def _others_arrived(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return True if the only difference is that more workers are placed or ready."""
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


def _figures_pause_s(job: JobObject, now_s: float) -> float:
    until_s = seconds_of(job.annotations.get(NOTE_WATCHED))
    watched = until_s is not None and now_s < until_s <= now_s + WATCHED_MAX_S
    return WATCHED_S if watched else FIGURES_S


def due(
    job: JobObject, status: Mapping[str, Any], observed: Observed, now_s: float
) -> tuple[bool, float | None]:
    """Decide whether the status is to be written now.

    Args:
        job: The job with its stored status.
        status: The new status.
        observed: Everything observed besides the job.
        now_s: The present time.

    Returns:
        True to write now; otherwise False, and the time at which a write is due, None if nothing
        has changed.
    """
    before = job.status
    if _normal(before) == _normal(status):
        return False, None
    old, new = without_figures(_normal(before)), without_figures(_normal(status))
    before_words, after_words = without_words(old), without_words(new)
    if before_words != after_words:
        at_s = observed.sent.status_s + _pause_s(before_words, after_words)
    elif old != new:
        at_s = observed.sent.status_s + WORDS_S
    else:
        at_s = max(observed.sent.figures_s, observed.sent.status_s) + _figures_pause_s(job, now_s)
    return (True, None) if now_s >= at_s else (False, at_s)


def _normal(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return a status without empty values and without the time of its figures.

    The API server treats a missing field and an empty list alike. Figures that were only measured
    again are no change.
    """
    return {k: v for k, v in status.items() if v not in (None, [], {}, "") and k != "figuresTime"}
