"""What the operator knows at the moment of a decision: pods, nodes, refusals, what it has sent.

Only the handful of fields that a decision reads, so that ten thousand pods fit into memory and a
test can write them down. Times are seconds of the operator's own wall clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline_api.names import NOTE_KEY, ROLE_COORDINATOR, ROLE_WORKER
from paceline_api.types.fabric import PLAIN, PLAIN_SPEC, FabricSpec

from paceline_operator.core.clocks import Clocks
from paceline_operator.core.coordinator_status import CoordinatorStatus
from paceline_operator.core.refusals import OF_GANG, Refusal
from paceline_operator.core.unheard import Unheard

NO_SLOT = -1
"""Of a coordinator's pod."""


@dataclass(frozen=True, slots=True)
class End:
    """How a pod's main container ended, or why the pod failed before it had one."""

    exit_code: int
    reason: str = ""
    message: str = ""
    finished_s: float = 0.0

    @property
    def in_order(self) -> bool:
        return self.exit_code == 0


OVER = ("Succeeded", "Failed")
"""Phases of a pod without a container that runs."""
FINISHED_WORD = "finished"
"""First word of the termination message of a pod whose ranks were released (R17)."""
NOT_STARTED = -1
"""Exit code of a pod that failed before its container ran: refused by the kubelet, evicted."""


@dataclass(frozen=True, slots=True)
class Pod:
    name: str
    uid: str
    role: str
    slot: int
    attempt: int
    owner: str
    """Uid of the controlling job."""
    created_s: float = 0.0
    node: str = ""
    phase: str = "Pending"
    ip: str = ""
    deleting: bool = False
    end: End | None = None
    ended_seen_s: float = 0.0
    """When this operator first saw the end."""
    disrupted: bool = False
    """The cluster ended it (eviction, preemption, node): condition DisruptionTarget."""
    waiting: str = ""
    """Why its container does not start, such as `ErrImagePull: ...`."""
    unschedulable: str = ""
    """The scheduler's words."""
    queued: bool = False
    """Kueue looks after it."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Its annotations of Paceline."""
    version: int = 0
    """resourceVersion, by which a late event is told from a new one."""

    @property
    def ended(self) -> bool:
        return self.end is not None

    @property
    def active(self) -> bool:
        return not self.deleting and self.end is None

    @property
    def lingers(self) -> bool:
        """Its ranks are dead; a sidecar of it runs on and keeps all that the pod has asked for."""
        return self.ended and self.phase not in OVER

    @property
    def released(self) -> bool:
        """By its own word: the job is complete, whoever else knows of it (R17)."""
        end = self.end
        return end is not None and end.in_order and end.message.startswith(FINISHED_WORD)

    @property
    def is_worker(self) -> bool:
        return self.role == ROLE_WORKER

    @property
    def is_coordinator(self) -> bool:
        return self.role == ROLE_COORDINATOR


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    ready: bool = True
    not_ready_since_s: float = 0.0
    """On the operator's clock: that of the node may be wrong (C4)."""
    ready_again_s: float = 0.0
    """When its kubelet came back; 0: it was not away while this operator watched."""
    out_of_service: bool = False
    cordoned: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    offers: Mapping[str, int] = field(default_factory=dict)
    """Allocatable resources of device plugins."""

    @property
    def troubled(self) -> bool:
        return self.out_of_service or not self.ready


@dataclass(frozen=True, slots=True)
class Sent:
    """What this operator has told the present coordinator and written to the API server."""

    revision: int = 0
    inventory: frozenset[tuple[int, int]] = frozenset()
    inventory_s: float = 0.0
    """When `inventory` was received by the coordinator."""
    stop_s: float = 0.0
    """When it was last asked for a stop."""
    status_s: float = 0.0
    """Last write of the status."""
    figures_s: float = 0.0
    """Last write of round and progress (C12)."""
    secret: bool = False
    events: frozenset[str] = frozenset()
    """Keys of Events sent, so that each is sent once."""
    group: int = 0
    """Fewest members of the gang's group as written last; 0: not by this operator."""
    budget: int | None = None
    """minAvailable of the disruption budget, 0 without one; None: what the status says."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything beside the job itself."""

    pods: tuple[Pod, ...] = ()
    """Those with the job's name on their label, whoever owns them."""
    coordinator: CoordinatorStatus | None = None
    """The coordinator's last status; None while nothing was heard of the present one."""
    coordinator_heard_s: float = 0.0
    """When it was received."""
    unheard: Unheard | None = None
    """Why nothing is heard of it; None: it answers, or was not asked yet."""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    fabrics: Mapping[str, FabricSpec] = field(default_factory=lambda: {PLAIN: PLAIN_SPEC})
    """Profiles by name: the built-in ones, and those of the cluster in their place."""
    nodes_fresh: bool = True
    """The watch of nodes is alive; without it nothing is concluded from nodes (C4)."""
    pods_live_s: float | None = 0.0
    """Since when the watch of pods has shown how they are, without an outage; None: it does not."""
    refusal: Refusal | None = None
    budget_refusal: Refusal | None = None
    """Of the disruption budget, which holds up nothing else."""
    sent: Sent = Sent()
    clocks: Clocks = field(default_factory=Clocks)
    """As the last decision left them."""
    used: Mapping[int, int] = field(default_factory=dict)
    """Highest attempt of each slot that this operator has seen or made; NO_SLOT: coordinators."""
    replaced: int = 0
    """Pods replaced so far, as this operator remembers."""
    key_id: str = ""
    """Of the operator's newest key."""
    epoch: int = 0
    """Number of the present leadership, above all earlier ones; orders inventories."""

    @property
    def refused_gang(self) -> Refusal | None:
        return self.refusal if self.refusal and self.refusal.kind in OF_GANG else None

    @property
    def version(self) -> int:
        """Rounds that the coordinator knows to be committed; 0 while nothing was heard of it."""
        return self.coordinator.version if self.coordinator is not None else 0

    def key_in_use(self, uid: str) -> str:
        """Id of the operator's key for further pods of a job: that of the pods that it has, since
        all of them have to trust each other."""
        living = [pod for pod in self.own(uid) if pod.active and NOTE_KEY in pod.notes]
        living.sort(key=lambda pod: not pod.is_coordinator)
        return living[0].notes[NOTE_KEY] if living else self.key_id

    def own(self, uid: str) -> tuple[Pod, ...]:
        return tuple(pod for pod in self.pods if pod.owner == uid)


@dataclass(frozen=True, slots=True)
class Inventory:
    """Body of /v1/inventory (R25)."""

    revision: int
    pods: tuple[tuple[int, int], ...]

    def body(self) -> dict[str, Any]:
        return {"revision": self.revision, "pods": [list(pod) for pod in self.pods]}
