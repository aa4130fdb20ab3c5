"""Results of a decision: what the driver is to do, and why.

All of it is plain data, and carrying it out twice does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from paceline_api.pods.needed import Needed
from paceline_api.reasons import Reason

from paceline_operator.core.clocks import Clocks
from paceline_operator.core.observed import PodInventory


@dataclass(frozen=True, slots=True)
class PreflightRequest:
    """What is asked of the API server before the first pod of an attempt is made."""

    worker: bool = False
    """True: send the pod of the first worker as a dry run."""
    look_up: tuple[Needed, ...] = ()
    """Objects that the pods name."""


@dataclass(frozen=True, slots=True)
class Create:
    """A pod to create. Its name is deterministic, so a repeated creation conflicts (C3)."""

    manifest: Mapping[str, Any]
    why: str

    @property
    def name(self) -> str:
        """Name of the pod."""
        return str(self.manifest["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class SecretId:
    """What tells the Secrets of one job from each other."""

    key_id: str
    """Id of the operator's key that it is made with."""
    file: str
    """Digest of the job file in it."""


@dataclass(frozen=True, slots=True)
class ApplyObject:
    """An object beside the pods, created or changed by server-side apply."""

    kind: str
    manifest: Mapping[str, Any]
    number: int
    """The only figure of the object that may change; remembered once it is written."""


BUDGET_FIELD: Final = "disruptionBudget"
"""Field of the status that keeps minAvailable of the disruption budget."""


@dataclass(frozen=True, slots=True)
class Companions:
    """Objects of a job on which other controllers act."""

    group: ApplyObject | None = None
    """Group of the job's gang, to be written; no pod is made before it exists."""
    budget: ApplyObject | None = None
    drop_budget: bool = False
    least: int = 0
    """Field minAvailable of the budget once this is carried out; 0 if there is no budget then."""

    @property
    def writes(self) -> int:
        """Number of requests to the API server that this takes."""
        return (self.group is not None) + (self.budget is not None) + self.drop_budget

    def put_into(self, status: dict[str, Any]) -> None:
        """Record the budget in a status that is about to be written."""
        status.pop(BUDGET_FIELD, None)
        if self.least:
            status[BUDGET_FIELD] = self.least


@dataclass(frozen=True, slots=True)
class Delete:
    """A pod to delete, by uid, because another pod may have its name by then."""

    name: str
    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class KubernetesEvent:
    """A Kubernetes Event of the job. One with the same `key` is sent once in the job's life."""

    key: str
    reason: Reason
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class CoordinatorMessage:
    """Message to the coordinator; a field that is None is not sent."""

    inventory: PodInventory | None
    targets: Mapping[str, Any] | None
    stop: bool = False


@dataclass(frozen=True, slots=True)
class Changes:
    """The result of one decision: everything to write, to send and to remember."""

    needs_secret: SecretId | None = None
    """The job's Secret to make; None if it exists."""
    needs_service: bool = False
    beside: Companions = Companions()
    coordinator: Create | None = None
    workers: tuple[Create, ...] = ()
    """Worker pods, to be created in this order, few at first (C7)."""
    preflight: PreflightRequest | None = None
    """What to ask first; None if the job has pods, or none is made."""
    verify_job: bool = False
    """True: ask the API server whether the job still exists before creating anything."""
    delete: tuple[Delete, ...] = ()
    delete_job: bool = False
    status: Mapping[str, Any] | None = None
    """The whole status to write; None if nothing is to be written now."""
    events: tuple[KubernetesEvent, ...] = ()
    inventory: PodInventory | None = None
    targets: Mapping[str, Any] | None = None
    stop: bool = False
    """True if `targets` ask for a stop round."""
    clocks: Clocks = field(default_factory=Clocks)
    replaced: int = 0
    """Pods replaced so far, including those of this decision."""
    look_again_s: float | None = None
    """Time at which the decision could change although nothing else has; None if never."""
    forget_coordinator: bool = False
    """True: drop the coordinator's last status, which describes a time that is over."""
    ask_why: tuple[str, ...] = ()
    """Uids of pods whose Events are to be read, since they do not start."""
    hurry: bool = False
    """True: ask the coordinator for news at once instead of at the normal pace."""

    @property
    def writes(self) -> int:
        """Number of requests to the API server, without the job's Secret and the shared Service."""
        pods = len(self.workers) + (self.coordinator is not None) + len(self.delete)
        return (
            pods
            + self.beside.writes
            + (self.status is not None)
            + len(self.events)
            + self.delete_job
        )
