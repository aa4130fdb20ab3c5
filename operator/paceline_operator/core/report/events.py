"""Events for `kubectl describe`: one for each transition, with what the user can do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline_api.reasons import ConditionType, Reason
from paceline_api.status import Status

from paceline_operator.core.changes import KubernetesEvent
from paceline_operator.core.decide import transport
from paceline_operator.core.decide.coordinator_pod import CoordinatorPodDecision
from paceline_operator.core.decide.suspend import Suspension
from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Observed
from paceline_operator.core.plan import PodPlan, ReplacementCause
from paceline_operator.core.report.refused import as_events

RESUMED: Final = "resumed:"
"""Prefix of the keys of Events about resumed jobs."""
SKIPPED: Final = "skipped:"
"""Prefix of the keys of Events about skipped batches."""
OF_SILENCE: Final = (Reason.COORDINATOR_AWAY, Reason.ANSWER_REFUSED)
"""Reasons of Degraded that mean that the operator gets no usable answer."""
WORD_MAX: Final = 40
"""Upper bound on the characters of what a pod waits for in the key of its Event."""
RESUMED_MAX: Final = 100
"""Upper bound on a job's Events that rest only on reports of its coordinator."""


def events_of(
    job: JobObject,
    observed: Observed,
    plan: PodPlan,
    status: Mapping[str, Any],
    pod: CoordinatorPodDecision,
    resume: str,
) -> tuple[KubernetesEvent, ...]:
    """Return the Events of a running job.

    Keys name the transition, so the same transition always gives the same Event.

    Args:
        job: The job with its stored status.
        observed: Everything observed besides the job.
        plan: The plan for its workers.
        status: The new status.
        pod: The decision about the coordinator's pod.
        resume: Reason why the job resumes from its checkpoint; empty if it does not.

    Returns:
        All Events, including those that were sent before.
    """
    assert job.settings is not None
    events: list[KubernetesEvent] = []
    if resume:
        text = f"{resume}; the job goes on from its last checkpoint"
        key = f"resume:{pod.make}"
        events.append(KubernetesEvent(key, Reason.RESUMED_FROM_CHECKPOINT, text, warning=True))
    coordinator = observed.coordinator or Status()
    sent = {key for key in observed.sent.events if key.startswith((RESUMED, SKIPPED))}
    for happened in coordinator.history:
        skipped = happened.reason == Reason.BATCH_SKIPPED
        reason = Reason.BATCH_SKIPPED if skipped else Reason.RESUMED_FROM_CHECKPOINT
        key = f"{SKIPPED if skipped else RESUMED}{coordinator.coordinator}:{happened.seq}"
        if key in sent or len(sent) < RESUMED_MAX:
            sent.add(key)
            events.append(KubernetesEvent(key, reason, happened.message, warning=skipped))
    if plan.no_fabric:
        key = f"fabric:{job.generation}"
        events.append(KubernetesEvent(key, Reason.FABRIC_UNAVAILABLE, plan.no_fabric, warning=True))
    less = (status.get("fabric") or {}).get("message")
    if less and not (job.status.get("fabric") or {}):
        events.append(KubernetesEvent("fabric:less", Reason.FABRIC_UNAVAILABLE, less, warning=True))
    events += as_events(job, observed.refusal, observed.budget_refusal)
    now = _degraded(status)
    if now.get("reason") == Reason.OBJECT_MISSING:
        key = f"missing:{job.generation}"
        events.append(KubernetesEvent(key, Reason.OBJECT_MISSING, now["message"], warning=True))
    for stuck in plan.stuck:
        reason = Reason.UNSCHEDULABLE if stuck.unschedulable else Reason.POD_NOT_STARTING
        key = f"stuck:{stuck.pods[0]}:{stuck.why.partition(':')[0][:WORD_MAX]}"
        events.append(KubernetesEvent(key, reason, stuck.message, warning=True))
    for new in plan.new:
        if new.cause is not ReplacementCause.NEW:
            text = f"{job.name}-{new.slot}-{new.attempt} is made: {new.why}"
            failed = new.cause in (ReplacementCause.FAILED, ReplacementCause.REFUSED)
            key = f"replace:{new.slot}:{new.attempt}"
            events.append(KubernetesEvent(key, Reason.RANK_REPLACED, text, warning=failed))
    if job.start_s is not None and pod.make is not None and observed.used and not job.set_aside:
        text = f"the coordinator is made anew: {pod.why}; rounds go on meanwhile"
        events.append(
            KubernetesEvent(f"coordinator:{pod.make}", Reason.COORDINATOR_AWAY, text, warning=True)
        )
    events += _of_silence(job, observed, plan, status)
    if not job.holds(ConditionType.RING_READY) and _holds(status, ConditionType.RING_READY):
        text = f"{len(coordinator.living)} ranks form the first membership; training runs"
        events.append(KubernetesEvent(f"ring:{job.highest_attempt}", Reason.RING_FORMED, text))
    events += _of_changes(job, observed, status)
    for slow in plan.slow:
        text = (
            f"rank {slow.rank.rank} on {slow.pod.name}, node {slow.pod.node}, takes "
            f"{slow.slowdown_percent} % of the median step; {slow.action} applies"
        )
        key = f"slow:{slow.pod.name}:{slow.rank.member.local}:{slow.action}"
        events.append(KubernetesEvent(key, Reason.RANK_SLOW, text, warning=True))
    return tuple(events)


def _of_silence(
    job: JobObject, observed: Observed, plan: PodPlan, status: Mapping[str, Any]
) -> list[KubernetesEvent]:
    """Return an Event if the coordinator became unreachable, or for another reason than before."""
    now, before = _degraded(status), _degraded(job.status)
    reason = next((r for r in OF_SILENCE if r == now.get("reason")), None)
    if reason is None or now == before:
        return []
    cause = observed.unheard.cause if observed.unheard else ""
    key = f"unheard:{plan.clocks.coordinator_away_s}:{cause}"
    return [KubernetesEvent(key, reason, now["message"], warning=True)]


def _degraded(status: Mapping[str, Any]) -> dict[str, str]:
    matches = (c for c in status.get("conditions") or () if c.get("type") == ConditionType.DEGRADED)
    return {name: str(c.get(name, "")) for c in matches for name in ("status", "reason", "message")}


def _of_changes(
    job: JobObject, observed: Observed, status: Mapping[str, Any]
) -> list[KubernetesEvent]:
    assert job.settings is not None
    events = []
    before = (job.status.get("collective") or {}).get("mode")
    now = (status.get("collective") or {}).get("mode")
    if before and now and before != now:
        text = f"rounds run in mode {now} instead of {before}"
        events.append(KubernetesEvent(f"mode:{now}:{job.generation}", Reason.MODE_CHANGED, text))
    comparison = transport.carried(job, observed)
    if comparison is not None and transport.verified_at(job):
        holds, _, text = transport.explained(job, observed, comparison)
        if not holds and job.holds(ConditionType.TRANSPORT_VERIFIED):
            key = f"transport:{status.get('membershipGeneration')}:{comparison.carrier}"
            events.append(KubernetesEvent(key, Reason.TRANSPORT_DEGRADED, text, warning=True))
    wanted = job.settings.replicas
    coordinator = observed.coordinator
    if (
        coordinator is not None
        and job.start_s is not None
        and coordinator.replicas not in (0, wanted)
    ):
        text = f"{coordinator.replicas} -> {wanted} replicas"
        events.append(KubernetesEvent(f"scale:{job.generation}", Reason.SCALING, text))
    return events


def suspended_event(job: JobObject, suspension: Suspension) -> KubernetesEvent:
    """Return the Event of a suspension: a warning if the job loses its progress."""
    key = f"suspend:{job.generation}:{suspension.reason}"
    if suspension.loses_state:
        return KubernetesEvent(key, Reason.PROGRESS_LOST, suspension.message, warning=True)
    return KubernetesEvent(key, suspension.reason, suspension.message)


def _holds(status: Mapping[str, Any], kind: str) -> bool:
    return any(
        c.get("type") == kind and c.get("status") == "True" for c in status.get("conditions") or ()
    )
