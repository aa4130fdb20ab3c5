"""What a status says of the carrier of the gradients (decide/transport.py).

A carrier that is not known for a while, as when a worker has just joined, is the last one known, so
that the status does not flicker.
"""

from __future__ import annotations

from typing import Any, Final

from paceline_api.reasons import ConditionType
from paceline_api.times import timestamp
from paceline_api.types.enums import FabricRequirement

from paceline_operator.core.decide.transport import OVER, Standing, carried, verified_at
from paceline_operator.core.job import Job
from paceline_operator.core.observed import Observed

MESSAGE_MAX: Final = 1000


def transport_status(job: Job, seen: Observed, now_s: float) -> dict[str, Any] | None:
    """status.transport; None: nothing new is known."""
    found = carried(job, seen)
    if found is None:
        return None
    since = verified_at(job)
    if since is None and found.standing is Standing.MET and found.carrier:
        since = timestamp(now_s)
    status: dict[str, Any] = {"kind": found.kind} | ({"verifiedAt": since} if since else {})
    if why := seen.coordinator.transport_why if seen.coordinator else "":
        status["message"] = why[:MESSAGE_MAX]
    return status


def without_carrier(status: dict[str, Any]) -> dict[str, Any]:
    """A status as it is compared to decide whether it is written at once. The carrier of a job that
    requires none is a figure: it comes with the next regular write."""
    required = ((status.get("resolved") or {}).get("fabric") or {}).get("required")
    if required != FabricRequirement.ANY or not status.get("transport"):
        return status
    kind = str(status["transport"].get("kind", "")).partition(OVER)[0]
    wordless = [
        {**c, "message": ""} if c.get("type") == ConditionType.TRANSPORT_VERIFIED else c
        for c in status.get("conditions") or ()
    ]
    return {**status, "transport": {"kind": kind}, "conditions": wordless}
