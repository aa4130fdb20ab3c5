"""The plan of worker pods to create and to delete, so that the target size is reached.

Pods that are not training leave first, and the operator deletes them. Among those that train the
coordinator chooses and drains, so that no work is lost. Only if it does not answer for long is a
pod deleted without the handshake. A slot that lost its pod gets the next attempt at once. The old
pod need not have disappeared, since generations fence it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from paceline_api.names import worker_name
from paceline_api.status import RankPhase
from paceline_api.times import NS_PER_S

from paceline_operator.core.changes import Delete
from paceline_operator.core.decide import backoff, evidence, stragglers
from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Observed, Pod
from paceline_operator.core.plan import NewPod, PodPlan, ReplacementCause

ASK_S: Final = 5.0
"""Seconds to wait, after a pod exited with code 0, for the coordinator to confirm that the job
continues."""
HANDSHAKE_MARGIN_S: Final = 20.0
"""Seconds that a drain may take beyond drainGraceSeconds before a pod is deleted without it."""
STUCK_S: Final = 60.0
"""Seconds after which a replacement that fits on no other node may run on the slow one."""


def plan(job: JobObject, observed: Observed, now_s: float) -> PodPlan:
    """Plan the worker pods of a job.

    Args:
        job: A job with a valid spec.
        observed: Everything observed besides the job.
        now_s: The present time.

    Returns:
        The plan: pods that count, pods to create and to delete, and running clocks.
    """
    assert job.settings is not None
    made = PodPlan()
    workers = [pod for pod in observed.own(job.uid) if pod.is_worker]
    known = int((job.status.get("restarts") or {}).get("replicas") or 0)
    made.replaced = backoff.replaced_so_far(workers, max(known, observed.replaced))
    node_lost_s = job.settings.elasticity.node_lost_ns / NS_PER_S
    speakers = evidence.speaking(observed)
    missing_s: dict[str, float] = {}
    for pod in workers:
        if pod.ended:
            continue
        speaks = (pod.slot, pod.attempt) in speakers
        loss = evidence.lost(pod, observed, speaks=speaks, node_lost_s=node_lost_s, now_s=now_s)
        made.look(loss.look_again_s)
        if loss.node_missing_s is not None:
            missing_s[pod.node] = loss.node_missing_s
        if loss.why:
            made.losses[pod.uid] = loss.why
            if not pod.deleting:
                made.delete.append(Delete(pod.name, pod.uid, loss.why))
    made.keep_running(node_missing_s=missing_s)
    living = [pod for pod in workers if pod.active and pod.uid not in made.losses]
    living = _without_doubles(living, made)
    replaced = _replace_slow(job, observed, living, made, now_s)
    replaced |= _replace_stuck(living, made, now_s)
    made.living = [pod for pod in living if pod.uid not in replaced]
    if not _is_at_its_end(observed, workers, made, now_s):
        _fill(job, observed, workers, made, replaced, now_s)
        _shrink(job, observed, made, now_s)
    _free(job, workers, made, now_s)
    _tidy(workers, made)
    return made


def _is_at_its_end(observed: Observed, workers: list[Pod], made: PodPlan, now_s: float) -> bool:
    """Return True if no pod is to be replaced, because the job ends (R17).

    A new coordinator does not know that the last round was made. It learns it from a rank that was
    released; if ranks train, it was not the end.
    """
    coordinator, since_s = observed.coordinator, observed.clocks.ending_s
    if coordinator is not None and coordinator.outcome:
        return True
    if any(pod.released and not pod.deleting for pod in workers):
        return True
    if coordinator is not None and coordinator.stopping:
        made.keep_running(ending_s=since_s if since_s is not None else now_s)
        return True
    trains = coordinator is not None and any(
        rank.state is RankPhase.ACTIVE for rank in coordinator.ranks
    )
    if since_s is None or trains or not made.living:
        return False
    made.keep_running(ending_s=since_s)
    return True


def _without_doubles(living: list[Pod], made: PodPlan) -> list[Pod]:
    """Delete the older of two pods of one slot, which exist until a replaced pod is removed."""
    newest = backoff.newest_by_slot(living)
    for pod in living:
        if newest[pod.slot] is not pod:
            why = f"{newest[pod.slot].name} has taken its place"
            made.delete.append(Delete(pod.name, pod.uid, why))
    return [pod for pod in living if newest[pod.slot] is pod]


def _replace_slow(
    job: JobObject, observed: Observed, living: list[Pod], made: PodPlan, now_s: float
) -> dict[str, tuple[str, tuple[str, ...], ReplacementCause]]:
    verdict = stragglers.verdict(job, observed, living, now_s)
    made.slow = verdict.slow
    made.keep_running(slow_s=verdict.slow_s)
    made.look(verdict.look_again_s)
    slow = verdict.replace
    if slow is None or len(living) > job.settings.replicas:  # type: ignore[union-attr]
        return {}
    why = (
        f"rank {slow.rank.rank} on {slow.pod.name} takes {slow.slowdown_percent} % of the median "
        f"step; it is replaced away from node {slow.pod.node}"
    )
    made.delete.append(Delete(slow.pod.name, slow.pod.uid, why))
    nodes = dict.fromkeys((slow.pod.node, *backoff.avoided(slow.pod.notes)))
    return {slow.pod.uid: (why, tuple(nodes)[: stragglers.NODES_MAX], ReplacementCause.SLOW)}


def _replace_stuck(
    living: list[Pod], made: PodPlan, now_s: float
) -> dict[str, tuple[str, tuple[str, ...], ReplacementCause]]:
    replaced: dict[str, tuple[str, tuple[str, ...], ReplacementCause]] = {}
    for pod in living:
        if pod.node or not pod.unschedulable or not backoff.avoided(pod.notes):
            continue
        if now_s - pod.created_s < STUCK_S:
            made.look(pod.created_s + STUCK_S)
            continue
        why = f"{pod.name} finds no other node than the slow one"
        made.delete.append(Delete(pod.name, pod.uid, why))
        # Keep the cause Slow: its cooldown keeps pods from leaving the same node again.
        replaced[pod.uid] = (why, (), ReplacementCause.SLOW)
    return replaced


def _fill(
    job: JobObject,
    observed: Observed,
    workers: list[Pod],
    made: PodPlan,
    replaced: dict[str, tuple[str, tuple[str, ...], ReplacementCause]],
    now_s: float,
) -> None:
    """Plan a pod for each empty slot, from the lowest, until the target size is reached."""
    assert job.settings is not None
    newest = backoff.newest_by_slot(workers)
    held = {pod.slot for pod in made.living}
    version = max(observed.version, job.round)
    failed = backoff.failures(workers, version, job.settings.failure_rules)
    held |= _asked(observed, newest, held, made, now_s)
    missing = job.settings.replicas - len(held)
    slot = -1
    while missing > 0:
        slot += 1
        if slot in held:
            continue
        missing -= 1
        old = newest.get(slot)
        verdict = backoff.verdict(old, now_s, lost=made.losses.get(old.uid, "") if old else "")
        avoid: tuple[str, ...] = backoff.avoided(old.notes) if old else ()
        if old is None and _vanished(job, observed, slot):
            why = f"{worker_name(job.name, slot, observed.used[slot])} is gone"
            verdict = backoff.BackoffVerdict(ReplacementCause.LOST, why, now_s, 0)
        if old and old.uid in replaced:
            why, avoid, cause = replaced[old.uid]
            verdict = backoff.BackoffVerdict(cause, why, now_s, 0)
        if old and old.deleting and old.created_s < job.resumed_s:
            # The suspension has deleted it; nobody lost a worker.
            verdict = backoff.BackoffVerdict(ReplacementCause.NEW, "the job was resumed", now_s, 0)
        if verdict.due_s > now_s:
            made.look(verdict.due_s)
            made.waiting.append(f"{verdict.why}; its slot waits {verdict.due_s - now_s:.0f} s")
            continue
        made.replaced += verdict.cause is not ReplacementCause.NEW
        notes = backoff.notes_for(
            verdict, replaced=made.replaced, failed=failed, version=version, avoid=avoid
        )
        attempt = next_attempt(job, observed, slot)
        made.new.append(NewPod(slot, attempt, verdict.cause, verdict.why, notes, avoid))


def _vanished(job: JobObject, observed: Observed, slot: int) -> bool:
    """Return True if the slot had a pod and the target has not grown since."""
    assert job.settings is not None
    before = int(job.status.get("replicas") or 0)
    return slot in observed.used and before >= job.settings.replicas


def _asked(
    observed: Observed, newest: Mapping[int, Pod], held: set[int], made: PodPlan, now_s: float
) -> set[int]:
    """Return the slots whose pod exited with code 0 a moment ago.

    Nothing takes such a pod's place, in its slot or another one, before it is known whether the job
    continues.
    """
    slots: set[int] = set()
    for slot, pod in newest.items():
        if slot in held or pod.active or pod.uid in made.losses:
            continue
        if backoff.cause_of(pod) is ReplacementCause.ENDED and not _goes_on(observed, pod, now_s):
            made.look(pod.ended_seen_s + ASK_S)
            made.waiting.append(f"{pod.name} has ended in order; its coordinator is asked")
            made.hurry = True
            slots.add(slot)
    return slots


def _goes_on(observed: Observed, ended: Pod, now_s: float) -> bool:
    """Return True if a pod that exited with code 0 is not the first sign of the job's end."""
    if observed.coordinator is not None and observed.coordinator_heard_s > ended.ended_seen_s:
        return True  # a job that stops does not get here (_is_at_its_end)
    return now_s - ended.ended_seen_s >= ASK_S


def next_attempt(job: JobObject, observed: Observed, slot: int) -> int:
    """Return the next attempt for a slot, above every attempt that had a name in it (C3)."""
    known = [pod.attempt for pod in observed.pods if pod.is_worker and pod.slot == slot]
    known.append(observed.used.get(slot, 0))
    if observed.coordinator is not None:
        known.append(observed.coordinator.highest_attempts().get(slot, 0))
    highest = max(known)
    if highest == 0 and (job.start_s is not None or job.highest_attempt > 1):
        highest = job.highest_attempt
    return highest + 1


def _shrink(job: JobObject, observed: Observed, made: PodPlan, now_s: float) -> None:
    assert job.settings is not None
    surplus = len(made.living) - job.settings.replicas
    if surplus <= 0:
        return
    made.hurry = True
    since_s = observed.clocks.surplus_s if observed.clocks.surplus_s is not None else now_s
    made.keep_running(surplus_s=since_s)
    coordinator = observed.coordinator
    registered = coordinator.registered_pods() if coordinator is not None else None
    patience_s = job.settings.elasticity.drain_grace_ns / NS_PER_S + HANDSHAKE_MARGIN_S
    idle = sorted(
        (
            pod
            for pod in made.living
            if (pod.slot, pod.attempt) not in (registered or ())
            and (registered is not None or not pod.node)
        ),
        key=lambda pod: (bool(pod.node), -pod.slot),
    )
    leaving = idle[:surplus]
    if now_s - since_s >= patience_s:
        draining = (
            {r.pod for r in coordinator.ranks if r.state is RankPhase.DRAINING}
            if coordinator is not None
            else set()
        )
        rest = [pod for pod in made.living if pod not in leaving]
        rest.sort(key=lambda pod: ((pod.slot, pod.attempt) not in draining, -pod.slot))
        leaving += rest[: surplus - len(leaving)]
    else:
        made.look(since_s + patience_s)
    for pod in leaving:
        why = f"{job.settings.replicas} replicas are wanted"
        made.delete.append(Delete(pod.name, pod.uid, why))
    gone = {pod.uid for pod in leaving}
    made.living = [pod for pod in made.living if pod.uid not in gone]
    made.surplus = surplus - len(leaving)


def _free(job: JobObject, workers: list[Pod], made: PodPlan, now_s: float) -> None:
    """Delete pods of which only a sidecar still runs, since they keep a GPU that nothing uses.

    A pod stays while it is the only record of a failure (C8) or of the release.
    """
    assert job.settings is not None
    newest = backoff.newest_by_slot(workers)
    taken = {new.slot for new in made.new}
    complete = len(made.living) + len(made.new) >= job.settings.replicas
    for pod in workers:
        followed = complete or pod.slot in taken or newest[pod.slot] is not pod
        if not pod.lingers or pod.deleting or pod.released or not followed:
            continue
        due_s = pod.ended_seen_s + backoff.SIDECAR_S
        if now_s >= due_s:
            made.delete.append(Delete(pod.name, pod.uid, "only a sidecar of it runs"))
        else:
            made.look(due_s)


def _tidy(workers: list[Pod], made: PodPlan) -> None:
    """Delete old ended pods; the last ones are kept for their logs."""
    taken = {pod.slot for pod in made.living} | {new.slot for new in made.new}
    newest = backoff.newest_by_slot(workers)
    old = [
        pod
        for pod in workers
        if pod.end is not None
        and not pod.deleting
        and not pod.lingers
        and (pod.slot in taken or newest[pod.slot] is not pod)
    ]
    old.sort(
        key=lambda pod: (pod.end.in_order if pod.end else True, -pod.ended_seen_s, -pod.attempt)
    )
    for pod in old[backoff.KEPT :]:
        made.delete.append(Delete(pod.name, pod.uid, "only the last ended pods are kept"))
