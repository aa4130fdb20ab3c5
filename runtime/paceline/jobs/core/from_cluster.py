"""A job's status from its TrainingJob and its pods, as the API server holds them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from paceline_api.names import (
    LABEL_ATTEMPT,
    LABEL_ROLE,
    LABEL_SLOT,
    ROLE_WORKER,
)
from paceline_api.reasons import ConditionType
from paceline_api.rounds import RoundSettings

from paceline.core.protocol.ids import NO_GENERATION, GenerationId, MemberId
from paceline.core.status import (
    Condition,
    LogStatus,
    RankPhase,
    RankStatus,
    Status,
    StragglerStatus,
)
from paceline.jobs.interface import COMPLETE, FAILED, SUSPENDED, TRAINING, JobEvent, JobStatus

Object = Mapping[str, Any]

_NO_NEWS: Final = (
    ConditionType.READY,
    ConditionType.STALLED,
    ConditionType.RING_READY,
    ConditionType.SCHEDULED,
    ConditionType.TRANSPORT_VERIFIED,
    ConditionType.COMPLETE,
    ConditionType.FAILED,
)
"""Conditions that hold of a job with which all is well, or that its state or another one tells."""


def job_status(job: Object, pods: Iterable[Object] | None, now_s: float) -> JobStatus:
    """`pods`: the job's own, None if nobody has asked for them; then there is no `detail`."""
    meta, spec, status = job["metadata"], job["spec"], job.get("status") or {}
    state = str(status.get("state") or "Starting")
    if meta.get("deletionTimestamp"):
        state = "Deleting"
    elif spec.get("suspend") and state not in (COMPLETE, FAILED, SUSPENDED):
        state = "Suspending"
    elif state == SUSPENDED and not spec.get("suspend"):
        state = "Starting"  # it was resumed just now, and the operator has not said so yet
    progress = status.get("progress") or {}
    left_s, percent = progress.get("etaSeconds"), progress.get("percent")
    return JobStatus(
        name=meta["name"],
        place=meta.get("namespace", ""),
        state=state,
        message=_message(status, state),
        replicas=int(spec.get("replicas", 1)),
        ready=int(status.get("readyReplicas") or 0),
        round=int(status.get("round") or 0),
        progress=None if percent is None else percent / 100,
        left_s=None if left_s is None else float(left_s),
        age_s=max(0.0, now_s - time_s(meta.get("creationTimestamp"))),
        detail=None if pods is None else _detail(job, list(pods)),
    )


def holding(job: Object) -> list[Object]:
    """Its conditions that are True, those that changed last coming first."""
    found = (job.get("status") or {}).get("conditions") or ()
    held = [one for one in found if one.get("status") == "True"]
    return sorted(held, key=lambda one: time_s(one.get("lastTransitionTime")), reverse=True)


def time_s(text: str | None) -> float:
    """Unix time of a Kubernetes time stamp; 0 without one."""
    return 0.0 if not text else datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def workers(pods: Iterable[Object]) -> list[Object]:
    """The worker pods, by slot and attempt."""
    found = [p for p in pods if p["metadata"].get("labels", {}).get(LABEL_ROLE) == ROLE_WORKER]
    return sorted(found, key=place)


def place(pod: Object) -> tuple[int, int]:
    """Slot and attempt of a worker's pod."""
    labels = pod["metadata"]["labels"]
    return int(labels[LABEL_SLOT]), int(labels[LABEL_ATTEMPT])


def latest(pods: Iterable[Object]) -> list[Object]:
    """Of each slot the worker pod of the highest attempt."""
    return list({place(pod)[0]: pod for pod in workers(pods)}.values())


def job_events(events: Iterable[Object], job: Object, pods: Iterable[Object]) -> list[JobEvent]:
    """Those of the job and of its pods, also of pods that are gone, the oldest first."""
    uids = {job["metadata"]["uid"], *(pod["metadata"]["uid"] for pod in pods)}
    born_s = time_s(job["metadata"].get("creationTimestamp"))
    own_pod = re.compile(rf"{re.escape(job['metadata']['name'])}-(coordinator|\d+)-\d+")
    found = []
    for event in events:
        about = event["involvedObject"]
        named = about.get("kind") == "Pod" and own_pod.fullmatch(about.get("name", ""))
        told = _event(event, about.get("name", "") if about.get("kind") == "Pod" else "")
        if about.get("uid") in uids or (named and told.wall_s >= born_s):
            found.append(told)
    return sorted(found, key=lambda event: event.wall_s)


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
        told = state in (condition.get("type"), condition.get("reason"))
        if told and condition.get("status") == "True" and state != TRAINING:
            return str(condition.get("message") or "")
    return ""


def _detail(job: Object, pods: list[Object]) -> Status:
    spec, status = job["spec"], job.get("status") or {}
    procs = int(spec.get("procsPerReplica", 1))
    collective = status.get("collective") or {}
    settings = RoundSettings()
    if mode := collective.get("mode"):
        settings = RoundSettings(mode=mode)
    progress = (status.get("progress") or {}).get("percent")
    transport = status.get("transport") or {}
    return Status(
        job=job["metadata"]["name"],
        coordinator="",
        generation=_generation(str(status.get("membershipGeneration") or "")),
        replicas=int(spec.get("replicas", 1)),
        procs=procs,
        settings=settings,
        ranks=tuple(_ranks(pods, status, procs)),
        version=int(status.get("round") or 0),
        transport=str(transport.get("kind") or ""),
        transport_why=str(transport.get("message") or ""),
        log=LogStatus(
            progress=None if progress is None else progress / 100,
            left_s=(status.get("progress") or {}).get("etaSeconds"),
            avoided_s=float(collective.get("waitAvoidedSeconds") or 0),
        ),
        conditions=tuple(
            Condition(
                type=one["type"],
                reason=one["reason"],
                message=one.get("message", ""),
                since_wall_s=time_s(one.get("lastTransitionTime")),
            )
            for one in holding(job)
            if one["type"] not in _NO_NEWS
        ),
        stragglers=tuple(_stragglers(status, pods, procs)),
        restarts=int((status.get("restarts") or {}).get("ranks") or 0),
    )


def _generation(text: str) -> GenerationId:
    incarnation, _, counter = text.partition(".")
    if not (incarnation.isdecimal() and counter.isdecimal()):
        return NO_GENERATION
    return GenerationId(int(incarnation), "", int(counter))


def _ranks(pods: list[Object], status: Object, procs: int) -> Iterator[RankStatus]:
    """All that Kubernetes knows of a rank is its pod. Which of several running ones trains is only
    known where it is all of them or none."""
    found = latest(pods)
    running = [pod for pod in found if pod_phase(pod) is RankPhase.ACTIVE]
    all_train = len(running) <= int(status.get("readyReplicas") or 0)
    version = int(status.get("round") or 0)
    for pod in found:
        phase = pod_phase(pod)
        if phase is RankPhase.ACTIVE and not all_train:
            phase = RankPhase.STARTING
        slot, attempt = place(pod)
        for local in range(procs):
            yield RankStatus(
                member=MemberId(slot, local, attempt),
                state=phase,
                host=str(pod["spec"].get("nodeName") or ""),
                version=version if phase is RankPhase.ACTIVE else 0,
                why=_why(pod),
            )


def pod_phase(pod: Object) -> RankPhase:
    """ACTIVE: its container runs."""
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
    """Why its container does not run, in the words of scheduler or kubelet."""
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


def _stragglers(status: Object, pods: list[Object], procs: int) -> Iterator[StragglerStatus]:
    places = {pod["metadata"]["name"]: place(pod) for pod in workers(pods)}
    for slow in status.get("stragglers") or ():
        if (found := places.get(slow.get("replica", ""))) is not None:
            slot, attempt = found
            yield StragglerStatus(
                member=MemberId(slot, max(0, int(slow["rank"])) % procs, attempt),
                percent=int(slow["slowdownPercent"]),
                since_wall_s=time_s(slow.get("since")),
                action=str(slow.get("action", "")),
            )
