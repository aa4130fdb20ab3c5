"""Ready and Stalled, the two conditions that generic programs read.

Both sum up the other conditions by the rules of kstatus, which Flux, kpt and Config Sync follow. A
resource is as requested (Ready), on its way there (not Ready), or stuck until a user acts
(Stalled). docs/kubernetes.md has the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline_api.reasons import ConditionType, Reason

from paceline_operator.core.report.conditions import WantedCondition

NEEDS_SOMEBODY: Final = (
    *(Reason.SPEC_INVALID, Reason.TEMPLATE_INVALID, Reason.FABRIC_UNAVAILABLE),
    *(Reason.SCHEDULER_UNAVAILABLE, Reason.POD_NOT_STARTING, Reason.NAME_TAKEN),
    *(Reason.POD_SECURITY, Reason.CREATION_REFUSED),
    *(Reason.RUNTIME_NOT_FOUND, Reason.OVERRIDE_REFUSED, Reason.OBJECT_MISSING),
)
"""Reasons of Degraded that time alone does not cure. A full quota or cluster is not one of them."""
NO_ROUNDS: Final = (Reason.WAITING_FOR_EVIDENCE, Reason.SPEC_INVALID, Reason.OVERRIDE_REFUSED)
"""Reasons of Degraded with which a job is not Ready although its membership exists."""


def standing(
    before: Mapping[ConditionType, WantedCondition], wanted: list[WantedCondition]
) -> list[WantedCondition]:
    """Return Ready and Stalled.

    Args:
        before: The stored conditions by type.
        wanted: Conditions of this decision, which replace the stored ones.

    Returns:
        The two conditions.
    """
    by_type = {**before, **{condition.type: condition for condition in wanted}}
    holding = {kind: condition for kind, condition in by_type.items() if condition.holds}
    ready = _ready(by_type, holding)
    why = _stalled(holding) if not ready.holds else None
    if why is None:
        text = "nobody has to do anything"
        return [ready, WantedCondition(ConditionType.STALLED, False, Reason.RESOLVED, text)]
    return [ready, WantedCondition(ConditionType.STALLED, True, why.reason, why.message)]


def stored(kind: ConditionType, condition: Mapping[str, Any]) -> WantedCondition:
    """Return a condition of the stored status as it was wanted then."""
    return WantedCondition(
        kind,
        condition.get("status") == "True",
        str(condition.get("reason") or ""),
        str(condition.get("message") or ""),
    )


def _ready(
    by_type: Mapping[ConditionType, WantedCondition],
    holding: Mapping[ConditionType, WantedCondition],
) -> WantedCondition:
    if done := holding.get(ConditionType.COMPLETE):
        return WantedCondition(ConditionType.READY, True, done.reason, done.message)
    if failed := holding.get(ConditionType.FAILED):
        return _not_ready(failed)
    if suspended := holding.get(ConditionType.SUSPENDED):
        if suspended.reason == Reason.SUSPENDING:
            return _not_ready(suspended)
        return WantedCondition(ConditionType.READY, True, suspended.reason, suspended.message)
    ring = by_type.get(ConditionType.RING_READY)
    degraded = holding.get(ConditionType.DEGRADED)
    if ring is not None and ring.holds and not (degraded and degraded.reason in NO_ROUNDS):
        return WantedCondition(ConditionType.READY, True, Reason.TRAINING, ring.message)
    if degraded is not None:
        return _not_ready(degraded)
    scheduled = by_type.get(ConditionType.SCHEDULED)
    if scheduled is not None and not scheduled.holds:
        return _not_ready(scheduled)
    if ring is not None and ring.reason != Reason.SUSPENDED_BY_SPEC:
        return _not_ready(ring)
    return WantedCondition(ConditionType.READY, False, Reason.STARTING, "pods are being made")


def _not_ready(why: WantedCondition) -> WantedCondition:
    return WantedCondition(ConditionType.READY, False, why.reason, why.message)


def _stalled(holding: Mapping[ConditionType, WantedCondition]) -> WantedCondition | None:
    if failed := holding.get(ConditionType.FAILED):
        return failed
    degraded = holding.get(ConditionType.DEGRADED)
    if degraded is None or degraded.reason not in NEEDS_SOMEBODY:
        return None
    # Pods that Kueue does not manage still run.
    runs = ConditionType.SCHEDULED in holding
    return None if runs and degraded.reason == Reason.SCHEDULER_UNAVAILABLE else degraded
