"""The end of a job: whether and how it has ended, and what to remove afterwards (C1).

An end is written into the status before anything of the job is removed, and it is never revoked.
The coordinator keeps the outcome until then.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from paceline_api.reasons import ConditionType, Reason
from paceline_api.times import NS_PER_S
from paceline_api.types.enums import CleanPodPolicy, FailureAction

from paceline_operator.core.changes import Changes, Delete
from paceline_operator.core.decide import backoff, transport
from paceline_operator.core.decide.starting import never_started
from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Observed, Pod

RESUMABLE: Final = ("StateLost", "Interrupted")
"""Reasons of an outcome after which a job with a checkpoint is resumed."""
NOBODY_S: Final = 10.0
"""Seconds to wait, after the last pod has ended, for a coordinator that reports the outcome."""
END_MARGIN_S: Final = 20.0
"""Seconds beyond drainGraceSeconds that workers have to exit after the job's end."""
BLIND_LOOK_S: Final = 5.0
"""Seconds between two looks while the watch of pods has an outage."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The final result of a job."""

    complete: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of `judge`; all fields empty means that the job continues."""

    end: JobEnd | None = None
    resume: str = ""
    """Reason why the job resumes from its last checkpoint: all ranks are gone."""
    hold: str = ""
    """Reason why nothing may be created until more is known."""
    look_again_s: float | None = None


def judge(
    job: JobObject,
    observed: Observed,
    now_s: float,
    *,
    anybody: bool,
    nobody_since_s: float,
    suspending: bool = False,
) -> Judgement:
    """Decide whether the job has ended.

    Args:
        job: A job with a valid spec.
        observed: Everything observed besides the job.
        now_s: The present time.
        anybody: True if a process of the job may live.
        nobody_since_s: Time since which no process can live; only used if `anybody` is False.
        suspending: True if a suspension is under way or was just lifted: an outcome is then its
            stop.

    Returns:
        The end of the job, or why it resumes or holds, and when to look again.
    """
    assert job.settings is not None
    coordinator = observed.coordinator
    if coordinator is not None and coordinator.outcome is not None and not suspending:
        outcome = coordinator.outcome
        if outcome.complete:
            return Judgement(JobEnd(True, Reason.JOB_FINISHED, outcome.message))
        message = outcome.message + (f"; {outcome.hint}" if outcome.hint else "")
        if outcome.reason in RESUMABLE and job.settings.checkpoint is not None:
            return Judgement(resume=message)
        return Judgement(JobEnd(False, _one_word(outcome.reason), message))
    done = next((pod for pod in observed.own(job.uid) if pod.released and not pod.deleting), None)
    # A coordinator with living ranks learns from them how the job ended, so wait for its outcome.
    if done is not None and not suspending and (coordinator is None or not anybody):
        return Judgement(JobEnd(True, Reason.JOB_FINISHED, f"{done.name} was released as finished"))
    # After the last round, dead ranks do not fail the job (R17).
    at_its_end = coordinator is not None and coordinator.stopping
    ruled = None if at_its_end else _by_rule(job, observed)
    if ruled is not None:
        return Judgement(ruled)
    late = _deadline(job, now_s)
    if isinstance(late, JobEnd):
        return Judgement(late)
    given_up, start_s = never_started(job, now_s)
    if given_up and not anybody_trains(observed):
        return Judgement(JobEnd(False, Reason.START_DEADLINE_EXCEEDED, given_up))
    unfit = None if suspending else transport.preflight(job, observed, now_s)
    if isinstance(unfit, str):
        return Judgement(JobEnd(False, Reason.PREFLIGHT_FAILED, unfit))
    lost = Judgement()
    if job.start_s is not None and not suspending:
        lost = _state(job, observed, now_s, anybody=anybody, nobody_since_s=nobody_since_s)
    looks = [at for at in (late, unfit, lost.look_again_s, start_s or None) if at is not None]
    looks = [at for at in looks if at > now_s or at != start_s]
    if looks and lost.end is None:
        return Judgement(None, lost.resume, lost.hold, min(looks))
    return lost


def anybody_trains(observed: Observed) -> bool:
    """Return True if the coordinator reports a membership, which the status may not have yet."""
    return observed.coordinator is not None and bool(observed.coordinator.membership)


def _deadline(job: JobObject, now_s: float) -> JobEnd | float | None:
    """Return the end of a job that was active for too long, as batch/v1 Job counts it.

    Args:
        job: The job.
        now_s: The present time.

    Returns:
        The end; the time at which it is due; None without a limit, or while the job is not active.
    """
    limit_ns = job.settings.active_deadline_ns if job.settings else None
    if limit_ns is None or job.active_s is None:
        return None
    due_s = job.active_s + limit_ns / NS_PER_S
    if now_s < due_s:
        return due_s
    text = f"the job was active for {limit_ns // NS_PER_S} s, as spec.activeDeadlineSeconds allows"
    ready = job.condition(ConditionType.READY)
    if not job.has_started and ready is not None:
        text += f"; it did not train in this time: {ready.get('message', '')}"
    return JobEnd(False, Reason.DEADLINE_EXCEEDED, text)


def _by_rule(job: JobObject, observed: Observed) -> JobEnd | None:
    """Return the end of the job if failurePolicy or backoffLimit demands it, else None.

    Only ends of pods count here. The coordinator handles ranks that end while their pod lives.

    Args:
        job: The job.
        observed: Everything observed besides the job.

    Returns:
        The end; None if the job may continue.
    """
    assert job.settings is not None
    workers = [pod for pod in observed.own(job.uid) if pod.is_worker]
    rules = job.settings.failure_rules
    for pod in workers:
        if backoff.rule_for(pod, rules) is FailureAction.FAIL_JOB:
            return JobEnd(False, Reason.FAILURE_POLICY, _last_words(pod))
    version = max(observed.version, job.round)
    failures = backoff.failures(workers, version, rules)
    if failures > job.settings.backoff_limit:
        last = max((p for p in workers if p.end), key=lambda p: p.ended_seen_s, default=None)
        lines = f"; the last one: {_last_words(last)}" if last else ""
        return JobEnd(
            False,
            Reason.BACKOFF_LIMIT_EXCEEDED,
            f"{failures} pods failed without a committed round in between, "
            f"spec.backoffLimit is {job.settings.backoff_limit}{lines}",
        )
    return None


def _state(
    job: JobObject, observed: Observed, now_s: float, *, anybody: bool, nobody_since_s: float
) -> Judgement:
    """End or resume a job that lost all ranks after it trained; it never silently restarts."""
    assert job.settings is not None
    resumable = job.settings.checkpoint is not None
    coordinator = observed.coordinator
    before = job.round
    if not anybody and not job.set_aside:
        due_s = nobody_since_s + NOBODY_S
        if now_s < due_s:
            # The coordinator may still report how the job ended.
            return Judgement(
                hold="all ranks are gone; the coordinator is asked", look_again_s=due_s
            )
        why = "all ranks are gone" + (f" after {before} rounds" if before else "")
        if resumable:
            return Judgement(resume=why)
        return Judgement(JobEnd(False, Reason.STATE_LOST, f"{why}, and there is no checkpoint"))
    # An excluded rank may have been one round ahead of the others (R8), so allow one round.
    if (
        coordinator is not None
        and coordinator.membership
        and coordinator.version + 1 < before
        and not resumable
    ):
        why = f"a new membership has begun at round {coordinator.version} after {before} rounds"
        return Judgement(
            JobEnd(False, Reason.STATE_LOST, f"{why}: all ranks with weights are gone")
        )
    return Judgement()


def _last_words(pod: Pod) -> str:
    text = pod.end.message.strip() if pod.end else ""
    return f"{backoff.why_ended(pod)}" + (f": {text[-1000:]}" if text else "")


def _one_word(reason: str) -> str:
    """Return a reason that the schema of conditions accepts."""
    return reason if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", reason) else "Failed"


def after_the_end(job: JobObject, observed: Observed, now_s: float) -> Changes:
    """Remove the pods of a job whose end is in the status.

    Args:
        job: A finished job.
        observed: Everything observed besides the job.
        now_s: The present time.

    Returns:
        The pods to delete by cleanPodPolicy, the job itself after ttlSecondsAfterFinished, and when
        to look again.
    """
    ended_s = job.completion_s if job.completion_s is not None else now_s
    spec, settings = job.spec, job.settings
    policy = spec.clean_pod_policy if spec and spec.clean_pod_policy else CleanPodPolicy.RUNNING
    grace_s = (settings.elasticity.drain_grace_ns / NS_PER_S if settings else 60.0) + END_MARGIN_S
    # Workers that were released or informed of the end exit by themselves and keep their logs.
    # Other workers do not know of the end and are deleted at once.
    has_outcome = observed.coordinator is not None and observed.coordinator.outcome is not None
    in_order = has_outcome or job.holds(ConditionType.COMPLETE)
    pods = [pod for pod in observed.own(job.uid) if not pod.deleting]
    delete: list[Delete] = []
    looks: list[float] = []
    running = [pod for pod in pods if pod.is_worker and not pod.ended]
    overdue = True
    for pod in running:
        due_s = (
            _shown_since_s(job, observed, pod, ended_s, now_s) + grace_s if in_order else ended_s
        )
        overdue = overdue and now_s >= due_s
        if policy is CleanPodPolicy.NONE:
            continue
        if now_s >= due_s:
            delete.append(Delete(pod.name, pod.uid, "the job has ended"))
        else:
            looks.append(due_s if observed.pods_live_s is not None else now_s + BLIND_LOOK_S)
    if policy is CleanPodPolicy.RUNNING:
        for pod in (pod for pod in pods if pod.is_worker and pod.lingers):
            since_s = _shown_since_s(job, observed, pod, max(ended_s, pod.ended_seen_s), now_s)
            gone_s = since_s + backoff.SIDECAR_S
            looks.append(gone_s)
            if now_s >= gone_s:
                why = "the job has ended, and only a sidecar of it runs"
                delete.append(Delete(pod.name, pod.uid, why))
    if policy is CleanPodPolicy.ALL:
        done = [pod for pod in pods if pod.is_worker and pod.ended]
        delete += [Delete(p.name, p.uid, "cleanPodPolicy is All") for p in done]
    if overdue:
        # The kubelet would restart the coordinator forever, and no one needs its answers now.
        coordinators = [pod for pod in pods if pod.is_coordinator]
        delete += [Delete(p.name, p.uid, "its outcome stands in the status") for p in coordinators]
    ttl_s = spec.ttl_seconds_after_finished if spec else None
    delete_job = False
    if ttl_s is not None:
        delete_job = now_s >= ended_s + ttl_s
        looks.append(ended_s + ttl_s)
    look = min((at for at in looks if at > now_s), default=None)
    return Changes(delete=tuple(delete), delete_job=delete_job, look_again_s=look)


def _shown_since_s(
    job: JobObject, observed: Observed, pod: Pod, since_s: float, now_s: float
) -> float:
    """Return the time from which the operator would have observed an end after `since_s`.

    While the API server or the pod's kubelet is away, a pod that has ended is shown as running. Its
    age at that moment proves nothing, and deleting it would delete its logs. A node that is away
    long enough to count as lost shows nothing more.

    Args:
        job: The job.
        observed: Everything observed besides the job.
        pod: The pod.
        since_s: Time of the event after which the pod should have ended.
        now_s: The present time.

    Returns:
        Seconds of the operator's wall clock.
    """
    if observed.pods_live_s is None:
        return now_s
    since_s = max(since_s, observed.pods_live_s)
    node = observed.nodes.get(pod.node) if observed.nodes_fresh else None
    if node is None or node.out_of_service:
        return since_s
    if node.ready:
        return max(since_s, node.ready_again_s)
    lost_s = job.settings.elasticity.node_lost_ns / NS_PER_S if job.settings else 60.0
    return max(since_s, node.not_ready_since_s + lost_s)
