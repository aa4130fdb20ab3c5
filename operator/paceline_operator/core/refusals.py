"""What the API server has refused, and all that follows from it: one table.

Each kind of refusal has one row: when the same is tried again, the reason under which the condition
Degraded and an Event tell of it, and their words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from paceline_api.reasons import Reason

POD_SECURITY: Final = "violates PodSecurity"
"""Words of the API server."""
FIRST_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 60.0
LONG_PAUSE_S: Final = 300.0


class RefusalKind(StrEnum):
    TEMPLATE = "template"
    """The pod itself is refused; another try would be too, until the job is changed."""
    FORBIDDEN = "forbidden"
    """Refused by something that can change by itself, such as a missing service account."""
    QUOTA = "quota"
    ENDING = "ending"
    """The namespace is being deleted."""
    TRANSIENT = "transient"
    NO_GANG_API = "no-gang-api"
    """The cluster does not know the group object of spec.scheduling.provider."""
    GANG_FORBIDDEN = "gang-forbidden"
    """The operator has no right to it."""
    GANG_REFUSED = "gang-refused"
    BUDGET = "budget"
    """The disruption budget, for whatever reason."""
    LEVEL = "level"
    """The pod is beyond the level of pod security that its namespace asks for."""
    TAKEN = "taken"
    """Somebody else's object has the name of one that the job needs."""
    TAKEN_GROUP = "taken-group"
    """The same, of its gang's group."""


OF_GANG: Final = (
    *(RefusalKind.NO_GANG_API, RefusalKind.GANG_FORBIDDEN),
    *(RefusalKind.GANG_REFUSED, RefusalKind.TAKEN_GROUP),
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The last creation that the API server refused."""

    kind: RefusalKind
    message: str
    at_s: float
    count: int = 1
    generation: int = 0
    """metadata.generation of the job that was refused."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Texts may name {message}, what the API server said, and the facts of report/refused.py."""

    pause_s: float | None = None
    """Until the next try; None: longer each time."""
    until_changed: bool = False
    """A job that was changed is tried at once."""
    reason: Reason | None = None
    """None: nobody is told, since it passes or there is nothing to be done."""
    condition: str = ""
    event: str = ""
    event_key: str = ""


_POD: Final = "the API server refuses the pod: {message}"
_BUDGET: Final = "the API server refuses the PodDisruptionBudget: {message}"
_LEVEL: Final = (
    "{message}; correct spec.template, or spec.fabric whose profile adds to it, or have an "
    "administrator change the label pod-security.kubernetes.io/enforce of the namespace"
)
_UNTIL_THEN: Final = "; it is tried again, no pod is made before"


def _template(pause_s: float | None, *, until_changed: bool) -> Rule:
    return Rule(
        pause_s,
        until_changed,
        Reason.TEMPLATE_INVALID,
        _POD,
        _POD + "; correct spec.template",
        "template:{refused_generation}",
    )


def _gang(problem: str, hint: str) -> Rule:
    text = f"provider {{provider}}: {problem}; {hint}{_UNTIL_THEN}"
    return Rule(None, False, Reason.SCHEDULER_UNAVAILABLE, text, text, "gang:{kind}")


def _taken() -> Rule:
    text = "{message}; it is tried again"
    return Rule(None, False, Reason.NAME_TAKEN, text, text, "taken:{kind}")


RULES: Final[Mapping[RefusalKind, Rule]] = {
    # What refused it may be an admission webhook that is mended meanwhile.
    RefusalKind.TEMPLATE: _template(LONG_PAUSE_S, until_changed=True),
    RefusalKind.FORBIDDEN: _template(None, until_changed=False),
    RefusalKind.QUOTA: Rule(
        reason=Reason.QUOTA_EXCEEDED,
        condition="{message}; it is tried again",
        event="{message}; raise the quota or lower spec.replicas, it is tried again",
        event_key="quota:{generation}:{replicas}",
    ),
    RefusalKind.ENDING: Rule(LONG_PAUSE_S),
    RefusalKind.TRANSIENT: Rule(),
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
    RefusalKind.BUDGET: Rule(
        reason=Reason.BUDGET_REFUSED,
        condition=_BUDGET + "; it is tried again",
        event=_BUDGET,
        event_key="budget",
    ),
    RefusalKind.LEVEL: Rule(
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


def retry_at(refusal: Refusal | None, generation: int) -> float:
    """When what was refused is tried again. `generation`: of the job as it is now."""
    if refusal is None:
        return 0.0
    rule = RULES[refusal.kind]
    if rule.until_changed and refusal.generation != generation:
        return 0.0
    if rule.pause_s is not None:
        return refusal.at_s + rule.pause_s
    return refusal.at_s + min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(refusal.count - 1, 10))


def refused_pod(code: int, message: str, *, transient: bool) -> RefusalKind:
    """What a refused creation means for the next one."""
    if transient:
        return RefusalKind.TRANSIENT
    if code in (400, 422):
        return RefusalKind.TEMPLATE
    if code == 403 and "exceeded quota" in message:
        return RefusalKind.QUOTA
    if code == 403 and POD_SECURITY in message:
        return RefusalKind.TEMPLATE
    if code == 404 or "being terminated" in message:
        return RefusalKind.ENDING
    return RefusalKind.FORBIDDEN


def refused_group(code: int, message: str) -> RefusalKind:
    if code == 404 and "namespaces" not in message:
        return RefusalKind.NO_GANG_API
    return RefusalKind.GANG_FORBIDDEN if code == 403 else RefusalKind.GANG_REFUSED
