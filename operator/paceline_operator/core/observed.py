"""Everything that a decision knows besides the job: pods, nodes, refusals, what was sent.

Only the few fields that a decision reads are kept, so that ten thousand pods fit into memory and a
test can write them down. Times are seconds of the operator's own wall clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline_api.names import NOTE_FILE, NOTE_KEY, ROLE_COORDINATOR, ROLE_WORKER
from paceline_api.status import Status
from paceline_api.types.fabric import PLAIN, PLAIN_SPEC, FabricSpec

from paceline_operator.core.clocks import Clocks
from paceline_operator.core.refusals import OF_GANG, CreationRefusal
from paceline_operator.core.unheard import Unheard

NO_SLOT = -1
"""Slot number of a coordinator's pod, which occupies no slot."""


@dataclass(frozen=True, slots=True)
class PodEnd:
    """End of a pod's main container, or of a pod that failed before that container ran."""

    exit_code: int
    reason: str = ""
    message: str = ""
    finished_s: float = 0.0

    @property
    def in_order(self) -> bool:
        """Return True if the exit code is 0."""
        return self.exit_code == 0


OVER = ("Succeeded", "Failed")
"""Phases of a pod none of whose containers runs."""
FINISHED_WORD = "finished"
"""Start of the termination message of a pod whose ranks were released (R17)."""
NOT_STARTED = -1
"""Exit code of a pod that failed before its container ran: refused by the kubelet, or evicted."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A worker's or a coordinator's pod, as its last event from the API server describes it."""

    name: str
    uid: str
    role: str
    slot: int
    attempt: int
    owner: str
    """Uid of the job that controls the pod."""
    created_s: float = 0.0
    node: str = ""
    phase: str = "Pending"
    ip: str = ""
    deleting: bool = False
    end: PodEnd | None = None
    ended_seen_s: float = 0.0
    """Time at which this operator first observed the end; 0 while the pod has not ended."""
    disrupted: bool = False
    """True if the cluster ended it (eviction, preemption, node): condition DisruptionTarget."""
    waiting: str = ""
    """Reason why a container does not start, such as `ErrImagePull: ...`; empty if none waits."""
    waits: tuple[str, ...] = ()
    """Reasons of all containers that wait, sidecars of a running pod included, as in `waiting`."""
    is_creating: bool = False
    """True if its node has it, no container has begun, and the kubelet has not said why."""
    bound_s: float = 0.0
    """Time at which the pod got its node; 0 if it has none."""
    unschedulable: str = ""
    """Message of the scheduler if it found no node for the pod; empty otherwise."""
    queued: bool = False
    """True if Kueue manages the pod."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """The pod's annotations whose names have Paceline's prefix."""
    version: int = 0
    """The resourceVersion, which distinguishes a late event from a new one."""

    @property
    def ended(self) -> bool:
        """Return True if the main container has ended, or the pod failed before it ran."""
        return self.end is not None

    @property
    def active(self) -> bool:
        """Return True if the pod has not ended and is not being deleted."""
        return not self.deleting and self.end is None

    @property
    def lingers(self) -> bool:
        """Return True if the ranks are dead but a sidecar still holds the pod's resources."""
        return self.ended and self.phase not in OVER

    @property
    def released(self) -> bool:
        """Return True if the termination message reports that the job is complete (R17)."""
        end = self.end
        return end is not None and end.in_order and end.message.startswith(FINISHED_WORD)

    @property
    def is_worker(self) -> bool:
        """Return True for a worker's pod."""
        return self.role == ROLE_WORKER

    @property
    def is_coordinator(self) -> bool:
        """Return True for a coordinator's pod."""
        return self.role == ROLE_COORDINATOR


@dataclass(frozen=True, slots=True)
class Warned:
    """The last warning about a pod, from the Events of its node."""

    asked_s: float
    message: str = ""
    """Reason and message, such as `FailedMount: ...`; empty if there is none."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Objects that the pods of an attempt name, and that were not there before the first pod."""

    at_s: float
    message: str


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster, as far as it matters for the loss of pods and for fabric profiles."""

    name: str
    ready: bool = True
    not_ready_since_s: float = 0.0
    """Start of NotReady, on the operator's clock, since the node's may be wrong (C4)."""
    ready_again_s: float = 0.0
    """Time at which the node became Ready again; 0 if it was never NotReady while observed."""
    out_of_service: bool = False
    cordoned: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    offers: Mapping[str, int] = field(default_factory=dict)
    """Allocatable amounts of the resources of device plugins."""

    @property
    def troubled(self) -> bool:
        """Return True if the node is NotReady or out of service."""
        return self.out_of_service or not self.ready


@dataclass(frozen=True, slots=True)
class Sent:
    """Record of what this operator has sent to the coordinator and written to the API server."""

    revision: int = 0
    inventory: frozenset[tuple[int, int]] = frozenset()
    inventory_s: float = 0.0
    """Time at which the coordinator received `inventory`."""
    stop_s: float = 0.0
    """Time of the last request for a stop round."""
    status_s: float = 0.0
    """Time of the last write of the status."""
    figures_s: float = 0.0
    """Time of the last write that changed the round in the status (C12)."""
    secret: bool = False
    """True if the Secret was created, and neither pods were made nor the spec was changed since: it
    need not be created again."""
    events: frozenset[str] = frozenset()
    """Keys of the Events that were sent, so that each is sent once."""
    group: int = 0
    """Least number of members in the gang's group as last written; 0: not written."""
    budget: int | None = None
    """Field minAvailable of the disruption budget, 0 if there is none; None: the status has the
    value."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that a decision takes into account besides the job itself."""

    pods: tuple[Pod, ...] = ()
    """All pods whose label names this job, including those that another object owns."""
    coordinator: Status | None = None
    """Last status of the coordinator; None if the present one has not reported one."""
    coordinator_heard_s: float = 0.0
    """Time at which `coordinator` was received."""
    unheard: Unheard | None = None
    """Failure of the last request to the coordinator; None if it was answered or not yet made."""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    fabrics: Mapping[str, FabricSpec] = field(default_factory=lambda: {PLAIN: PLAIN_SPEC})
    """Fabric profiles by name; one of the cluster replaces the built-in one with its name."""
    nodes_fresh: bool = True
    """True if the watch of nodes is alive. Otherwise nothing is concluded from nodes (C4)."""
    pods_live_s: float | None = 0.0
    """Time since which the watch of pods has had no outage; None while it has one."""
    refusal: CreationRefusal | None = None
    budget_refusal: CreationRefusal | None = None
    """Refusal of the disruption budget, which delays nothing else."""
    missing: Missing | None = None
    sent: Sent = Sent()
    clocks: Clocks = field(default_factory=Clocks)
    """Clocks as the last decision returned them."""
    used: Mapping[int, int] = field(default_factory=dict)
    """Highest attempt of each slot that this operator has observed or made; NO_SLOT for
    coordinators."""
    warned: Mapping[str, Warned] = field(default_factory=dict)
    """Last warnings about pods by uid, of those that were asked for."""
    replaced: int = 0
    """Number of pods replaced so far, as far as this operator remembers."""
    key_id: str = ""
    """Id of the operator's newest key."""
    epoch: int = 0
    """Number of the present leadership, higher than all earlier ones; orders inventories."""

    @property
    def refused_gang(self) -> CreationRefusal | None:
        """The last refusal if it concerned the gang's group; None otherwise."""
        return self.refusal if self.refusal and self.refusal.kind in OF_GANG else None

    @property
    def version(self) -> int:
        """Rounds that the coordinator knows to be committed; 0 while it has not reported."""
        return self.coordinator.version if self.coordinator is not None else 0

    def key_in_use(self, uid: str) -> str:
        """Return the id of the operator's key to use for further pods of a job.

        All pods of a job must trust each other, so the key of the pods that exist is used, the
        coordinator's first.

        Args:
            uid: Uid of the job.

        Returns:
            The key's id; that of the newest key if the job has no active pod.
        """
        return self._in_use(uid, NOTE_KEY) or self.key_id

    def file_in_use(self, uid: str) -> str:
        """Return the digest of the job file that a job's pods have; empty without an active pod."""
        return self._in_use(uid, NOTE_FILE)

    def _in_use(self, uid: str, note: str) -> str:
        living = [pod for pod in self.own(uid) if pod.active and note in pod.notes]
        living.sort(key=lambda pod: not pod.is_coordinator)
        return living[0].notes[note] if living else ""

    def own(self, uid: str) -> tuple[Pod, ...]:
        """Return the pods that the job with this uid controls."""
        return tuple(pod for pod in self.pods if pod.owner == uid)


@dataclass(frozen=True, slots=True)
class PodInventory:
    """Numbered list of the pods that may have processes: the body of POST /v1/inventory (R25)."""

    revision: int
    pods: tuple[tuple[int, int], ...]

    def body(self) -> dict[str, Any]:
        """Return the JSON object to post."""
        return {"revision": self.revision, "pods": [list(pod) for pod in self.pods]}
