"""The standard conditions of a job, each derived from the facts that it is about.

A condition keeps its transition time while its status stays the same. A condition that has never
been True is not written. The exceptions are Ready, Scheduled and RingReady, which every job has
from its start, and TransportVerified, which is False if the network is not as required. Ready and
Stalled, which sum up the others, are in standing.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from paceline_api.reasons import ConditionType, Reason
from paceline_api.status import RankPhase
from paceline_api.times import timestamp

from paceline_operator.core.decide import transport
from paceline_operator.core.decide.coordinator_pod import CoordinatorPodDecision
from paceline_operator.core.decide.starting import WAITS_S
from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Observed, Pod
from paceline_operator.core.plan import PodPlan
from paceline_operator.core.providers.choice import provider_of
from paceline_operator.core.report.refused import ALSO, as_condition
from paceline_operator.core.unheard import TOLD_S

MESSAGE_MAX: Final = 2000
"""Upper bound on the length of a condition's message, in characters."""
ALWAYS: Final = (
    *(ConditionType.READY, ConditionType.SCHEDULED, ConditionType.RING_READY),
    ConditionType.TRANSPORT_VERIFIED,
)
"""Conditions that are also written while they have never been True."""


@dataclass(frozen=True, slots=True)
class WantedCondition:
    """A condition as a decision wants it; its times are added when it is merged."""

    type: ConditionType
    holds: bool
    reason: str
    message: str


def merged(job: JobObject, wanted: list[WantedCondition], now_s: float) -> list[dict[str, Any]]:
    """Return the conditions to write: the wanted ones, and the others as they were.

    Args:
        job: The job with its stored conditions.
        wanted: Conditions of this decision.
        now_s: The present time, for transitions.

    Returns:
        The conditions in the form of the API server.
    """
    before = {str(c.get("type")): c for c in job.status.get("conditions") or ()}
    result = {kind: dict(condition) for kind, condition in before.items()}
    for condition in wanted:
        old = before.get(condition.type)
        if old is None and not condition.holds and condition.type not in ALWAYS:
            continue
        status = "True" if condition.holds else "False"
        same = old is not None and old.get("status") == status
        result[condition.type] = {
            "type": str(condition.type),
            "status": status,
            "reason": str(condition.reason),
            "message": condition.message[:MESSAGE_MAX],
            "lastTransitionTime": old["lastTransitionTime"] if same and old else timestamp(now_s),
            "observedGeneration": job.generation,
        }
    return list(result.values())


def scheduled(
    job: JobObject, plan: PodPlan, coordinator: CoordinatorPodDecision
) -> WantedCondition:
    """Return Scheduled: minReplicas workers have a node, and the coordinator's pod is not stuck."""
    assert job.settings is not None
    placed = sum(bool(pod.node) for pod in plan.living)
    least = job.settings.min_replicas
    stuck = _without_node(coordinator.present)
    if placed >= least and not stuck:
        message = f"at least minReplicas = {least} workers have a node"
        return WantedCondition(ConditionType.SCHEDULED, True, Reason.PODS_PLACED, message)
    message = provider_of(job).waits(job, plan)
    if message and plan.living:
        return WantedCondition(ConditionType.SCHEDULED, False, Reason.QUEUED, message)
    stuck = next(filter(None, map(_without_node, plan.living)), stuck)
    if stuck:
        return WantedCondition(ConditionType.SCHEDULED, False, Reason.UNSCHEDULABLE, stuck)
    message = f"fewer than minReplicas = {least} workers have a node"
    return WantedCondition(ConditionType.SCHEDULED, False, Reason.STARTING, message)


def _without_node(pod: Pod | None) -> str:
    """Return the scheduler's message if it found no node for a pod; empty otherwise."""
    stuck = pod is not None and pod.unschedulable and not pod.node
    return f"{pod.name}: {pod.unschedulable}" if pod is not None and stuck else ""


def transport_verified(job: JobObject, observed: Observed) -> WantedCondition | None:
    """Return TransportVerified; None until a transport is reported, as in a job of one rank."""
    comparison = transport.carried(job, observed)
    if comparison is None:
        return None
    holds, reason, message = transport.explained(job, observed, comparison)
    return WantedCondition(ConditionType.TRANSPORT_VERIFIED, holds, reason, message)


def ring_ready(job: JobObject, observed: Observed, plan: PodPlan) -> WantedCondition | None:
    """Return the condition RingReady; None if nothing new is known."""
    coordinator = observed.coordinator
    if coordinator is None:
        if job.condition(ConditionType.RING_READY) is None:
            return WantedCondition(
                ConditionType.RING_READY, False, Reason.STARTING, "pods are being made"
            )
        return None
    members = [rank for rank in coordinator.ranks if rank.rank is not None]
    computing = any(rank.state in (RankPhase.ACTIVE, RankPhase.BENCHED) for rank in members)
    if coordinator.membership and computing:
        message = f"{len(members)} ranks in membership {coordinator.membership}"
        return WantedCondition(ConditionType.RING_READY, True, Reason.RING_FORMED, message)
    if coordinator.membership and job.holds(ConditionType.RING_READY) and members:
        return None  # a change of the membership takes a moment
    registered = len(coordinator.registered_pods())
    if registered and registered < len(plan.living):
        message = "some workers have come; the start waits for the others"
        return WantedCondition(ConditionType.RING_READY, False, Reason.SETTLING, message)
    message = "the workers have not yet formed a membership"
    return WantedCondition(ConditionType.RING_READY, False, Reason.STARTING, message)


def degraded(
    job: JobObject, observed: Observed, plan: PodPlan, pod: CoordinatorPodDecision, now_s: float
) -> WantedCondition:
    """Return the condition Degraded with the most important problem.

    Args:
        job: The job.
        observed: Everything observed besides the job.
        plan: The plan for its workers.
        pod: The decision about the coordinator's pod.
        now_s: The present time.

    Returns:
        The condition.
    """
    problem = _worst(job, observed, plan, pod, now_s)
    if problem is None:
        message = "nothing is missing"
        return WantedCondition(ConditionType.DEGRADED, False, Reason.RESOLVED, message)
    return WantedCondition(ConditionType.DEGRADED, True, *problem)


def _worst(
    job: JobObject, observed: Observed, plan: PodPlan, pod: CoordinatorPodDecision, now_s: float
) -> tuple[str, str] | None:
    """Return reason and message of the most important problem; None if there is none."""
    assert job.settings is not None
    if plan.no_fabric:
        return Reason.FABRIC_UNAVAILABLE, plan.no_fabric
    missing = _missing(observed, plan, now_s)
    if refused := as_condition(job, observed.refusal):
        return refused[0], ALSO.join(filter(None, [refused[1], missing]))
    cannot = [each.message for each in plan.stuck if not each.unschedulable]
    if cannot:
        return Reason.POD_NOT_STARTING, "; ".join(cannot)
    if missing:
        return Reason.OBJECT_MISSING, missing
    pods = (*plan.living, *([pod.present] if pod.present else []))
    stuck = next((p for p in pods if p.waiting and _hopeless(p)), None)
    if stuck is not None:
        return Reason.POD_NOT_STARTING, f"{stuck.name}: {stuck.waiting}"
    if pod.waiting:
        return Reason.POD_NOT_STARTING, pod.waiting
    if trouble := provider_of(job).trouble(job, plan):
        return trouble
    coordinator = observed.coordinator
    if coordinator is not None and (reported := coordinator.condition(ConditionType.DEGRADED)):
        return reported.reason, reported.message
    if coordinator is None and observed.unheard is not None and observed.unheard.was_refused:
        return Reason.ANSWER_REFUSED, _not_heard(job, observed)
    if coordinator is None and _is_away(plan, now_s):
        return Reason.COORDINATOR_AWAY, _not_heard(job, observed)
    if job.has_started and len(plan.living) < job.settings.min_replicas:
        message = f"fewer than minReplicas = {job.settings.min_replicas} workers are there"
        return Reason.BELOW_MIN_REPLICAS, "; ".join([message, *plan.waiting])
    ranks = coordinator.ranks if coordinator is not None else ()
    if benched := [rank.member for rank in ranks if rank.state is RankPhase.BENCHED]:
        names = sorted(f"{member.slot}.{member.local}" for member in benched)
        return Reason.RANK_BENCHED, f"silent and without data: rank {', '.join(names)}"
    without = [each.message for each in plan.stuck if each.unschedulable]
    if job.has_started and without:
        return Reason.UNSCHEDULABLE, "; ".join(without)
    if plan.slow:
        slow = plan.slow[0]
        return (
            Reason.RANK_SLOW,
            f"rank {slow.rank.rank} on {slow.pod.name} ({slow.pod.node}) is slow",
        )
    return as_condition(job, observed.budget_refusal)


def _missing(observed: Observed, plan: PodPlan, now_s: float) -> str:
    """Return what was missing before the first pod, until a worker runs or a minute is over.

    After that the kubelet and the scheduler say what the pods wait for.
    """
    missing = observed.missing
    runs = any(pod.phase != "Pending" for pod in plan.living)
    if missing is None or runs or now_s >= missing.at_s + WAITS_S:
        return ""
    return f"{missing.message}; create it, or correct the field: pods that name it wait for it"


def _is_away(plan: PodPlan, now_s: float) -> bool:
    since_s = plan.clocks.coordinator_away_s
    return since_s is not None and since_s <= now_s - TOLD_S


def _not_heard(job: JobObject, observed: Observed) -> str:
    meanwhile = (
        "rounds go on, membership changes wait"
        if job.has_started
        else "whether its ranks train is not known"
    )
    if observed.unheard is None:
        return f"the coordinator does not answer; {meanwhile}"
    text = f"the coordinator does not answer the operator at {observed.unheard.why}; {meanwhile}"
    if observed.unheard.was_refused:
        text = (
            f"the operator refuses the coordinator's answers, {observed.unheard.why}; {meanwhile}"
        )
    return f"{text}; {observed.unheard.remedy}"


def _hopeless(pod: Pod) -> bool:
    """Return True if the pod waits for something that a user has to repair."""
    words = (
        "ErrImage",
        "ImagePull",
        "InvalidImage",
        "CreateContainer",
        "RunContainer",
        "CrashLoop",
    )
    return pod.waiting.startswith(words)


def resizing(job: JobObject, observed: Observed, plan: PodPlan) -> WantedCondition:
    """Return the condition Resizing, True while the workers differ from the target size."""
    assert job.settings is not None
    if job.start_s is None:
        return WantedCondition(ConditionType.RESIZING, False, Reason.RESOLVED, "")
    if observed.coordinator is not None and observed.coordinator.stopping:
        # Ranks that have finished have left the membership, and nobody replaces them.
        return WantedCondition(
            ConditionType.RESIZING, False, Reason.RESOLVED, "the job comes to its end"
        )
    wanted = job.settings.replicas
    procs = job.settings.procs_per_replica
    full = observed.coordinator.full_pods(procs) if observed.coordinator is not None else None
    replaced = [new for new in plan.new if new.notes]
    if replaced:
        return WantedCondition(ConditionType.RESIZING, True, Reason.RANK_REPLACED, replaced[0].why)
    if len(plan.living) != wanted or plan.new:
        message = f"{wanted} replicas are wanted"
        return WantedCondition(
            ConditionType.RESIZING, True, Reason.SCALING, "; ".join([message, *plan.waiting])
        )
    if full is None:
        old = job.condition(ConditionType.RESIZING) or {}
        holds = old.get("status") == "True"
        reason, message = str(old.get("reason") or Reason.RESOLVED), str(old.get("message") or "")
        return WantedCondition(ConditionType.RESIZING, holds, reason, message)
    standby = observed.coordinator.standby_pods() if observed.coordinator is not None else set()
    out = [pod for pod in plan.living if (pod.slot, pod.attempt) not in full]
    joining = [pod for pod in out if (pod.slot, pod.attempt) not in standby]
    idle = len(out) - len(joining)
    rest = f"{idle} stand by until one of allowedSizes is reached" if idle else ""
    if joining:
        names = ", ".join(pod.name for pod in joining[:4])
        message = f"{wanted} replicas are there, {names} not yet in"
        message = "; ".join(filter(None, [message, rest]))
        return WantedCondition(ConditionType.RESIZING, True, Reason.SCALING, message)
    message = f"{wanted - idle} of {wanted} replicas train; {rest}"
    message = message if idle else f"all {wanted} replicas train"
    return WantedCondition(ConditionType.RESIZING, False, Reason.RESOLVED, message)
