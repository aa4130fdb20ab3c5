"""Why a slot needs another pod, when it may have it, and what counts as failure (C8).

Counts live in annotations of the replacement itself, written with its creation: no crash of the
operator between two writes can lose or double them.

    the old pod was          replaced        counts against backoffLimit
    deleted, evicted, lost   at once         no
    ended with an error      after back-off  yes, until a round is committed
    refused by its kubelet   after back-off  no
    slow (Replace)           at once         no

A rule of spec.failurePolicy that matches the end says otherwise about the last column.
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
from paceline_operator.core.plan import Cause

NOTE_CAUSE: Final = f"{PREFIX}cause"
NOTE_WHY: Final = f"{PREFIX}replaces"
NOTE_FAILURES: Final = f"{PREFIX}failures"
NOTE_AT_ROUND: Final = f"{PREFIX}failures-at-round"
NOTE_SLOT_FAILURES: Final = f"{PREFIX}slot-failures"
NOTE_REPLACED: Final = f"{PREFIX}replaced"
"""Pods replaced in this job so far, this one included."""
NOTE_AVOID: Final = f"{PREFIX}avoid-nodes"

BASE_S: Final = 2.0
MAX_S: Final = 300.0
HEALTHY_S: Final = 600.0
"""A pod that lived so long ends the row of its slot's failures."""
SIDECAR_S: Final = 10.0
"""So long a sidecar may run on after the ranks of its pod, such as to ship their last lines."""
KEPT: Final = 3
"""Ended pods of earlier attempts that are kept for their logs."""
EVICTED: Final = ("Evicted", "Preempting", "Preempted", "NodeLost", "Terminated", "Shutdown")
"""Reasons for which the cluster itself has ended a pod."""


@dataclass(frozen=True, slots=True)
class Verdict:
    cause: Cause
    why: str
    due_s: float
    slot_failures: int


def cause_of(pod: Pod) -> Cause:
    """Of a pod that is no longer active."""
    if pod.end is None or pod.deleting or pod.disrupted or pod.end.reason in EVICTED:
        return Cause.LOST
    if pod.end.in_order:
        return Cause.ENDED
    return Cause.REFUSED if pod.end.exit_code == NOT_STARTED else Cause.FAILED


def verdict(newest: Pod | None, now_s: float, *, lost: str = "") -> Verdict:
    """What follows the newest pod of a slot. `lost`: why it counts as gone with its node."""
    if newest is None:
        return Verdict(Cause.NEW, "it is wanted", now_s, 0)
    before = _count(newest, NOTE_SLOT_FAILURES)
    if lost:
        return Verdict(Cause.LOST, lost, now_s, before)
    cause = cause_of(newest)
    why = why_ended(newest)
    if cause is Cause.LOST:
        return Verdict(cause, why, now_s, before)
    assert newest.end is not None
    ended_s = newest.end.finished_s or newest.ended_seen_s
    lived_s = ended_s - newest.created_s
    failures = 1 if lived_s >= HEALTHY_S else before + 1
    return Verdict(cause, why, min(ended_s, now_s) + delay_s(failures), failures)


def delay_s(failures: int) -> float:
    """Nothing after the first failure, then 2, 4, 8 ... seconds."""
    if failures < 2:
        return 0.0
    return min(MAX_S, BASE_S * 2.0 ** min(failures - 2, 16))


def why_ended(pod: Pod) -> str:
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
    """What spec.failurePolicy says of a pod that has ended badly; None: nothing."""
    end = pod.end
    if end is None or end.in_order or pod.deleting:
        return None
    # Where the cluster has ended it, or never started it, the exit code is not that of its ranks.
    own = cause_of(pod) is Cause.FAILED
    return ruled(rules, end.exit_code if own else 0, end.reason)


def _counts(pod: Pod, rules: Iterable[FailureRuleSettings]) -> bool:
    action = rule_for(pod, rules)
    if action is None:
        return pod.ended and cause_of(pod) is Cause.FAILED
    return action is not FailureAction.IGNORE


def failures(
    workers: Iterable[Pod], version: int, rules: Iterable[FailureRuleSettings] = ()
) -> int:
    """Failed pods without a committed round in between, those not yet replaced included."""
    pods = list(workers)
    newest = newest_by_slot(pods)
    counted = 0
    for pod in pods:
        if NOTE_FAILURES in pod.notes and version <= _count(pod, NOTE_AT_ROUND):
            counted = max(counted, _count(pod, NOTE_FAILURES))
    return counted + sum(_counts(pod, rules) for pod in newest.values())


def newest_by_slot(workers: Iterable[Pod]) -> dict[int, Pod]:
    found: dict[int, Pod] = {}
    for pod in workers:
        known = found.get(pod.slot)
        if known is None or pod.attempt > known.attempt:
            found[pod.slot] = pod
    return found


def replaced_so_far(workers: Iterable[Pod], known: int) -> int:
    return max([known, *(_count(pod, NOTE_REPLACED) for pod in workers)])


def notes_for(
    verdict_: Verdict, *, replaced: int, failed: int, version: int, avoid: tuple[str, ...]
) -> dict[str, str]:
    """Annotations of a replacement, the `replaced`-th of its job."""
    if verdict_.cause is Cause.NEW:
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
    return tuple(node for node in notes.get(NOTE_AVOID, "").split(",") if node)


def _count(pod: Pod, note: str) -> int:
    text = pod.notes.get(note, "")
    return int(text) if text.isdecimal() else 0
