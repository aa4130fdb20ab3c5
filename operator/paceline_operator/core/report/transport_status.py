"""The part of a status about the carrier of the gradients (decide/transport.py).

If the carrier is unknown for a while, such as after a worker has joined, the last known one is kept
so that the status does not flicker.
"""

from __future__ import annotations

from typing import Any, Final

from paceline_api.reasons import ConditionType
from paceline_api.times import timestamp
from paceline_api.types.enums import FabricRequirement

from paceline_operator.core.decide.transport import OVER, Standing, carried, verified_at
from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Observed

MESSAGE_MAX: Final = 1000


def transport_status(job: JobObject, observed: Observed, now_s: float) -> dict[str, Any] | None:
    """Return the new status.transport; None if nothing new is known."""
    comparison = carried(job, observed)
    if comparison is None:
        return None
    since = verified_at(job)
    if since is None and comparison.standing is Standing.MET and comparison.carrier:
        since = timestamp(now_s)
    status: dict[str, Any] = {"kind": comparison.kind} | ({"verifiedAt": since} if since else {})
    if why := observed.coordinator.transport_why if observed.coordinator else "":
        status["message"] = why[:MESSAGE_MAX]
    return status


def without_carrier(status: dict[str, Any]) -> dict[str, Any]:
    """Return a status as it is compared to decide whether it is written at once.

    If a job requires no certain carrier, its carrier counts as a figure and comes with the next
    regular write.

    Args:
        status: The status; it is not modified.

    Returns:
        The status, without the carrier if the job requires none.
    """
    required = ((status.get("resolved") or {}).get("fabric") or {}).get("required")
    if required != FabricRequirement.ANY or not status.get("transport"):
        return status
    kind = str(status["transport"].get("kind", "")).partition(OVER)[0]
    wordless = [
        {**c, "message": ""} if c.get("type") == ConditionType.TRANSPORT_VERIFIED else c
        for c in status.get("conditions") or ()
    ]
    return {**status, "transport": {"kind": kind}, "conditions": wordless}
