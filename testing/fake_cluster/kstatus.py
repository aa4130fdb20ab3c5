"""How kstatus reads an object of a kind that it does not know: our own reading of its rules.

From the documentation of sigs.k8s.io/cli-utils, package kstatus. First come the rules for every
object: it is being deleted, its controller has not observed the present generation, or Reconciling
or Stalled holds. Then comes the condition Ready. An object without any of these is current.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class Standing(StrEnum):
    """Result of kstatus for one object."""

    TERMINATING = "Terminating"
    IN_PROGRESS = "InProgress"
    FAILED = "Failed"
    CURRENT = "Current"


def kstatus(body: Mapping[str, Any]) -> Standing:
    """Return the status that kstatus computes for an object."""
    metadata, status = body["metadata"], body.get("status") or {}
    if metadata.get("deletionTimestamp"):
        return Standing.TERMINATING
    observed = status.get("observedGeneration")
    if observed is not None and observed != metadata.get("generation"):
        return Standing.IN_PROGRESS
    conditions = {c["type"]: c["status"] for c in status.get("conditions") or ()}
    if conditions.get("Reconciling") == "True":
        return Standing.IN_PROGRESS
    if conditions.get("Stalled") == "True":
        return Standing.FAILED
    return Standing.CURRENT if conditions.get("Ready", "True") == "True" else Standing.IN_PROGRESS
