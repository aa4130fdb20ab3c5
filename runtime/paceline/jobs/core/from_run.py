"""Conversion of what a run on this machine reports, or left in its folder, to a `JobStatus`."""

from __future__ import annotations

from paceline_api.reasons import ConditionType, Reason
from paceline_api.status import Outcome, RankPhase, Status, at_rest

from paceline.jobs.interface import (
    COMPLETE,
    ENDED,
    FAILED,
    SUSPENDED,
    TRAINING,
    UNKNOWN,
    JobEvent,
    JobStatus,
)

STARTING = "Starting"
_NO_STATE = (Reason.RANK_SLOW, Reason.RANK_BENCHED)
"""Reasons of the condition Degraded that do not become the state: the job trains, and "Training" is
enough in one word."""
_WARNINGS = (
    Reason.BATCH_SKIPPED,
    Reason.BELOW_MIN_REPLICAS,
    Reason.CHECKPOINT_FAILED,
    Reason.DATA_CHANNEL_FAILED,
    Reason.JOB_FAILED,
    Reason.QUORUM_REDUCED,
    Reason.RANK_BENCHED,
    Reason.RANK_SLOW,
    Reason.SAMPLES_SKIPPED,
    Reason.SCRIPT_STARTS_OVER,
    Reason.SCRIPT_STILL_RUNS,
    Reason.SCRIPT_STUCK,
    Reason.SCRIPT_TAKES_NO_PART,
    Reason.WAITING_FOR_EVIDENCE,
    Reason.WAITING_FOR_RANK_0,
)
"""Reasons of events that a user may want to act on."""
_WARNINGS_HERE = ("RankDied", "ScriptCutShort")
"""Further reasons of warnings; they occur in the coordinator's history only and are not part of the
API."""


def running(
    name: str,
    run_dir: str,
    status: Status | None,
    *,
    replicas: int,
    suspended: str,
    rounds_per_s_now: float,
    left_s: float | None,
    age_s: float,
) -> JobStatus:
    """Return the status of a run that answers.

    Args:
        name: Name of the job.
        run_dir: Run folder.
        status: The coordinator's status; None before it is known.
        replicas: Replicas that are asked for. The coordinator may not know the last change yet.
        suspended: "Suspending", "Suspended" or empty.
        rounds_per_s_now: Current rounds per second.
        left_s: Seconds to the end at the current speed; None if unknown.
        age_s: Seconds since the run started.

    Returns:
        The status.
    """
    state, message = (suspended, "") if suspended else _state(status)
    if status is not None and (status.outcome is not None or suspended == SUSPENDED):
        status = at_rest(status, status.outcome)
    return JobStatus(
        name=name,
        place=run_dir,
        state=state,
        message=message,
        replicas=replicas,
        ready=_ready(status) if status is not None else 0,
        round=status.version if status is not None else 0,
        progress=status.log.progress if status is not None else None,
        rounds_per_s_now=rounds_per_s_now,
        left_s=left_s,
        age_s=age_s,
        detail=status,
    )


def ended(run_dir: str, status: Status, outcome: Outcome, age_s: float) -> JobStatus:
    """Return the status of a run that recorded how it ended."""
    return JobStatus(
        name=status.job,
        place=run_dir,
        state=COMPLETE if outcome.complete else FAILED,
        message=outcome.message if outcome.complete else f"{outcome.reason}: {outcome.message}",
        hint=outcome.hint,
        replicas=status.replicas,
        round=status.version,
        progress=status.log.progress,
        age_s=age_s,
        detail=status,
    )


def lost(name: str, run_dir: str, age_s: float) -> JobStatus:
    """Return the status of a run that is gone and left no last status: Failed."""
    return JobStatus(
        name=name,
        place=run_dir,
        state=FAILED,
        message="its `paceline run` was killed, and its ranks ended with it",
        hint=f"its logs are in {run_dir}; start it again",
        age_s=age_s,
    )


def end_unknown(name: str, run_dir: str, age_s: float, *, why: str, hint: str) -> JobStatus:
    """Return the status of a run whose last status does not say how it ended: Ended."""
    return JobStatus(
        name=name,
        place=run_dir,
        state=ENDED,
        message=f"how it ended is not known: {why}",
        hint=hint,
        age_s=age_s,
    )


def unknown(name: str, run_dir: str, *, why: str, hint: str) -> JobStatus:
    """Return the status of a run that is running and cannot be asked: Unknown."""
    return JobStatus(name=name, place=run_dir, state=UNKNOWN, message=why, hint=hint)


def events(status: Status | None) -> list[JobEvent]:
    """Return the coordinator's record of the job's history, the oldest event first."""
    if status is None:
        return []
    bad = {*map(str, _WARNINGS), *_WARNINGS_HERE}
    if status.outcome is not None and not status.outcome.complete:
        bad.add(status.outcome.reason)
    return [
        JobEvent(one.wall_s, one.reason in bad, one.reason, one.message, "coordinator")
        for one in status.history
    ]


def _state(status: Status | None) -> tuple[str, str]:
    """Return the state, named as in the operator's `status.state`, and its message."""
    if status is None:
        return STARTING, ""
    if status.outcome is not None:
        return (COMPLETE if status.outcome.complete else FAILED), status.outcome.message
    held = {condition.type: condition for condition in status.conditions}
    ring = ConditionType.RING_READY in held
    degraded = held.get(ConditionType.DEGRADED)
    if degraded is not None and (not ring or degraded.reason not in _NO_STATE):
        return degraded.reason, degraded.message
    if (resizing := held.get(ConditionType.RESIZING)) is not None:
        return str(ConditionType.RESIZING), resizing.message
    return (TRAINING if ring else STARTING), ""


def _ready(status: Status) -> int:
    """Return the number of replicas whose ranks are all active or benched."""
    counts: dict[int, int] = {}
    for rank in status.ranks:
        if rank.state in (RankPhase.ACTIVE, RankPhase.BENCHED):
            counts[rank.member.slot] = counts.get(rank.member.slot, 0) + 1
    return sum(count >= status.procs for count in counts.values())
