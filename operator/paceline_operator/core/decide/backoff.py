"""Causes and back-off of replacements, and which ends of pods count as failures (C8).

The counts are stored in annotations of the replacement, which are written with its creation. A
crash of the operator between two writes can therefore neither lose nor double them.

    the old pod was          replaced        counts against backoffLimit
    deleted, evicted, lost   at once         no
    ended with an error      after back-off  yes, until a round is committed
    refused by its kubelet   after back-off  no
    slow (Replace)           at once         no

A rule of spec.failurePolicy that matches the end overrides the last column.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from paceline_api.failures import ruled
from paceline_api.names import PREFIX
from paceline_api.settings import FailureRuleSettings
from paceline_api.types.enums import FailureAction

from paceline_operator.core.observed import NOT_STARTED, Pod
from paceline_operator.core.plan import ReplacementCause

NOTE_CAUSE: Final = f"{PREFIX}cause"
"""Annotation: the cause of the replacement, a `ReplacementCause`."""
NOTE_WHY: Final = f"{PREFIX}replaces"
"""Annotation: what happened to the replaced pod, worded for people."""
NOTE_FAILURES: Final = f"{PREFIX}failures"
"""Annotation: failures of the job without a committed round in between."""
NOTE_AT_ROUND: Final = f"{PREFIX}failures-at-round"
"""Annotation: the committed round at which NOTE_FAILURES was counted."""
NOTE_SLOT_FAILURES: Final = f"{PREFIX}slot-failures"
"""Annotation: failures of this slot in a row, from which the back-off follows."""
NOTE_REPLACED: Final = f"{PREFIX}replaced"
"""Annotation: number of pods replaced in this job so far, including this one."""
NOTE_AVOID: Final = f"{PREFIX}avoid-nodes"
"""Annotation: nodes that the pod must avoid, separated by commas."""

BASE_S: Final = 2.0
"""Delay after the second failure in a row, in seconds; it doubles with each further one."""
MAX_S: Final = 300.0
"""Upper bound on the back-off, in seconds."""
HEALTHY_S: Final = 600.0
"""Seconds of life after which a pod's end starts a new series of failures in its slot."""
SIDECAR_S: Final = 10.0
"""Seconds that a sidecar may run after the ranks of its pod, such as to ship the last log lines."""
KEPT: Final = 3
"""Number of ended pods that are kept for their logs."""
EVICTED: Final = ("Evicted", "Preempting", "Preempted", "NodeLost", "Terminated", "Shutdown")
"""Reasons with which the cluster itself has ended a pod."""


@dataclass(frozen=True, slots=True)
class BackoffVerdict:
    """Cause of a replacement, and the time from which it may be created."""

    cause: ReplacementCause
    why: str
    due_s: float
    slot_failures: int


def cause_of(pod: Pod) -> ReplacementCause:
    """Return the cause for the replacement of a pod that is no longer active."""
    if pod.end is None or pod.deleting or pod.disrupted or pod.end.reason in EVICTED:
        return ReplacementCause.LOST
    if pod.end.in_order:
        return ReplacementCause.ENDED
    return ReplacementCause.REFUSED if pod.end.exit_code == NOT_STARTED else ReplacementCause.FAILED


def verdict(newest: Pod | None, now_s: float, *, lost: str = "") -> BackoffVerdict:
    """Decide when the successor of a slot's newest pod may be created.

    Args:
        newest: The newest pod of the slot; None if it never had one.
        now_s: The present time.
        lost: Reason why the pod counts as lost with its node; empty if it does not.

    Returns:
        The cause, the time, and the slot's failures in a row.
    """
    if newest is None:
        return BackoffVerdict(ReplacementCause.NEW, "it is wanted", now_s, 0)
    before = _count(newest, NOTE_SLOT_FAILURES)
    if lost:
        return BackoffVerdict(ReplacementCause.LOST, lost, now_s, before)
    cause = cause_of(newest)
    why = why_ended(newest)
    if cause is ReplacementCause.LOST:
        return BackoffVerdict(cause, why, now_s, before)
    assert newest.end is not None
    ended_s = newest.end.finished_s or newest.ended_seen_s
    lived_s = ended_s - newest.created_s
    failures = 1 if lived_s >= HEALTHY_S else before + 1
    return BackoffVerdict(cause, why, min(ended_s, now_s) + delay_s(failures), failures)


def delay_s(failures: int) -> float:
    """Return the back-off: 0 after the first failure, then 2, 4, 8 ... seconds."""
    if failures < 2:
        return 0.0
    return min(MAX_S, BASE_S * 2.0 ** min(failures - 2, 16))


def why_ended(pod: Pod) -> str:
    """Describe how a pod ended, for people."""
    if pod.end is None:
        return f"{pod.name} was deleted" if pod.deleting else f"{pod.name} is gone"
    if pod.end.reason in EVICTED or pod.disrupted:
        return f"{pod.name} was evicted: {pod.end.message or pod.end.reason}"
    if pod.end.exit_code == NOT_STARTED:
        return f"{pod.name} was refused by its node: {pod.end.message or pod.end.reason}"
    text = f"{pod.name} ended with exit code {pod.end.exit_code}"
    if pod.end.reason not in ("", "Completed", "Error"):
        text += f" ({pod.end.reason})"
    return text


def rule_for(pod: Pod, rules: Iterable[FailureRuleSettings]) -> FailureAction | None:
    """Return the action of spec.failurePolicy for a pod that has failed.

    Args:
        pod: The pod.
        rules: Rules of the job.

    Returns:
        The action; None if no rule matches, or the pod has not failed.
    """
    end = pod.end
    if end is None or end.in_order or pod.deleting:
        return None
    # If the cluster ended the pod or never started it, the exit code is not that of its ranks.
    own = cause_of(pod) is ReplacementCause.FAILED
    return ruled(rules, end.exit_code if own else 0, end.reason)


def _counts(pod: Pod, rules: Iterable[FailureRuleSettings]) -> bool:
    """Return True if the pod's end counts against backoffLimit."""
    action = rule_for(pod, rules)
    if action is None:
        return pod.ended and cause_of(pod) is ReplacementCause.FAILED
    return action is not FailureAction.IGNORE


def failures(
    workers: Iterable[Pod], version: int, rules: Iterable[FailureRuleSettings] = ()
) -> int:
    """Count the failed pods without a committed round in between.

    Failed pods that are not replaced yet are included.

    Args:
        workers: Worker pods of the job.
        version: The last committed round.
        rules: Rules of spec.failurePolicy.

    Returns:
        The number of failures.
    """
    pods = list(workers)
    newest = newest_by_slot(pods)
    counted = 0
    for pod in pods:
        if NOTE_FAILURES in pod.notes and version <= _count(pod, NOTE_AT_ROUND):
            counted = max(counted, _count(pod, NOTE_FAILURES))
    return counted + sum(_counts(pod, rules) for pod in newest.values())


def newest_by_slot(workers: Iterable[Pod]) -> dict[int, Pod]:
    """Return the pod with the highest attempt of each slot."""
    newest: dict[int, Pod] = {}
    for pod in workers:
        known = newest.get(pod.slot)
        if known is None or pod.attempt > known.attempt:
            newest[pod.slot] = pod
    return newest


def replaced_so_far(workers: Iterable[Pod], known: int) -> int:
    """Return the number of replaced pods, by what is known and by the pods' annotations."""
    return max([known, *(_count(pod, NOTE_REPLACED) for pod in workers)])


def notes_for(
    verdict_: BackoffVerdict, *, replaced: int, failed: int, version: int, avoid: tuple[str, ...]
) -> dict[str, str]:
    """Return the annotations of a replacement.

    Args:
        verdict_: Cause of the replacement.
        replaced: Number of pods replaced in the job, including this one.
        failed: Failures of the job without a committed round in between.
        version: The last committed round.
        avoid: Nodes that the pod must avoid.

    Returns:
        The annotations; empty for a pod that replaces none.
    """
    if verdict_.cause is ReplacementCause.NEW:
        return {}
    notes = {
        NOTE_CAUSE: str(verdict_.cause),
        NOTE_WHY: verdict_.why[:250],
        NOTE_REPLACED: str(replaced),
    }
    if verdict_.slot_failures:
        notes[NOTE_SLOT_FAILURES] = str(verdict_.slot_failures)
    if failed:
        notes |= {NOTE_FAILURES: str(failed), NOTE_AT_ROUND: str(version)}
    if avoid:
        notes[NOTE_AVOID] = ",".join(avoid)
    return notes


def avoided(notes: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes that a pod with these annotations must avoid."""
    return tuple(node for node in notes.get(NOTE_AVOID, "").split(",") if node)


def _count(pod: Pod, note: str) -> int:
    text = pod.notes.get(note, "")
    return int(text) if text.isdecimal() else 0
