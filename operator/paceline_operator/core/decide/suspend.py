"""Suspending a job: a stop at an agreed round where a checkpoint can keep the work, then no pods.

Everybody leaving at once is no drain (C5), so no handshake is tried. Without a checkpoint there is
nothing to wait for, and the condition says what is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from paceline_api.reasons import Reason

from paceline_operator.core.changes import Delete
from paceline_operator.core.job import Job
from paceline_operator.core.observed import Observed

STOP_S: Final = 60.0
"""Bound of the stop round and its checkpoint, beside drainGraceSeconds."""
AGAIN_S: Final = 15.0
"""A stop that was not heard is asked for again."""


@dataclass(slots=True)
class Suspension:
    reason: Reason = Reason.SUSPENDED_BY_SPEC
    message: str = ""
    stop: bool = False
    """Ask for the stop round now."""
    done: bool = False
    """No pod is left that is not ending."""
    loses_state: bool = False
    delete: list[Delete] = field(default_factory=list)
    stopping_s: float | None = None
    """The clock of that name."""
    look_again_s: float | None = None


def suspend(job: Job, seen: Observed, now_s: float) -> Suspension:
    assert job.settings is not None
    found = Suspension()
    # Ended ones too: what they ended with must not be taken for the end of the resumed job.
    pods = [pod for pod in seen.own(job.uid) if not pod.deleting]
    found.done = not pods
    rounds = max(seen.version, job.round)
    trained = job.start_s is not None
    keeps = job.settings.checkpoint is not None
    found.loses_state = trained and not keeps
    found.message = "spec.suspend is true"
    if found.loses_state:
        found.message += (
            f"; there is no spec.checkpoint, so the {rounds} rounds trained so far are lost "
            "and the job starts anew when it is resumed"
        )
    working = any(pod.is_worker and not pod.ended for pod in pods)
    # With the coordinator gone nobody can be asked, and what the last checkpoint holds is kept.
    asked = any(not pod.is_worker and not pod.ended for pod in pods)
    if trained and keeps and working and asked and not _stopped(seen):
        first_s = seen.clocks.stopping_s if seen.clocks.stopping_s is not None else now_s
        found.stopping_s = first_s
        due_s = first_s + STOP_S + job.settings.elasticity.drain_grace_ns / 1e9
        if now_s < due_s:
            found.reason = Reason.SUSPENDING
            found.message = "the job stops at an agreed round and writes a checkpoint"
            found.stop = now_s - seen.sent.stop_s >= AGAIN_S and seen.coordinator is not None
            found.look_again_s = min(due_s, max(now_s, seen.sent.stop_s) + AGAIN_S)
            return found
    found.delete = [Delete(pod.name, pod.uid, "the job is suspended") for pod in pods]
    return found


def _stopped(seen: Observed) -> bool:
    return seen.coordinator is not None and seen.coordinator.outcome is not None
