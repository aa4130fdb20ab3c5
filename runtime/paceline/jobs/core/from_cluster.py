"""Conversion of a TrainingJob and its pods, as the API server holds them, to a `JobStatus`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

import msgspec
from msgspec.structs import replace
from paceline_api.ids import (
    ATTEMPT_STRIDE,
    NO_GENERATION,
    GenerationId,
    MemberId,
    pod_of,
)
from paceline_api.names import (
    LABEL_ATTEMPT,
    LABEL_ROLE,
    LABEL_SLOT,
    ROLE_WORKER,
)
from paceline_api.rank_rows import read_rank_row
from paceline_api.reasons import ConditionType
from paceline_api.rounds import RoundSettings
from paceline_api.status import (
    LiveCondition,
    LogStatus,
    RankPhase,
    RankStatus,
    Status,
    StragglerStatus,
)
from paceline_api.times import US_PER_S
from paceline_api.types.enums import Network

from paceline.jobs.interface import (
    COMPLETE,
    FAILED,
    SUSPENDED,
    SUSPENDING,
    TRAINING,
    JobEvent,
    JobStatus,
)

Object = Mapping[str, Any]
Place = tuple[int, int, int]
"""Slot, number of the process in the slot, attempt of the pod."""
_ENDS: Final = (RankPhase.FINISHED, RankPhase.DEAD)

_NO_NEWS: Final = (
    ConditionType.READY,
    ConditionType.STALLED,
    ConditionType.RING_READY,
    ConditionType.SCHEDULED,
    ConditionType.TRANSPORT_VERIFIED,
    ConditionType.COMPLETE,
    ConditionType.FAILED,
)
"""Types of conditions that also hold for a healthy job, or that repeat its state or another
condition."""
_OF_ROUNDS: Final = (ConditionType.DEGRADED, ConditionType.RESIZING)
"""Types of conditions that mean something only while the job runs."""
_AT_REST: Final = (COMPLETE, FAILED, SUSPENDED)
"""States in which no process of the job runs."""


def job_status(job: Object, pods: Iterable[Object] | None, now_s: float) -> JobStatus:
    """Return the status of a job.

    Args:
        job: The TrainingJob.
        pods: The pods that the job owns; None if they were not requested, and then the status has
            no `detail`.
        now_s: Current Unix time in seconds.

    Returns:
        The status.
    """
    meta, spec, status = job["metadata"], job["spec"], job.get("status") or {}
    pods = None if pods is None else list(pods)
    word = state(job)
    if word == SUSPENDED and pods:
        word = SUSPENDING  # the operator reports Suspended before it deletes the pods
    progress = status.get("progress") or {}
    left_s, percent = progress.get("etaSeconds"), progress.get("percent")
    return JobStatus(
        name=meta["name"],
        place=meta.get("namespace", ""),
        state=word,
        message=_message(status, word),
        replicas=int(spec.get("replicas", 1)),
        ready=int(status.get("readyReplicas") or 0),
        round=int(status.get("round") or 0),
        progress=None if percent is None else percent / 100,
        rounds_per_s_now=_rounds_per_s(status, word),
        left_s=None if left_s is None else float(left_s),
        age_s=max(0.0, now_s - time_s(meta.get("creationTimestamp"))),
        told_s=_told_s(status, word, now_s),
        detail=None if pods is None else _detail(job, pods, word),
    )


def state(job: Object) -> str:
    """Return the state of a job in one word, including changes that the operator has not reported.

    A job that was just deleted, suspended or resumed is Deleting, Suspending or Starting at once.

    Args:
        job: The TrainingJob.

    Returns:
        The state, as in `JobStatus.state`.
    """
    spec, word = job["spec"], str((job.get("status") or {}).get("state") or "Starting")
    if job["metadata"].get("deletionTimestamp"):
        return "Deleting"
    if spec.get("suspend") and word not in (COMPLETE, FAILED, SUSPENDED):
        return SUSPENDING
    return "Starting" if word == SUSPENDED and not spec.get("suspend") else word


def _rounds_per_s(status: Object, state: str) -> float:
    """Return the rounds per second from the median round; 0 while nothing trains."""
    round_us = (status.get("collective") or {}).get("roundMicroseconds") or 0
    trains = state not in (COMPLETE, FAILED, SUSPENDED) and status.get("readyReplicas")
    return US_PER_S / round_us if trains and round_us else 0.0


def _told_s(status: Object, state: str, now_s: float) -> float:
    time = time_s(status.get("figuresTime"))
    return max(0.0, now_s - time) if time and state not in (COMPLETE, FAILED, SUSPENDED) else 0.0


def holding(job: Object) -> list[Object]:
    """Return the conditions of a job that are True, the latest transition first."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    held = [one for one in conditions if one.get("status") == "True"]
    return sorted(held, key=lambda one: time_s(one.get("lastTransitionTime")), reverse=True)


def time_s(text: str | None) -> float:
    """Return the Unix time in seconds of a Kubernetes timestamp; 0 if there is none."""
    return 0.0 if not text else datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def workers(pods: Iterable[Object]) -> list[Object]:
    """Return the worker pods in order of slot and attempt."""
    worker_pods = [
        p for p in pods if p["metadata"].get("labels", {}).get(LABEL_ROLE) == ROLE_WORKER
    ]
    return sorted(worker_pods, key=place)


def place(pod: Object) -> tuple[int, int]:
    """Return slot and attempt of a worker pod."""
    labels = pod["metadata"]["labels"]
    return int(labels[LABEL_SLOT]), int(labels[LABEL_ATTEMPT])


def latest(pods: Iterable[Object]) -> list[Object]:
    """Return the worker pod with the highest attempt of each slot."""
    return list({place(pod)[0]: pod for pod in workers(pods)}.values())


def job_events(events: Iterable[Object], job: Object, pods: Iterable[Object]) -> list[JobEvent]:
    """Return the events of a job and of its pods, the oldest first.

    Pods that are gone count, too. Their events are recognized by the pod's name, and by a time
    after the creation of the job.

    Args:
        events: Events of the namespace.
        job: The TrainingJob.
        pods: The existing pods of the job.

    Returns:
        The events of the job.
    """
    uids = {job["metadata"]["uid"], *(pod["metadata"]["uid"] for pod in pods)}
    born_s = time_s(job["metadata"].get("creationTimestamp"))
    own_pod = re.compile(rf"{re.escape(job['metadata']['name'])}-(coordinator|\d+)-\d+")
    shown = []
    for event in events:
        about = event["involvedObject"]
        named = about.get("kind") == "Pod" and own_pod.fullmatch(about.get("name", ""))
        parsed = _event(event, about.get("name", "") if about.get("kind") == "Pod" else "")
        if about.get("uid") in uids or (named and parsed.wall_s >= born_s):
            shown.append(parsed)
    return sorted(shown, key=lambda event: event.wall_s)


def _event(event: Object, pod: str) -> JobEvent:
    series = event.get("series") or {}
    at = (
        series.get("lastObservedTime")
        or event.get("lastTimestamp")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp")
    )
    source = event.get("reportingComponent") or (event.get("source") or {}).get("component") or ""
    return JobEvent(
        wall_s=time_s(at),
        warning=event.get("type") == "Warning",
        reason=str(event.get("reason") or ""),
        message=str(event.get("message") or ""),
        source=f"{source} on {pod}" if pod else str(source),
        count=int(series.get("count") or event.get("count") or 1),
    )


def _message(status: Object, state: str) -> str:
    for condition in status.get("conditions") or ():
        fits = state in (condition.get("type"), condition.get("reason"))
        if fits and condition.get("status") == "True" and state != TRAINING:
            return str(condition.get("message") or "")
    return ""


def _detail(job: Object, pods: list[Object], state: str) -> Status:
    spec, status = job["spec"], job.get("status") or {}
    procs = members_per_pod(spec)
    collective = status.get("collective") or {}
    settings = RoundSettings()
    if mode := collective.get("mode"):
        asked = (status.get("resolved") or {}).get("collective") or {}
        settings = RoundSettings(mode=mode, pipeline=int(asked.get("pipeline") or 0))
    progress = (status.get("progress") or {}).get("percent")
    moved = status.get("transport") or {}
    transport, _, carrier = str(moved.get("kind") or "").partition(" over ")
    rows = [read_rank_row(row) for row in status.get("ranks") or ()]
    reported = {_place(rank): rank for rank, _ in rows}
    rests = state in _AT_REST
    ranks = _ranks(pods, status, procs, reported)
    if rests:
        ranks = _ranks_at_rest(pods, (rank for rank, _ in rows), procs, state)
    return Status(
        job=job["metadata"]["name"],
        coordinator="",
        generation=_generation(str(status.get("membershipGeneration") or "")),
        replicas=int(spec.get("replicas", 1)),
        procs=procs,
        settings=msgspec.to_builtins(settings),
        ranks=tuple(ranks),
        version=int(status.get("round") or 0),
        transport=transport,
        transport_why=str(moved.get("message") or ""),
        carrier=Network(carrier),
        log=LogStatus(
            progress=None if progress is None else progress / 100,
            left_s=(status.get("progress") or {}).get("etaSeconds"),
            round_s=float(collective.get("roundMicroseconds") or 0) / US_PER_S,
            avoided_s=float(collective.get("waitAvoidedSeconds") or 0),
            shares={str(rank.member): share for rank, share in rows if share is not None},
        ),
        conditions=tuple(
            LiveCondition(
                type=one["type"],
                reason=one["reason"],
                message=one.get("message", ""),
                since_wall_s=time_s(one.get("lastTransitionTime")),
            )
            for one in holding(job)
            if one["type"] not in _NO_NEWS and not (rests and one["type"] in _OF_ROUNDS)
        ),
        stragglers=() if rests else tuple(_stragglers(status, pods, procs, reported)),
        restarts=int((status.get("restarts") or {}).get("ranks") or 0),
    )


def members_per_pod(spec: Object) -> int:
    """Return the number of members in a pod.

    A member is a rank, or with `parallelism` a group of ranks that share one model (R50).

    Args:
        spec: The spec of the TrainingJob.

    Returns:
        procsPerReplica / parallelism.model, with 1 for each that is not set.
    """
    model = (spec.get("parallelism") or {}).get("model") or 1
    return int(spec.get("procsPerReplica", 1)) // int(model)


def _generation(text: str) -> GenerationId:
    incarnation, _, counter = text.partition(".")
    if not (incarnation.isdecimal() and counter.isdecimal()):
        return NO_GENERATION
    return GenerationId(int(incarnation), "", int(counter))


def _place(rank: RankStatus) -> Place:
    return rank.member.slot, rank.member.local, rank.pod[1]


def _member(place: Place, reported: Mapping[Place, RankStatus]) -> MemberId:
    slot, local, attempt = place
    rank = reported.get(place)
    return rank.member if rank else MemberId(slot, local, attempt * ATTEMPT_STRIDE)


def _ranks(
    pods: list[Object],
    status: Object,
    procs: int,
    reported: Mapping[Place, RankStatus],
) -> Iterator[RankStatus]:
    """Yield the status of each rank of a job that runs.

    Whether a rank runs follows from its pod, and what it does from the coordinator's report. Of
    running ranks without a report it is known which of them train only if all or none of them do;
    otherwise they are shown as starting.

    Args:
        pods: Pods of the job.
        status: `status` of the TrainingJob.
        procs: Members in each pod.
        reported: Reports of the coordinator, by place.

    Yields:
        One status for each rank of the latest pod of each slot.
    """
    newest = latest(pods)
    running = [pod for pod in newest if pod_phase(pod) is RankPhase.ACTIVE]
    all_train = len(running) <= int(status.get("readyReplicas") or 0)
    version = int(status.get("round") or 0)
    for pod in newest:
        of_pod = pod_phase(pod)
        slot, attempt = place(pod)
        for local in range(procs):
            known = reported.get((slot, local, attempt))
            if known is None:
                trains = of_pod is RankPhase.ACTIVE and all_train
                phase = RankPhase.STARTING if of_pod is RankPhase.ACTIVE else of_pod
                known = RankStatus(
                    member=MemberId(slot, local, attempt * ATTEMPT_STRIDE),
                    state=RankPhase.ACTIVE if trains else phase,
                    version=version if trains else 0,
                )
            yield replace(
                known,
                state=known.state if of_pod is RankPhase.ACTIVE else of_pod,
                host=str(pod["spec"].get("nodeName") or ""),
                why=_why(pod),
            )


def _ranks_at_rest(
    pods: list[Object], reported: Iterable[RankStatus], procs: int, state: str
) -> Iterator[RankStatus]:
    """Yield how the ranks ended, for a job of which no process runs any more.

    The operator has recorded the end of the last process at each place. The ends of other ranks
    follow from their pods, as long as these exist.

    Args:
        pods: Pods of the job.
        reported: Reports of the operator about the last process of each place.
        procs: Members in each pod.
        state: State of the job: Complete, Failed or Suspended.

    Yields:
        One status for each place, in order of slot and process.
    """
    of_pods = {place(pod): pod for pod in latest(pods)}
    by_place: dict[tuple[int, int], RankStatus] = {}
    for (slot, attempt), pod in of_pods.items():
        ended = pod_phase(pod)
        if ended not in _ENDS:
            ended = RankPhase.FINISHED if state == COMPLETE else RankPhase.DEAD
        why = _why(pod) if ended is RankPhase.DEAD else ""
        for local in range(procs):
            member = MemberId(slot, local, attempt * ATTEMPT_STRIDE)
            by_place[slot, local] = RankStatus(
                member, ended, host=str(pod["spec"].get("nodeName") or ""), why=why
            )
    for rank in reported:
        member, noted = rank.member, rank.state
        of_pod = by_place.get((member.slot, member.local))
        if noted not in _ENDS and of_pod is not None:
            continue  # left by an operator of an earlier release: the last phase, not the end
        if of_pod is not None and pod_of(member) < pod_of(of_pod.member):
            continue
        if noted not in _ENDS:
            noted = RankPhase.FINISHED if state == COMPLETE else RankPhase.DEAD
        known = of_pod if of_pod is not None and pod_of(member) == pod_of(of_pod.member) else None
        by_place[member.slot, member.local] = replace(
            rank,
            state=noted,
            pid=0,
            host=known.host if known is not None else "",
            why=known.why if known is not None and noted is RankPhase.DEAD else "",
        )
    yield from (by_place[key] for key in sorted(by_place))


def pod_phase(pod: Object) -> RankPhase:
    """Return the phase of the ranks in a pod as far as the pod shows it.

    Args:
        pod: A worker pod.

    Returns:
        ACTIVE for a running pod; DRAINING for one that is being deleted, whatever it does.
    """
    if pod["metadata"].get("deletionTimestamp"):
        return RankPhase.DRAINING
    match pod["status"].get("phase"):
        case "Running":
            return RankPhase.ACTIVE
        case "Succeeded":
            return RankPhase.FINISHED
        case "Failed":
            return RankPhase.DEAD
    return RankPhase.STARTING


def _why(pod: Object) -> str:
    """Return why the container of a pod does not run, as the scheduler or kubelet reports it."""
    status = pod["status"]
    for container in status.get("containerStatuses") or ():
        state = container.get("state") or {}
        if waiting := state.get("waiting"):
            return ": ".join(filter(None, (waiting.get("reason"), waiting.get("message"))))
        if (ended := state.get("terminated")) and ended.get("exitCode"):
            return str(ended.get("message") or f"exit code {ended['exitCode']}").strip()
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason', '')}: {condition.get('message', '')}"
    return str(status.get("message") or "")


def _stragglers(
    status: Object,
    pods: list[Object],
    procs: int,
    reported: Mapping[Place, RankStatus],
) -> Iterator[StragglerStatus]:
    places = {pod["metadata"]["name"]: place(pod) for pod in workers(pods)}
    for slow in status.get("stragglers") or ():
        if (worker := places.get(slow.get("replica", ""))) is not None:
            slot, attempt = worker
            yield StragglerStatus(
                member=_member((slot, max(0, int(slow["rank"])) % procs, attempt), reported),
                percent=int(slow["slowdownPercent"]),
                since_wall_s=time_s(slow.get("since")),
                action=str(slow.get("action", "")),
            )
