"""Objects of the API server, reduced to the few fields that the operator keeps.

A watch of ten thousand pods brings tens of thousands of events. Typed decoding skips everything
that is not named here without building it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import msgspec
from msgspec import Struct
from paceline_api.decoding import UNDECODABLE
from paceline_api.names import LABEL_ATTEMPT, LABEL_JOB, LABEL_ROLE, LABEL_SLOT, PREFIX
from paceline_api.pods.devices import amount_of, is_device
from paceline_api.reading.load import without_nulls
from paceline_api.rules.fabric import broken_rule
from paceline_api.times import seconds_of
from paceline_api.types.fabric import FabricSpec
from paceline_api.types.template import TRAINER
from pydantic import ValidationError

from paceline_operator.core.observed import NO_SLOT, NOT_STARTED, OVER, Node, Pod, PodEnd
from paceline_operator.core.providers.kueue import MANAGED
from paceline_operator.core.runtime import SeenRuntime

UNREACHABLE: Final = "node.kubernetes.io/out-of-service"
"""Key of the taint that marks a node as out of service."""
COORDINATOR: Final = "coordinator"
"""Name of a coordinator's container, and the role of its pod."""
NOTES_MAX: Final = 16
"""Upper bound on the number of Paceline's annotations kept of a pod; its user may change them."""
NOTE_MAX: Final = 4096
"""Upper bound on the length of an annotation; Paceline writes no longer one."""
WAITS_MAX: Final = 32
"""Upper bound on the containers of a pod whose waiting is kept."""
WORDS_MAX: Final = 1000
"""Upper bound on the characters of what is said about one container."""
DIGITS_MAX: Final = 20
"""Upper bound on the digits of a number, enough for 64 bits; Python refuses to read thousands."""


class Owner(Struct, frozen=True):
    """One entry of metadata.ownerReferences."""

    uid: str = ""
    controller: bool | None = None


class Meta(Struct, frozen=True, rename="camel"):
    """Metadata of an object."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None
    creation_timestamp: str | None = None
    generation: int = 0
    owner_references: list[Owner] | None = None


class State(Struct, frozen=True, rename="camel"):
    """The state waiting or terminated of a container."""

    exit_code: int = 0
    reason: str = ""
    message: str = ""
    finished_at: str | None = None


class ContainerStates(Struct, frozen=True):
    """The states of a container, at most one of which is set."""

    waiting: State | None = None
    running: dict[str, Any] | None = None
    terminated: State | None = None


class ContainerStatus(Struct, frozen=True, rename="camel"):
    """Status of one container."""

    name: str = ""
    state: ContainerStates = ContainerStates()
    last_state: ContainerStates = ContainerStates()


class Condition(Struct, frozen=True, rename="camel"):
    """One condition of a pod or node."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class PodStatus(Struct, frozen=True, rename="camel"):
    """Status of a pod."""

    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    pod_ip: str = msgspec.field(name="podIP", default="")
    conditions: list[Condition] | None = None
    container_statuses: list[ContainerStatus] | None = None
    init_container_statuses: list[ContainerStatus] | None = None
    """Statuses of init containers, including native sidecars."""


class ObservedPodSpec(Struct, frozen=True, rename="camel"):
    """Spec of a pod."""

    node_name: str = ""


class PodObject(Struct, frozen=True):
    """A pod."""

    metadata: Meta = Meta()
    spec: ObservedPodSpec = ObservedPodSpec()
    status: PodStatus = PodStatus()


class Taint(Struct, frozen=True):
    """One taint of a node."""

    key: str = ""


class NodeSpec(Struct, frozen=True):
    """Spec of a node."""

    taints: list[Taint] | None = None
    unschedulable: bool = False


class NodeStatus(Struct, frozen=True):
    """Status of a node."""

    conditions: list[Condition] | None = None
    allocatable: dict[str, str] | None = None


class NodeObject(Struct, frozen=True):
    """A node."""

    metadata: Meta = Meta()
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


def pod_of(item: PodObject, now_s: float) -> tuple[str, str, Pod] | None:
    """Convert a pod.

    Args:
        item: The pod as the API server describes it.
        now_s: The present time, for an end that is observed now.

    Returns:
        Namespace, name of the job, and pod; None for a pod that belongs to no job.
    """
    labels = item.metadata.labels or {}
    job, role = labels.get(LABEL_JOB, ""), labels.get(LABEL_ROLE, "")
    if not job or not role:
        return None
    status = item.status
    end = _end(item)
    unschedulable, disrupted, bound_s = "", False, 0.0
    for condition in status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            unschedulable = condition.message or condition.reason
        elif condition.type == "PodScheduled":
            bound_s = seconds_of(condition.last_transition_time) or 0.0
        elif condition.type == "DisruptionTarget" and condition.status == "True":
            disrupted = True
    pod = Pod(
        name=item.metadata.name,
        uid=item.metadata.uid,
        role=role,
        slot=_number(labels.get(LABEL_SLOT), NO_SLOT),
        attempt=_number(labels.get(LABEL_ATTEMPT), 0),
        owner=next((o.uid for o in item.metadata.owner_references or () if o.controller), ""),
        created_s=seconds_of(item.metadata.creation_timestamp) or now_s,
        node=item.spec.node_name,
        phase=status.phase,
        ip=status.pod_ip,
        deleting=item.metadata.deletion_timestamp is not None,
        end=end,
        ended_seen_s=now_s if end else 0.0,
        disrupted=disrupted,
        waiting=_waiting(item),
        waits=tuple(islice(_waits(item), WAITS_MAX)) if end is None else (),
        is_creating=end is None and _is_creating(item),
        bound_s=bound_s,
        unschedulable=unschedulable,
        queued=labels.get(MANAGED) == "true",
        notes=dict(islice(_notes(item.metadata.annotations or {}), NOTES_MAX)),
        version=_number(item.metadata.resource_version, 0),
    )
    return item.metadata.namespace, job, pod


def _notes(annotations: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, text in annotations.items():
        if name.startswith(PREFIX):
            yield name, text[:NOTE_MAX]


def pod_from(body: Mapping[str, Any], now_s: float) -> tuple[str, str, Pod] | None:
    """Convert a pod from the answer to a request; see `pod_of`."""
    return pod_of(msgspec.convert(body, PodObject), now_s)


def _main(item: PodObject) -> ContainerStatus | None:
    """Return the main container's status: sidecars do not decide whether a pod is complete (C6)."""
    role = (item.metadata.labels or {}).get(LABEL_ROLE)
    wanted = COORDINATOR if role == COORDINATOR else TRAINER
    return next((c for c in item.status.container_statuses or () if c.name == wanted), None)


def _end(item: PodObject) -> PodEnd | None:
    main = _main(item)
    status = item.status
    over = status.phase in OVER
    restarts = (item.metadata.labels or {}).get(LABEL_ROLE) == COORDINATOR
    done = main.state.terminated if main is not None and (over or not restarts) else None
    if done is not None:
        finished_s = seconds_of(done.finished_at) or 0.0
        # The pod and not its container has the reason of an eviction.
        return PodEnd(done.exit_code, status.reason or done.reason, done.message, finished_s)
    if status.phase == "Failed":
        return PodEnd(NOT_STARTED, status.reason, status.message)
    return PodEnd(0, status.reason, status.message) if over else None


def _waiting(item: PodObject) -> str:
    main = _main(item)
    if main is not None and (words := _stuck(main)):
        return words
    if main is not None and main.state.waiting is None:
        return ""  # it has started, so a sidecar that restarts does not block it
    for init in item.status.init_container_statuses or ():
        if words := _stuck(init, f"init container {init.name}: "):
            return words
    return ""


def _waits(item: PodObject) -> Iterator[str]:
    """Yield why each container waits, in the order in which they start."""
    main = _main(item)
    for init in item.status.init_container_statuses or ():
        if words := _stuck(init, f"init container {init.name}: "):
            yield words
    for container in item.status.container_statuses or ():
        whose = "" if container is main else f"container {container.name}: "
        if words := _stuck(container, whose):
            yield words


def _is_creating(item: PodObject) -> bool:
    """Return True if the node of a pod has not begun with any container, and has not said why."""
    if not item.spec.node_name or item.status.phase != "Pending":
        return False
    states = [
        container.state
        for container in (
            *(item.status.init_container_statuses or ()),
            *(item.status.container_statuses or ()),
        )
    ]
    begun = any(s.terminated is not None or (s.waiting is None and s.running) for s in states)
    return not begun and not any(_waits(item))


class PodWarning(Struct, frozen=True, rename="camel"):
    """One Event about a pod."""

    reason: str = ""
    message: str = ""
    last_timestamp: str | None = None
    event_time: str | None = None
    metadata: Meta = Meta()


class Warnings(Struct, frozen=True):
    """A list of Events."""

    items: list[PodWarning] = []


_WARNINGS: Final = msgspec.json.Decoder(Warnings)


def last_warning(raw: bytes) -> str:
    """Return reason and message of the newest of some Events, but for those of the scheduler.

    Args:
        raw: The list of Events as JSON.

    Returns:
        The text; empty if there is none, or the list is malformed.
    """
    try:
        events = _WARNINGS.decode(raw).items
    except UNDECODABLE:
        return ""
    events = [each for each in events if each.reason != "FailedScheduling"]
    newest = max(events, key=_warned_s, default=None)
    return f"{newest.reason}: {newest.message}"[:WORDS_MAX] if newest is not None else ""


def _warned_s(warning: PodWarning) -> float:
    times = (warning.last_timestamp, warning.event_time, warning.metadata.creation_timestamp)
    return next((at for text in times if (at := seconds_of(text)) is not None), 0.0)


def _stuck(container: ContainerStatus, whose: str = "") -> str:
    """Return why a container does not start, with the kubelet's reason first; empty if it does."""
    waiting, last = container.state.waiting, container.last_state.terminated
    if waiting is None or waiting.reason in ("", "ContainerCreating", "PodInitializing"):
        return ""
    message = last.message or waiting.message if last is not None else waiting.message
    return f"{waiting.reason}: {whose}{message}"[:WORDS_MAX]


def node_of(item: NodeObject, before: Node | None, now_s: float) -> Node:
    """Convert a node.

    Args:
        item: The node as the API server describes it.
        before: The node as it was known; None if it is new.
        now_s: The present time, for a change of its readiness that is observed now.

    Returns:
        The node.
    """
    ready = any(c.type == "Ready" and c.status == "True" for c in item.status.conditions or ())
    since_s = 0.0 if ready else now_s
    again_s = 0.0
    if before is not None and ready:
        again_s = before.ready_again_s if before.ready else now_s
    if before is not None and not before.ready and not ready:
        since_s = before.not_ready_since_s
    return Node(
        name=item.metadata.name,
        ready=ready,
        not_ready_since_s=since_s,
        ready_again_s=again_s,
        out_of_service=any(t.key == UNREACHABLE for t in item.spec.taints or ()),
        cordoned=item.spec.unschedulable,
        labels=item.metadata.labels or {},
        offers={
            name: amount_of(amount)
            for name, amount in (item.status.allocatable or {}).items()
            if is_device(name)
        },
    )


class FabricObject(Struct, frozen=True):
    """A FabricProfile."""

    metadata: Meta = Meta()
    spec: dict[str, Any] = {}


def fabric_from(item: FabricObject) -> FabricSpec | str:
    """Return the profile, or why it is invalid: an older definition may have accepted it."""
    try:
        spec = FabricSpec.model_validate(without_nulls(item.spec), by_alias=True, by_name=False)
    except ValidationError as error:
        first = error.errors()[0]
        return f"spec.{'.'.join(map(str, first['loc']))}: {first['msg']}"
    broken = broken_rule(spec)
    return spec if broken is None else broken.message


class RuntimeObject(Struct, frozen=True):
    """A TrainingRuntime or ClusterTrainingRuntime."""

    metadata: Meta = Meta()
    spec: dict[str, Any] = {}
    status: dict[str, Any] = {}


def runtime_of(item: RuntimeObject, kind: str) -> SeenRuntime:
    """Convert a runtime of this kind."""
    metadata = item.metadata
    return SeenRuntime(
        kind=kind,
        name=metadata.name,
        namespace=metadata.namespace,
        uid=metadata.uid,
        generation=metadata.generation,
        spec=item.spec,
        status=item.status,
    )


def runtime_from(body: Mapping[str, Any], kind: str) -> SeenRuntime:
    """Convert a runtime from the answer to a request; see `runtime_of`."""
    return runtime_of(msgspec.convert(body, RuntimeObject), kind)


def kept(pod: Pod, before: Pod | None) -> Pod:
    """Return `pod` with the time at which its end was first observed."""
    if before is not None and before.uid == pod.uid and before.ended_seen_s and pod.end:
        return replace(pod, ended_seen_s=before.ended_seen_s)
    return pod


def _number(text: str | None, otherwise: int) -> int:
    is_number = text is not None and len(text) <= DIGITS_MAX and text.isdecimal()
    return int(text) if text is not None and is_number else otherwise
