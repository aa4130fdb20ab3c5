"""What a decision asks the driver to do, and why: plain data; doing it twice does no harm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from paceline_api.reasons import Reason

from paceline_operator.core.clocks import Clocks
from paceline_operator.core.observed import Inventory


@dataclass(frozen=True, slots=True)
class Create:
    """A pod, by its deterministic name: a repeated create conflicts instead of doubling (C3)."""

    manifest: Mapping[str, Any]
    why: str

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class Apply:
    """An object beside the pods, made or changed by server-side apply."""

    kind: str
    manifest: Mapping[str, Any]
    number: int
    """The one figure of it that may change; remembered when it is written."""


BUDGET_FIELD: Final = "disruptionBudget"


@dataclass(frozen=True, slots=True)
class Companions:
    """The objects of a job that others act on."""

    group: Apply | None = None
    """Of its gang; no pod is made without it."""
    budget: Apply | None = None
    drop_budget: bool = False
    least: int = 0
    """minAvailable of the budget when this is done; 0: there is none."""

    @property
    def writes(self) -> int:
        return (self.group is not None) + (self.budget is not None) + self.drop_budget

    def put_into(self, status: dict[str, Any]) -> None:
        status.pop(BUDGET_FIELD, None)
        if self.least:
            status[BUDGET_FIELD] = self.least


@dataclass(frozen=True, slots=True)
class Delete:
    """Of the pod with this uid only: the name may belong to another one by then."""

    name: str
    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class Event:
    """For `kubectl describe`. `key` is sent once in a job's life."""

    key: str
    reason: Reason
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """What a coordinator is to be told."""

    inventory: Inventory | None
    targets: Mapping[str, Any] | None
    stop: bool = False


@dataclass(frozen=True, slots=True)
class Changes:
    needs_secret: str | None = None
    """Id of the operator's key with which it is made; None: it is there."""
    needs_service: bool = False
    beside: Companions = Companions()
    coordinator: Create | None = None
    workers: tuple[Create, ...] = ()
    """In this order, few at first (C7)."""
    verify_job: bool = False
    """Ask the API server whether the job still exists before anything is created."""
    delete: tuple[Delete, ...] = ()
    delete_job: bool = False
    status: Mapping[str, Any] | None = None
    """The whole status to be; None if there is nothing to write now."""
    events: tuple[Event, ...] = ()
    inventory: Inventory | None = None
    targets: Mapping[str, Any] | None = None
    stop: bool = False
    """`targets` ask for a stop."""
    clocks: Clocks = field(default_factory=Clocks)
    replaced: int = 0
    """Pods replaced so far, with those of this decision."""
    look_again_s: float | None = None
    """When something can follow from time alone."""
    forget_coordinator: bool = False
    """What the coordinator has said belongs to a time that is over."""
    hurry: bool = False
    """News of the coordinator are wanted at once rather than at leisure."""

    @property
    def writes(self) -> int:
        """Requests to the API server, the job's Secret and the shared Service aside."""
        pods = len(self.workers) + (self.coordinator is not None) + len(self.delete)
        return (
            pods
            + self.beside.writes
            + (self.status is not None)
            + len(self.events)
            + self.delete_job
        )
