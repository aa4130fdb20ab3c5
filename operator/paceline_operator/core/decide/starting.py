"""Containers that do not start: what is told of each after a minute, and when the job gives up.

A container waits for its image, its configuration, a volume, or for a node. Where the kubelet does
not say in the status why, as for a volume of a missing Secret, the Events of the pod do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from paceline_api.reasons import ConditionType, Reason

from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Observed, Pod
from paceline_operator.core.plan import Stuck

WAITS_S: Final = 60.0
"""Seconds that a container may wait before it is told."""
ASK_S: Final = 30.0
"""Seconds between two requests for the Events of a pod."""
ANSWERED_S: Final = 1.0
"""Seconds after a request for Events until the next decision, which knows the answer."""
ASKED_MAX: Final = 4
"""Upper bound on the pods of a job whose Events are asked for at once: most wait for the same."""
STUCK_MAX: Final = 5
"""Upper bound on the different reasons that are told."""


@dataclass(slots=True)
class Starting:
    """What a decision finds out about the pods that wait."""

    stuck: tuple[Stuck, ...] = ()
    waits_s: dict[str, float] = field(default_factory=dict)
    """New value of `Clocks.waits_s`."""
    ask: tuple[str, ...] = ()
    """Uids of pods whose Events are to be asked for."""
    looks: list[float] = field(default_factory=list)


def starting(pods: Iterable[Pod], observed: Observed, now_s: float) -> Starting:
    """Find the containers that wait.

    Args:
        pods: Active pods of the job.
        observed: Everything observed besides the job.
        now_s: The present time.

    Returns:
        What waits for more than a minute, and which Events to ask for.
    """
    result = Starting()
    groups: dict[tuple[str, bool], list[str]] = {}
    ask: list[str] = []
    for pod in sorted(pods, key=lambda pod: (not pod.is_coordinator, pod.slot)):
        waits = tuple(_waits(pod, observed))
        if not waits and not pod.is_creating:
            continue
        since_s = pod.bound_s or pod.created_s
        if pod.phase != "Pending":
            since_s = observed.clocks.waits_s.get(pod.uid, now_s)
            result.waits_s[pod.uid] = since_s
        if now_s < since_s + WAITS_S:
            result.looks.append(since_s + WAITS_S)
            continue
        for why, unschedulable in waits:
            groups.setdefault((why, unschedulable), []).append(pod.name)
        if pod.is_creating:
            warned = observed.warned.get(pod.uid)
            if warned is None or now_s >= warned.asked_s + ASK_S:
                ask.append(pod.uid)
            else:
                result.looks.append(warned.asked_s + ASK_S)
    result.ask = tuple(ask[:ASKED_MAX])
    if ask:
        result.looks.append(now_s + ANSWERED_S)
    every = [Stuck(tuple(names), why, gone) for (why, gone), names in groups.items()]
    every.sort(key=lambda stuck: stuck.unschedulable)
    result.stuck = tuple(every[:STUCK_MAX])
    return result


def _waits(pod: Pod, observed: Observed) -> Iterator[tuple[str, bool]]:
    """Yield what the containers of a pod wait for, and whether it is for a node."""
    for why in pod.waits:
        yield why, False
    if pod.is_creating and (warned := observed.warned.get(pod.uid)) and warned.message:
        yield warned.message, False
    if not pod.node and pod.unschedulable:
        yield pod.unschedulable, True


def never_started(job: JobObject, now_s: float) -> tuple[str, float]:
    """Return why a job that does not start is given up, by scheduling.startDeadlineSeconds.

    Args:
        job: The job.
        now_s: The present time.

    Returns:
        The text, empty if the job goes on, and the time at which it is due; 0.0 without a bound, or
        once the job trains. As for activeDeadlineSeconds, suspension and queue do not count.
    """
    scheduling = job.spec.scheduling if job.spec else None
    limit_s = scheduling.start_deadline_seconds if scheduling else None
    if limit_s is None or job.active_s is None or job.has_started:
        return "", 0.0
    due_s = job.active_s + limit_s
    if now_s < due_s:
        return "", due_s
    ready = job.condition(ConditionType.READY) or {}
    why = ready.get("message") if ready.get("reason") != Reason.TRAINING else ""
    text = f"the job did not train within {limit_s} s, spec.scheduling.startDeadlineSeconds"
    return text + (f"; it waited for: {why}" if why else ""), due_s
