"""The coordinator's pod: exactly one, recreated if it is gone, lost or cannot run.

The kubelet restarts its container in place. A new pod is needed only if the pod or its node is
gone, or if restarts do not help. If its node refuses the pod, the next one follows after a
back-off. Two coordinators for a moment do no harm: the later one wins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from paceline_api.times import NS_PER_S

from paceline_operator.core.changes import Delete
from paceline_operator.core.decide import backoff, evidence
from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import NO_SLOT, Observed, Pod

CRASHING: Final = "CrashLoopBackOff"
"""Reason with which the kubelet reports a container that crashes repeatedly."""
CRASHING_S: Final = 60.0
"""Age in seconds below which a crashing pod is left to its kubelet."""


@dataclass(slots=True)
class CoordinatorPodDecision:
    """The coordinator's present pod, the pod to create, and the pods to delete."""

    present: Pod | None = None
    make: int | None = None
    """Attempt of the pod to create; None if none is to be created."""
    why: str = ""
    waiting: str = ""
    """Reason why none is created for now."""
    notes: dict[str, str] = field(default_factory=dict)
    """Annotations of the new pod."""
    delete: list[Delete] = field(default_factory=list)
    node_missing_s: dict[str, float] = field(default_factory=dict)
    """New values for the clock `Clocks.node_missing_s`."""
    look_again_s: float | None = None

    @property
    def runs(self) -> bool:
        """Return True if the present pod is in the phase Running."""
        return self.present is not None and self.present.phase == "Running"


def coordinator_pod(
    job: JobObject, observed: Observed, now_s: float, *, over: str = ""
) -> CoordinatorPodDecision:
    """Decide what to do with the coordinator's pods.

    Args:
        job: A job with a valid spec.
        observed: Everything observed besides the job.
        now_s: The present time.
        over: Reason why the present coordinator cannot serve any longer; empty if it can.

    Returns:
        The decision.
    """
    assert job.settings is not None
    decision = CoordinatorPodDecision()
    pods = [pod for pod in observed.own(job.uid) if pod.is_coordinator]
    usable: list[Pod] = []
    node_lost_s = job.settings.elasticity.node_lost_ns / NS_PER_S
    for pod in sorted((p for p in pods if p.active), key=lambda p: p.attempt):
        speaks = evidence.answers(pod, observed, now_s)
        loss = evidence.lost(pod, observed, speaks=speaks, node_lost_s=node_lost_s, now_s=now_s)
        if loss.node_missing_s is not None:
            decision.node_missing_s[pod.node] = loss.node_missing_s
        if loss.look_again_s is not None:
            decision.look_again_s = min(
                loss.look_again_s, decision.look_again_s or loss.look_again_s
            )
        why = loss.why or over
        if not why and pod.waiting.startswith(CRASHING):
            if now_s - pod.created_s >= CRASHING_S:
                why = f"{pod.name} crashes again and again: {pod.waiting}"
            else:
                decision.look_again_s = pod.created_s + CRASHING_S
        if why:
            decision.delete.append(Delete(pod.name, pod.uid, why))
            decision.why = why
        else:
            usable.append(pod)
    for pod in usable[:-1]:
        decision.delete.append(Delete(pod.name, pod.uid, f"{usable[-1].name} has taken its place"))
    ended = sorted((p for p in pods if p.ended and not p.deleting), key=lambda p: -p.attempt)
    for pod in ended[backoff.KEPT :]:
        decision.delete.append(Delete(pod.name, pod.uid, "only the last ended pods are kept"))
    if usable:
        decision.present = usable[-1]
        return decision
    verdict = backoff.verdict(max(pods, key=lambda p: p.attempt, default=None), now_s)
    if verdict.due_s > now_s:
        decision.waiting = f"{verdict.why}; it is made anew in {verdict.due_s - now_s:.0f} s"
        decision.look_again_s = min(verdict.due_s, decision.look_again_s or verdict.due_s)
        return decision
    if verdict.slot_failures:
        decision.notes[backoff.NOTE_SLOT_FAILURES] = str(verdict.slot_failures)
    known = [pod.attempt for pod in observed.pods if pod.is_coordinator]
    decision.make = max([*known, observed.used.get(NO_SLOT, 0)], default=0) + 1
    if decision.make == 1 and (job.start_s is not None or job.highest_attempt > 1):
        decision.make = job.highest_attempt + 1
    gone = "it is gone" if job.has_started else "the job starts"
    decision.why = decision.why or (verdict.why if pods else gone)
    return decision
