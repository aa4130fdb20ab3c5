"""Whether the job has ended, how, and what is cleared away afterwards (C1).

An end is written into the status before anything of the job is removed, and never taken back. The
coordinator keeps the outcome until then.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from paceline_api.reasons import ConditionType, Reason
from paceline_api.types.enums import CleanPodPolicy, FailureAction

from paceline_operator.core.changes import Changes, Delete
from paceline_operator.core.decide import backoff, transport
from paceline_operator.core.job import Job
from paceline_operator.core.observed import Observed, Pod

RESUMABLE: Final = ("StateLost", "Interrupted")
NOBODY_S: Final = 10.0
"""So long after the last pod has ended a coordinator may still come back with the outcome."""
END_MARGIN_S: Final = 20.0
BLIND_LOOK_S: Final = 5.0
"""From one look to the next while nothing shows whether the pods still run."""


@dataclass(frozen=True, slots=True)
class End:
    complete: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Judgement:
    end: End | None = None
    resume: str = ""
    """All ranks are gone and the last checkpoint is where to go on; why."""
    hold: str = ""
    """Nothing may be created until more is known."""
    look_again_s: float | None = None


def judge(
    job: Job,
    seen: Observed,
    now_s: float,
    *,
    anybody: bool,
    nobody_since_s: float,
    suspending: bool = False,
) -> Judgement:
    """`anybody`: a process of the job may live. `nobody_since_s`: since when none does."""
    assert job.settings is not None
    coordinator = seen.coordinator
    if coordinator is not None and coordinator.outcome is not None and not suspending:
        outcome = coordinator.outcome
        if outcome.complete:
            return Judgement(End(True, Reason.JOB_FINISHED, outcome.message))
        message = outcome.message + (f"; {outcome.hint}" if outcome.hint else "")
        if outcome.reason in RESUMABLE and job.settings.checkpoint is not None:
            return Judgement(resume=message)
        return Judgement(End(False, _one_word(outcome.reason), message))
    done = next((pod for pod in seen.own(job.uid) if pod.released and not pod.deleting), None)
    # Who speaks with ranks that live hears from them how it ended; nobody else knows any better.
    if done is not None and not suspending and (coordinator is None or not anybody):
        return Judgement(End(True, Reason.JOB_FINISHED, f"{done.name} was released as finished"))
    # Once the last round is made, deaths are no failures of the job (R17).
    at_its_end = coordinator is not None and coordinator.stopping
    ruled = None if at_its_end else _by_rule(job, seen)
    if ruled is not None:
        return Judgement(ruled)
    late = _deadline(job, now_s)
    if isinstance(late, End):
        return Judgement(late)
    unfit = None if suspending else transport.preflight(job, seen, now_s)
    if isinstance(unfit, str):
        return Judgement(End(False, Reason.PREFLIGHT_FAILED, unfit))
    lost = Judgement()
    if job.start_s is not None and not suspending:
        lost = _state(job, seen, now_s, anybody=anybody, nobody_since_s=nobody_since_s)
    looks = [at for at in (late, unfit, lost.look_again_s) if at is not None]
    if looks and lost.end is None:
        return Judgement(None, lost.resume, lost.hold, min(looks))
    return lost


def _deadline(job: Job, now_s: float) -> End | float | None:
    limit_ns = job.settings.active_deadline_ns if job.settings else None
    if limit_ns is None or job.start_s is None:
        return None
    due_s = job.start_s + limit_ns / 1e9
    if now_s < due_s:
        return due_s
    seconds = limit_ns // 10**9
    return End(
        False,
        Reason.DEADLINE_EXCEEDED,
        f"the job has run for {seconds} s, as spec.activeDeadlineSeconds allows",
    )


def _by_rule(job: Job, seen: Observed) -> End | None:
    """failurePolicy and backoffLimit, from what pods ended with. Ranks that end while their pod
    lives are their coordinator's business."""
    assert job.settings is not None
    workers = [pod for pod in seen.own(job.uid) if pod.is_worker]
    rules = job.settings.failure_rules
    for pod in workers:
        if backoff.rule_for(pod, rules) is FailureAction.FAIL_JOB:
            return End(False, Reason.FAILURE_POLICY, _last_words(pod))
    version = max(seen.version, job.round)
    failures = backoff.failures(workers, version, rules)
    if failures > job.settings.backoff_limit:
        last = max((p for p in workers if p.end), key=lambda p: p.ended_seen_s, default=None)
        lines = f"; the last one: {_last_words(last)}" if last else ""
        return End(
            False,
            Reason.BACKOFF_LIMIT_EXCEEDED,
            f"{failures} pods failed without a committed round in between, "
            f"spec.backoffLimit is {job.settings.backoff_limit}{lines}",
        )
    return None


def _state(
    job: Job, seen: Observed, now_s: float, *, anybody: bool, nobody_since_s: float
) -> Judgement:
    """A job that has trained and has lost everybody: never a silent fresh start."""
    assert job.settings is not None
    resumable = job.settings.checkpoint is not None
    coordinator = seen.coordinator
    before = job.round
    if not anybody and not job.set_aside:
        due_s = nobody_since_s + NOBODY_S
        if now_s < due_s:
            # Its coordinator may know how it ended.
            return Judgement(
                hold="all ranks are gone; the coordinator is asked", look_again_s=due_s
            )
        why = "all ranks are gone" + (f" after {before} rounds" if before else "")
        if resumable:
            return Judgement(resume=why)
        return Judgement(End(False, Reason.STATE_LOST, f"{why}, and there is no checkpoint"))
    # A rank that was left out may have been one round ahead of the others (R8).
    if (
        coordinator is not None
        and coordinator.generation
        and coordinator.version + 1 < before
        and not resumable
    ):
        why = f"a new membership has begun at round {coordinator.version} after {before} rounds"
        return Judgement(End(False, Reason.STATE_LOST, f"{why}: all ranks with weights are gone"))
    return Judgement()


def _last_words(pod: Pod) -> str:
    text = pod.end.message.strip() if pod.end else ""
    return f"{backoff.why_ended(pod)}" + (f": {text[-1000:]}" if text else "")


def _one_word(reason: str) -> str:
    """As the schema of conditions asks for it."""
    return reason if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", reason) else "Failed"


def after_the_end(job: Job, seen: Observed, now_s: float) -> Changes:
    """Clearing away, once the end stands in the status."""
    ended_s = job.completion_s if job.completion_s is not None else now_s
    spec, settings = job.spec, job.settings
    policy = spec.clean_pod_policy if spec and spec.clean_pod_policy else CleanPodPolicy.RUNNING
    grace_s = (settings.elasticity.drain_grace_ns / 1e9 if settings else 60.0) + END_MARGIN_S
    # Workers that were released, or told of the end, end by themselves, with their logs. Nobody has
    # told the others.
    told = seen.coordinator is not None and seen.coordinator.outcome is not None
    in_order = told or job.holds(ConditionType.COMPLETE)
    pods = [pod for pod in seen.own(job.uid) if not pod.deleting]
    delete: list[Delete] = []
    looks: list[float] = []
    running = [pod for pod in pods if pod.is_worker and not pod.ended]
    overdue = True
    for pod in running:
        due_s = _shown_since_s(job, seen, pod, ended_s, now_s) + grace_s if in_order else ended_s
        overdue = overdue and now_s >= due_s
        if policy is CleanPodPolicy.NONE:
            continue
        if now_s >= due_s:
            delete.append(Delete(pod.name, pod.uid, "the job has ended"))
        else:
            looks.append(due_s if seen.pods_live_s is not None else now_s + BLIND_LOOK_S)
    if policy is CleanPodPolicy.RUNNING:
        for pod in (pod for pod in pods if pod.is_worker and pod.lingers):
            since_s = _shown_since_s(job, seen, pod, max(ended_s, pod.ended_seen_s), now_s)
            gone_s = since_s + backoff.SIDECAR_S
            looks.append(gone_s)
            if now_s >= gone_s:
                why = "the job has ended, and only a sidecar of it runs"
                delete.append(Delete(pod.name, pod.uid, why))
    if policy is CleanPodPolicy.ALL:
        done = [pod for pod in pods if pod.is_worker and pod.ended]
        delete += [Delete(p.name, p.uid, "cleanPodPolicy is All") for p in done]
    if overdue:
        # It would be restarted for ever, and nobody asks it any more.
        coordinators = [pod for pod in pods if pod.is_coordinator]
        delete += [Delete(p.name, p.uid, "its outcome stands in the status") for p in coordinators]
    ttl_s = spec.ttl_seconds_after_finished if spec else None
    delete_job = False
    if ttl_s is not None:
        delete_job = now_s >= ended_s + ttl_s
        looks.append(ended_s + ttl_s)
    look = min((at for at in looks if at > now_s), default=None)
    return Changes(delete=tuple(delete), delete_job=delete_job, look_again_s=look)


def _shown_since_s(job: Job, seen: Observed, pod: Pod, since_s: float, now_s: float) -> float:
    """Return since when the operator would have seen that a pod has ended after `since_s`.

    While the API server or the pod's kubelet is away, a pod that has ended is shown as running:
    its age at that moment says nothing, and to delete it would delete its logs. A node that is
    away for so long that it counts as lost shows nothing more.
    """
    if seen.pods_live_s is None:
        return now_s
    since_s = max(since_s, seen.pods_live_s)
    node = seen.nodes.get(pod.node) if seen.nodes_fresh else None
    if node is None or node.out_of_service:
        return since_s
    if node.ready:
        return max(since_s, node.ready_again_s)
    lost_s = job.settings.elasticity.node_lost_ns / 1e9 if job.settings else 60.0
    return max(since_s, node.not_ready_since_s + lost_s)
