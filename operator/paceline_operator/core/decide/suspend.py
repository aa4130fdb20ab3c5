"""Suspension of a job: a stop at an agreed round if it has checkpoints, then no pods.

A drain is not tried, since all ranks leave at once (C5). Without a checkpoint there is nothing to
wait for, and the condition names what is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from paceline_api.reasons import Reason
from paceline_api.times import NS_PER_S

from paceline_operator.core.changes import Delete
from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Observed

STOP_S: Final = 60.0
"""Upper bound on the stop round and its checkpoint in seconds, in addition to drainGraceSeconds."""
AGAIN_S: Final = 15.0
"""Seconds after which a request for the stop that had no effect is repeated."""


@dataclass(slots=True)
class Suspension:
    """The next step of a suspension."""

    reason: Reason = Reason.SUSPENDED_BY_SPEC
    message: str = ""
    stop: bool = False
    """True: ask the coordinator for the stop round now."""
    done: bool = False
    """True if all pods of the job are gone or being deleted."""
    loses_state: bool = False
    delete: list[Delete] = field(default_factory=list)
    stopping_s: float | None = None
    """New value for the clock `Clocks.stopping_s`."""
    look_again_s: float | None = None


def suspend(job: JobObject, observed: Observed, now_s: float) -> Suspension:
    """Decide the next step of a suspension.

    Args:
        job: A job with a valid spec.
        observed: Everything observed besides the job.
        now_s: The present time.

    Returns:
        The step, with reason and message for the condition Suspended.
    """
    assert job.settings is not None
    decision = Suspension()
    # Include ended pods: their exit must not be mistaken for the end of the resumed job.
    pods = [pod for pod in observed.own(job.uid) if not pod.deleting]
    decision.done = not pods
    rounds = max(observed.version, job.round)
    trained = job.start_s is not None
    keeps = job.settings.checkpoint is not None
    decision.loses_state = trained and not keeps
    decision.message = (
        "spec.suspend is true"
        if job.settings.suspend
        else "the job was suspended; its pods go, and others take their place"
    )
    if decision.loses_state:
        decision.message += (
            f"; there is no spec.checkpoint, so the {rounds} rounds trained so far are lost "
            "and the job starts anew when it is resumed"
        )
    working = any(pod.is_worker and not pod.ended for pod in pods)
    # A stop can only be requested from a coordinator. Without one, the last checkpoint is used.
    asked = any(not pod.is_worker and not pod.ended for pod in pods)
    if trained and keeps and working and asked and not _stopped(observed):
        first_s = observed.clocks.stopping_s if observed.clocks.stopping_s is not None else now_s
        decision.stopping_s = first_s
        due_s = first_s + STOP_S + job.settings.elasticity.drain_grace_ns / NS_PER_S
        if now_s < due_s:
            decision.reason = Reason.SUSPENDING
            decision.message = "the job stops at an agreed round and writes a checkpoint"
            decision.stop = (
                now_s - observed.sent.stop_s >= AGAIN_S and observed.coordinator is not None
            )
            decision.look_again_s = min(due_s, max(now_s, observed.sent.stop_s) + AGAIN_S)
            return decision
    decision.delete = [Delete(pod.name, pod.uid, "the job is suspended") for pod in pods]
    return decision


def _stopped(observed: Observed) -> bool:
    return observed.coordinator is not None and observed.coordinator.outcome is not None
