"""Refusals of the API server, and what follows from each kind: one table.

Each kind of refusal has one row. It holds when the request is retried, which reason the condition
Degraded and the Event get, and their texts. What was refused decides which remedy they name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from paceline_api.names import COORDINATOR_SERVICE
from paceline_api.pods.advice import (
    NO_RIGHT,
    POD_SECURITY,
    QUOTA,
    refused_field,
)
from paceline_api.reasons import Reason

FIRST_PAUSE_S: Final = 1.0
"""Delay before the first retry, in seconds; it doubles with each refusal of the same kind."""
MAX_PAUSE_S: Final = 60.0
"""Upper bound on the growing delay between retries, in seconds."""
TOLD_COUNT: Final = 3
"""Number of failures in a row from which one is reported that may pass without a change."""
LONG_PAUSE_S: Final = 300.0
"""Delay between retries, in seconds, of what a user or administrator has to correct."""


class Subject(StrEnum):
    """What the operator was about to make, or to read before it makes a pod."""

    WORKER = "worker"
    COORDINATOR = "coordinator"
    SECRET = "secret"
    SERVICE = "service"
    NAMESPACE = "namespace"
    GROUP = "group"
    BUDGET = "budget"


class RefusalKind(StrEnum):
    """Kinds of refusals that the operator treats differently."""

    TEMPLATE = "template"
    """The pod itself is invalid; another try fails as well until the job is changed."""
    FORBIDDEN = "forbidden"
    """The cause can disappear without a change of the job, such as a missing service account."""
    NO_RIGHT = "no-right"
    """The operator's roles lack the right."""
    QUOTA = "quota"
    ENDING = "ending"
    """The namespace is being deleted."""
    TRANSIENT = "transient"
    NO_GANG_API = "no-gang-api"
    """The cluster does not serve the group object of spec.scheduling.provider."""
    GANG_FORBIDDEN = "gang-forbidden"
    """The operator has no right to write the group object."""
    GANG_REFUSED = "gang-refused"
    BUDGET = "budget"
    """The disruption budget was refused, for any reason."""
    LEVEL = "level"
    """The pod violates the level of pod security that its namespace enforces."""
    TAKEN = "taken"
    """An object of another owner has the name of one that the job needs."""
    TAKEN_GROUP = "taken-group"
    """An object of another owner has the name of the gang's group."""


OF_GANG: Final = (
    *(RefusalKind.NO_GANG_API, RefusalKind.GANG_FORBIDDEN),
    *(RefusalKind.GANG_REFUSED, RefusalKind.TAKEN_GROUP),
)
"""Kinds of refusals that concern the group of a gang."""


@dataclass(frozen=True, slots=True)
class CreationRefusal:
    """The last creation that the API server refused."""

    kind: RefusalKind
    message: str
    at_s: float
    count: int = 1
    generation: int = 0
    """Generation (metadata.generation) of the job whose creation was refused."""
    subject: Subject = Subject.WORKER
    also: tuple[CreationRefusal, ...] = ()
    """What the API server says to the other objects of the attempt, by dry runs."""


@dataclass(frozen=True, slots=True)
class RefusalRule:
    """One row of the table. Its texts may use {message} and the facts of report/refused.py."""

    pause_s: float | None = None
    """Seconds until the next try; None: they grow with each refusal."""
    until_changed: bool = False
    """True: retry at once when the job has been changed."""
    reason: Reason | None = None
    """Reason to report; None: not reported, since it passes or nothing can be done."""
    condition: str = ""
    event: str = ""
    event_key: str = ""
    told_from: int = 1
    """Number of refusals in a row from which it is reported."""


_REFUSED: Final = "the API server refuses {object}: {message}; {remedy}; it is tried again"
_BUDGET: Final = "the API server refuses the PodDisruptionBudget: {message}"
_LEVEL: Final = (
    "{message}; correct spec.template, or spec.fabric whose profile adds to it, or have an "
    "administrator change the label pod-security.kubernetes.io/enforce of the namespace"
)
_UNTIL_THEN: Final = "; it is tried again, no pod is made before"


def _template(pause_s: float | None, *, until_changed: bool) -> RefusalRule:
    return RefusalRule(
        pause_s,
        until_changed,
        Reason.TEMPLATE_INVALID,
        _REFUSED,
        _REFUSED,
        "template:{subject}:{refused_generation}",
    )


def _gang(problem: str, hint: str) -> RefusalRule:
    text = f"provider {{provider}}: {problem}; {hint}{_UNTIL_THEN}"
    return RefusalRule(None, False, Reason.SCHEDULER_UNAVAILABLE, text, text, "gang:{kind}")


def _taken() -> RefusalRule:
    text = "{message}; it is tried again"
    return RefusalRule(None, False, Reason.NAME_TAKEN, text, text, "taken:{kind}")


RULES: Final[Mapping[RefusalKind, RefusalRule]] = {
    # An admission webhook may have refused the pod, and may be repaired meanwhile.
    RefusalKind.TEMPLATE: _template(LONG_PAUSE_S, until_changed=True),
    RefusalKind.FORBIDDEN: _template(None, until_changed=False),
    RefusalKind.QUOTA: RefusalRule(
        reason=Reason.QUOTA_EXCEEDED,
        condition=_REFUSED,
        event=_REFUSED,
        event_key="quota:{subject}:{generation}:{replicas}",
    ),
    RefusalKind.NO_RIGHT: RefusalRule(
        reason=Reason.CREATION_REFUSED,
        condition=_REFUSED,
        event=_REFUSED,
        event_key="no-right:{subject}",
    ),
    RefusalKind.ENDING: RefusalRule(LONG_PAUSE_S),
    RefusalKind.TRANSIENT: RefusalRule(
        reason=Reason.CREATION_REFUSED,
        condition="the API server has not made {object}: {message}; it is tried again",
        event="the API server has not made {object}: {message}; it is tried again",
        event_key="transient:{subject}:{generation}",
        told_from=TOLD_COUNT,
    ),
    RefusalKind.NO_GANG_API: _gang(
        "the cluster does not serve {group}",
        "{install}, or make the job anew with spec.scheduling.provider: None",
    ),
    RefusalKind.GANG_FORBIDDEN: _gang(
        "the operator has no right to {group}: {message}",
        "set rbac.gangs: true in the values of its chart",
    ),
    RefusalKind.GANG_REFUSED: _gang(
        "the API server refuses {group}: {message}", "correct what it names"
    ),
    RefusalKind.BUDGET: RefusalRule(
        reason=Reason.BUDGET_REFUSED,
        condition=_BUDGET + "; it is tried again",
        event=_BUDGET,
        event_key="budget",
    ),
    RefusalKind.LEVEL: RefusalRule(
        LONG_PAUSE_S,
        True,
        Reason.POD_SECURITY,
        _LEVEL,
        _LEVEL,
        "level:{refused_generation}",
    ),
    RefusalKind.TAKEN: _taken(),
    RefusalKind.TAKEN_GROUP: _taken(),
}
"""The table: what to do and to report for each kind of refusal."""


OBJECTS: Final[Mapping[Subject, str]] = {
    Subject.WORKER: "the pod",
    Subject.COORDINATOR: "the coordinator's pod",
    Subject.SECRET: "the job's Secret",
    Subject.SERVICE: f"the Service {COORDINATOR_SERVICE} of the job's coordinators",
    Subject.NAMESPACE: "to show the namespace's level of pod security",
    Subject.GROUP: "the gang's group",
    Subject.BUDGET: "the PodDisruptionBudget",
}
"""Names of what was refused, for people."""
_CHART: Final = (
    "upgrade the chart paceline, whose roles hold this right, or give it to the operator's service "
    "account"
)
_ALLOWED: Final = "have an administrator permit it, since every job needs it"


def reported(refusal: CreationRefusal | None) -> Reason | None:
    """Return the reason with which a refusal is reported; None if users need not know of it."""
    rule = RULES[refusal.kind] if refusal is not None else None
    if refusal is None or rule is None or refusal.count < rule.told_from:
        return None
    of_pod = refusal.subject in (Subject.WORKER, Subject.COORDINATOR)
    if rule.reason is Reason.TEMPLATE_INVALID and not of_pod:
        return Reason.CREATION_REFUSED
    return rule.reason


def essence(refusal: CreationRefusal) -> str:
    """Return the message of a refusal without the name of the object that was refused."""
    return refusal.message.partition(" is forbidden: ")[2] or refusal.message


def remedy(refusal: CreationRefusal) -> str:
    """Return what to do about a refusal, with the field of the job that it is about."""
    of_worker, subject = refusal.subject is Subject.WORKER, refusal.subject
    if refusal.kind is RefusalKind.NO_RIGHT:
        return _CHART
    if refusal.kind is RefusalKind.QUOTA:
        less = {
            Subject.WORKER: "lower spec.replicas or the resources of spec.template",
            Subject.COORDINATOR: "lower spec.coordinator.resources, or spec.replicas of other jobs",
            Subject.SECRET: "delete a Secret that nothing uses",
            Subject.SERVICE: "delete a Service that nothing uses",
        }
        return f"raise the quota or {less.get(subject, 'delete what nothing uses')}"
    if subject not in (Subject.WORKER, Subject.COORDINATOR):
        return _ALLOWED
    return f"correct {refused_field(refusal.message, of_worker=of_worker)}"


def retry_at(refusal: CreationRefusal | None, generation: int) -> float:
    """Return the time from which a refused creation is tried again.

    Args:
        refusal: The last refusal; None if there was none.
        generation: metadata.generation of the job as it is now.

    Returns:
        Seconds of the operator's wall clock; 0.0 if nothing has to wait.
    """
    if refusal is None:
        return 0.0
    rule = RULES[refusal.kind]
    if rule.until_changed and refusal.generation != generation:
        return 0.0
    if rule.pause_s is not None:
        return refusal.at_s + rule.pause_s
    return refusal.at_s + min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(refusal.count - 1, 10))


def refused_creation(code: int, message: str, *, transient: bool) -> RefusalKind:
    """Classify the refusal of an object by what it implies for the next creation.

    Args:
        code: HTTP status.
        message: Message of the API server.
        transient: True if a retry may succeed without a change.

    Returns:
        The kind of refusal.
    """
    if transient:
        return RefusalKind.TRANSIENT
    if code in (400, 422):
        return RefusalKind.TEMPLATE
    if code == 403 and NO_RIGHT.search(message):
        return RefusalKind.NO_RIGHT
    if code == 403 and QUOTA in message:
        return RefusalKind.QUOTA
    if code == 403 and POD_SECURITY in message:
        return RefusalKind.TEMPLATE
    if code == 404 or "being terminated" in message:
        return RefusalKind.ENDING
    return RefusalKind.FORBIDDEN


def refused_group(code: int, message: str) -> RefusalKind:
    """Classify the refusal of a gang's group by HTTP status and message."""
    if code == 404 and "namespaces" not in message:
        return RefusalKind.NO_GANG_API
    no_right = code == 403 and NO_RIGHT.search(message)
    return RefusalKind.GANG_FORBIDDEN if no_right else RefusalKind.GANG_REFUSED
