"""The decision about one job: what to write, what to send, and when to look again.

It is level-triggered: it looks at the present state and never at what has changed. A lost,
duplicated or late event, a crash between two writes, or a write by another client therefore makes
no difference in the end. The same arguments always give the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec
from paceline_api.membership import MembershipSettings
from paceline_api.names import NOTE_REVISION
from paceline_api.reasons import ConditionType, Reason
from paceline_api.rounds import RoundSettings
from paceline_api.status import RankPhase
from paceline_api.types.status import TERMINATION_MAX

from paceline_operator.core import refusals
from paceline_operator.core.changes import (
    Changes,
    Create,
    KubernetesEvent,
    PreflightRequest,
    SecretId,
)
from paceline_operator.core.clocks import Clocks
from paceline_operator.core.decide import (
    evidence,
    fabric,
    finish,
    resize,
    suspend,
    transport,
)
from paceline_operator.core.decide.coordinator_pod import CoordinatorPodDecision, coordinator_pod
from paceline_operator.core.decide.starting import WAITS_S, starting
from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Observed
from paceline_operator.core.plan import NewPod, PodPlan
from paceline_operator.core.pods import children
from paceline_operator.core.pods.companions import companions
from paceline_operator.core.pods.fabric import ChosenFabric
from paceline_operator.core.pods.frozen import file_id, settings_differ
from paceline_operator.core.pods.preflight import looked_up, needs_dry_run
from paceline_operator.core.providers.choice import provider_of
from paceline_operator.core.report import conditions, status
from paceline_operator.core.report.conditions import WantedCondition
from paceline_operator.core.report.events import events_of, suspended_event
from paceline_operator.core.unheard import TOLD_S

HEAR_S: Final = 2.0
"""Seconds that a new operator waits for the coordinator's first report before it enlarges a job. A
coordinator that still has a smaller target would drain the new workers."""


def reconcile(job: JobObject, observed: Observed, now_s: float) -> Changes:
    """Decide what to do for one job now.

    Args:
        job: The job, with its stored status.
        observed: Everything observed besides the job.
        now_s: The operator's wall clock, in seconds since the epoch.

    Returns:
        What to write and send, the clocks that go on running, and when to decide again.
    """
    if job.deleting:
        return Changes()  # owner references delete the pods, even without an operator (C1)
    if job.finished:
        return _after_the_end(job, observed, now_s)
    if job.spec is None or job.settings is None:
        return _invalid(job, observed, now_s)
    observed = _of_the_present_coordinator(job, observed)
    if job.settings.suspend or _half_suspended(job, observed):
        return _suspend(job, observed, now_s)
    return _run(job, observed, now_s)


def _after_the_end(job: JobObject, observed: Observed, now_s: float) -> Changes:
    changes = finish.after_the_end(job, observed, now_s)
    if job.status.get("observedGeneration") == job.generation or job.spec is None:
        return changes
    # Whoever changes ttlSecondsAfterFinished of a job that has ended sees that it is in force.
    now = {"observedGeneration": job.generation, "resolved": job.resolved}
    return replace(changes, status={**job.status, **now, "explicit": list(job.explicit)})


def _of_the_present_coordinator(job: JobObject, observed: Observed) -> Observed:
    """Drop the status of an earlier coordinator, from before a suspension or a crash."""
    uids = {pod.uid for pod in observed.own(job.uid) if pod.is_coordinator and pod.active}
    if observed.coordinator is None or observed.coordinator.coordinator in uids:
        return observed
    return replace(observed, coordinator=None)


def _invalid(job: JobObject, observed: Observed, now_s: float) -> Changes:
    """Report a spec that is invalid beyond what the schema catches, and change nothing."""
    text = job.problems
    if job.reason is not Reason.RUNTIME_NOT_FOUND:
        text += "; change it with kubectl edit or apply"
    wanted = [
        WantedCondition(ConditionType.DEGRADED, True, job.reason, text),
    ]
    new_status = status.carried(job, wanted, now_s)
    new_status["state"] = status.state_word(new_status)
    write, look = status.due(job, new_status, observed, now_s)
    event = KubernetesEvent(
        f"invalid:{job.generation}:{job.reason}", job.reason, text, warning=True
    )
    return Changes(
        status=new_status if write else None, events=_unsent((event,), observed), look_again_s=look
    )


def _suspend(job: JobObject, observed: Observed, now_s: float) -> Changes:
    assert job.settings is not None
    decision = suspend.suspend(job, observed, now_s)
    judged = finish.judge(
        job, observed, now_s, anybody=True, nobody_since_s=now_s, suspending=_asked_to_stop(job)
    )
    if (
        judged.end is not None
        and observed.coordinator is not None
        and observed.coordinator.outcome is not None
    ):
        return _end(job, observed, judged.end, now_s)
    wanted = [
        WantedCondition(ConditionType.SUSPENDED, True, decision.reason, decision.message),
        WantedCondition(
            ConditionType.RING_READY, False, Reason.SUSPENDED_BY_SPEC, "the job is suspended"
        ),
        WantedCondition(ConditionType.DEGRADED, False, Reason.RESOLVED, "the job is suspended"),
        WantedCondition(ConditionType.RESIZING, False, Reason.RESOLVED, "the job is suspended"),
    ]
    if decision.reason is Reason.SUSPENDING:
        wanted = wanted[:1]
    new_status = status.carried(job, wanted, now_s)
    new_status.pop("activeTime", None)
    if decision.reason is not Reason.SUSPENDING:
        new_status |= {"replicas": 0, "readyReplicas": 0, "activeRanks": 0}
        new_status["ready"] = f"0/{job.settings.replicas}"
        new_status.pop("transport", None)  # the next pods may be on other nodes
        # Only ranks that have made the stop round stay. Without a checkpoint no rank makes one.
        rows = status.ranks_at_rest(job, observed, complete=False)
        new_status["ranks"] = [row for row in rows if row["state"] == RankPhase.FINISHED]
        new_status |= {"stragglers": [], "stragglerCount": 0}
        status.without_eta(new_status)
        attempts = [pod.attempt for pod in observed.own(job.uid)]
        if attempts or job.highest_attempt:
            # At least 2, so that the pods after the resumption do not reuse names.
            new_status["highestAttempt"] = max(
                job.highest_attempt, 2, *attempts, *observed.used.values()
            )
        if decision.loses_state:
            new_status.pop("startTime", None)
            new_status["round"] = 0
    new_status["state"] = status.state_word(new_status)
    write, look = status.due(job, new_status, observed, now_s)
    looks = [at for at in (decision.look_again_s, look) if at is not None]
    # Write the status before deleting pods, or a crash in between would look like a loss.
    status_first = not write and look is None
    return Changes(
        status=new_status if write else None,
        delete=tuple(decision.delete) if status_first else (),
        events=_unsent((suspended_event(job, decision),), observed),
        targets={"stop": True} if decision.stop and status_first else None,
        stop=decision.stop and status_first,
        clocks=Clocks(stopping_s=decision.stopping_s),
        look_again_s=min(looks, default=now_s if write and decision.delete else None),
        hurry=decision.stop,
        forget_coordinator=decision.done,
    )


def _asked_to_stop(job: JobObject) -> bool:
    """Return True if a suspension is under way: an outcome is then its stop, not the job's end."""
    condition = job.condition(ConditionType.SUSPENDED)
    return condition is not None and condition.get("reason") in (
        Reason.SUSPENDING,
        Reason.SUSPENDED_BY_SPEC,
    )


def _half_suspended(job: JobObject, observed: Observed) -> bool:
    """Return True if the job was resumed before its suspension was complete.

    Ranks that have stopped cannot continue, so their pods have to go first. So have the pods of
    another template: the job was suspended, changed and resumed before the operator saw it.
    """
    left = [pod for pod in observed.own(job.uid) if not pod.deleting]
    if left and job.holds(ConditionType.SUSPENDED):
        return True
    made = {pod.notes[NOTE_REVISION] for pod in left if pod.active and NOTE_REVISION in pod.notes}
    return bool(made - {job.revision})


def _run(job: JobObject, observed: Observed, now_s: float) -> Changes:
    resumed = job.holds(ConditionType.SUSPENDED)
    if resumed:
        observed = replace(observed, coordinator=None)  # it reported before the suspension
    plan = resize.plan(job, observed, now_s)
    living, overruled = evidence.may_live(job, observed, plan.losses)
    before, nobody_s = observed.clocks, now_s
    if not living:
        nobody_s = before.nobody_s if before.nobody_s is not None else now_s
        plan.keep_running(nobody_s=nobody_s)
    judged = finish.judge(
        job,
        observed,
        now_s,
        anybody=bool(living),
        nobody_since_s=nobody_s,
        suspending=resumed,
    )
    plan.look(judged.look_again_s)
    if judged.end is not None:
        return _end(job, observed, judged.end, now_s)
    over = ""
    if (
        judged.resume
        and observed.coordinator is not None
        and observed.coordinator.outcome is not None
    ):
        # The lost ranks may have reported that the job ends. That no longer counts.
        clocks = replace(plan.clocks, ending_s=None)
        over, observed = judged.resume, replace(observed, coordinator=None, clocks=clocks)
        plan = resize.plan(job, observed, now_s)
        plan.clocks = clocks
    coordinator = coordinator_pod(job, observed, now_s, over=over)
    pods = (*plan.living, *([coordinator.present] if coordinator.present else []))
    waiting = starting(pods, observed, now_s)
    plan.stuck = waiting.stuck
    plan.looks += waiting.looks
    plan.keep_running(waits_s=waiting.waits_s)
    plan.keep_running(
        node_missing_s={**plan.clocks.node_missing_s, **coordinator.node_missing_s},
        carrier_unknown=transport.carrier_unknown(job, observed, now_s),
    )
    if observed.coordinator is None and (job.has_started or coordinator.runs):
        away_s = before.coordinator_away_s if before.coordinator_away_s is not None else now_s
        plan.keep_running(coordinator_away_s=away_s)
        _unheard(job, plan, away_s, now_s, has_pod=coordinator.present is not None)
    plan.look(coordinator.look_again_s)
    if judged.hold:
        plan.drop_new()
        plan.hurry = True
    if observed.missing is not None and now_s < observed.missing.at_s + WAITS_S:
        plan.look(observed.missing.at_s + WAITS_S)
    network = fabric.fabric_of(job, observed)
    if fabric.is_instead(job, observed, network):
        observed = replace(observed, refusal=None)  # the refused pod will not be requested again
    blocked = _may_not(job, observed, plan, network, now_s, resumed=resumed)
    provider = provider_of(job)
    notes = provider.hold_back(job, observed, plan)
    makes_coordinator = (
        coordinator.make is not None and not blocked and not provider.waits(job, plan)
    )
    wanted = _conditions(job, observed, plan, coordinator, now_s)
    if blocked:
        plan.drop_new()
    beside = companions(job, observed, plan, now_s, blocked=blocked)
    new_status = status.running(job, observed, plan, wanted, now_s)
    beside.put_into(new_status)
    if isinstance(network, ChosenFabric) and (plan.living or plan.new):
        new_status["fabric"] = network.status()
    write, look = status.due(job, new_status, observed, now_s)
    plan.look(look)
    plan.look(now_s + evidence.LOOK_S if overruled else None)
    makes = bool(plan.new) or makes_coordinator
    secret = _secret_of(job, observed) if makes else None
    workers = tuple(_create(job, new, network, notes, secret) for new in plan.new if secret)
    return Changes(
        beside=beside,
        needs_secret=secret if not observed.sent.secret else None,
        needs_service=makes_coordinator,
        coordinator=_create_coordinator(job, coordinator, network, secret)
        if makes_coordinator and secret
        else None,
        workers=workers,
        preflight=_preflight(job, observed, network) if makes else None,
        verify_job=bool(workers) and not plan.living and job.start_s is not None,
        delete=(*plan.delete, *coordinator.delete),
        status=new_status if write else None,
        events=_unsent(
            events_of(job, observed, plan, new_status, coordinator, judged.resume), observed
        ),
        inventory=evidence.next_inventory(
            observed, living, ((new.slot, new.attempt) for new in plan.new)
        ),
        targets=_targets(job, observed),
        clocks=plan.clocks,
        ask_why=waiting.ask,
        replaced=plan.replaced,
        look_again_s=min(plan.looks, default=None),
        hurry=plan.hurry or overruled or plan.surplus > 0 or _unsettled(job, observed, plan),
    )


def _may_not(
    job: JobObject,
    observed: Observed,
    plan: PodPlan,
    network: ChosenFabric | fabric.NoFabric,
    now_s: float,
    *,
    resumed: bool,
) -> bool:
    """Return True if no pod may be made now."""
    due_s = refusals.retry_at(observed.refusal, job.generation)  # pause after a refusal (C7)
    blocked = now_s < due_s
    plan.look(due_s if blocked else None)
    if isinstance(network, fabric.NoFabric):
        plan.no_fabric, blocked = network.why, True
        plan.look(now_s + fabric.SEARCH_S)
    if resumed or not job.is_admitted:
        # Write the status before creating pods: after a crash in between, the job would look half
        # suspended, or further pods could be merged with another state of the runtime.
        blocked = True
        plan.look(now_s)
    return blocked


def _unheard(job: JobObject, plan: PodPlan, since_s: float, now_s: float, *, has_pod: bool) -> None:
    """Delay growth while the coordinator does not report.

    Args:
        job: The job.
        plan: The plan to change.
        since_s: Time since which the coordinator has not reported.
        now_s: The present time.
        has_pod: True if the coordinator has a usable pod.
    """
    if now_s - since_s < TOLD_S:
        plan.look(since_s + TOLD_S)
    if plan.living and has_pod and job.holds(ConditionType.RING_READY) and now_s - since_s < HEAR_S:
        plan.drop_growth()
        plan.look(since_s + HEAR_S)


def _conditions(
    job: JobObject, observed: Observed, plan: PodPlan, pod: CoordinatorPodDecision, now_s: float
) -> list[WantedCondition]:
    wanted = [
        WantedCondition(ConditionType.SUSPENDED, False, Reason.RESUMED, "spec.suspend is false"),
        conditions.scheduled(job, plan, pod),
        conditions.degraded(job, observed, plan, pod, now_s),
        conditions.resizing(job, observed, plan),
    ]
    if ring := conditions.ring_ready(job, observed, plan):
        wanted.append(ring)
    if verified := conditions.transport_verified(job, observed):
        wanted.append(verified)
    return wanted


def _secret_of(job: JobObject, observed: Observed) -> SecretId:
    """Return the Secret that further pods mount: that of the pods that exist, if there are any."""
    return SecretId(observed.key_in_use(job.uid), observed.file_in_use(job.uid) or file_id(job))


def _preflight(
    job: JobObject, observed: Observed, network: ChosenFabric | fabric.NoFabric
) -> PreflightRequest | None:
    """Return what to ask before the first pod of an attempt; None if there is a pod."""
    if isinstance(network, fabric.NoFabric) or any(pod.active for pod in observed.own(job.uid)):
        return None
    return PreflightRequest(needs_dry_run(job, network), looked_up(job))


def _create_coordinator(
    job: JobObject,
    pod: CoordinatorPodDecision,
    network: ChosenFabric | fabric.NoFabric,
    secret: SecretId,
) -> Create:
    assert pod.make is not None
    assert isinstance(network, ChosenFabric), "nothing is made without one"
    manifest = children.coordinator(
        job, pod.make, key_id=secret.key_id, file=secret.file, notes=pod.notes, fabric=network
    )
    return Create(manifest, pod.why)


def _create(
    job: JobObject,
    new: NewPod,
    network: ChosenFabric | fabric.NoFabric,
    notes: Mapping[str, str],
    secret: SecretId,
) -> Create:
    assert isinstance(network, ChosenFabric), "nothing is made without one"
    manifest = children.worker(
        job,
        new.slot,
        new.attempt,
        key_id=secret.key_id,
        file=secret.file,
        notes={**new.notes, **notes},
        avoid=new.avoid,
        fabric=network,
    )
    provider_of(job).join(job, manifest)
    return Create(manifest, new.why)


def _unsettled(job: JobObject, observed: Observed, plan: PodPlan) -> bool:
    """Return True if a membership change is expected soon."""
    assert job.settings is not None
    if observed.coordinator is None or not job.holds(ConditionType.RING_READY) or plan.new:
        return True
    full = observed.coordinator.full_pods(job.settings.procs_per_replica)
    return len(full) != job.settings.replicas or bool(observed.coordinator.stopping)


def _targets(job: JobObject, observed: Observed) -> dict[str, Any] | None:
    """Return the user's settings that the coordinator does not have yet; None if it has all."""
    assert job.settings is not None
    coordinator = observed.coordinator
    if coordinator is None or coordinator.outcome is not None:
        return None
    targets: dict[str, Any] = {}
    if not coordinator.has_targets or coordinator.replicas != job.settings.replicas:
        targets["replicas"] = job.settings.replicas
    settings = msgspec.to_builtins(RoundSettings.of(job.settings.collective))
    if settings_differ(settings, coordinator.settings):
        targets["settings"] = settings
    membership = MembershipSettings.of(job.settings)
    # A coordinator of an earlier release reports no id, and cannot take them.
    if coordinator.membership_settings not in ("", membership.id):
        targets |= {"membership": msgspec.to_builtins(membership), "membership_id": membership.id}
    return targets or None


def _end(job: JobObject, observed: Observed, end: finish.JobEnd, now_s: float) -> Changes:
    kind = ConditionType.COMPLETE if end.complete else ConditionType.FAILED
    wanted = [
        WantedCondition(kind, True, end.reason, end.message),
        WantedCondition(ConditionType.RING_READY, False, end.reason, "the job has ended"),
        WantedCondition(ConditionType.DEGRADED, False, Reason.RESOLVED, "the job has ended"),
        WantedCondition(ConditionType.RESIZING, False, Reason.RESOLVED, "the job has ended"),
        WantedCondition(ConditionType.SUSPENDED, False, Reason.RESOLVED, "the job has ended"),
    ]
    new_status = status.ended(job, observed, wanted, now_s, complete=end.complete)
    first = end.message.partition("\n")[0]
    new_status["terminationReason"] = f"{end.reason}: {first}"[:TERMINATION_MAX]
    reason = Reason.JOB_FINISHED if end.complete else _known_reason(end.reason)
    event = KubernetesEvent(f"end:{kind}", reason, end.message, warning=not end.complete)
    return Changes(status=new_status, events=_unsent((event,), observed))


def _known_reason(reason: str) -> Reason:
    return next((known for known in Reason if known == reason), Reason.JOB_FAILED)


def _unsent(events: tuple[KubernetesEvent, ...], observed: Observed) -> tuple[KubernetesEvent, ...]:
    return tuple(event for event in events if event.key not in observed.sent.events)
