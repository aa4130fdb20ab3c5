"""What the pods of an API server tell those that stand in for their processes."""

from __future__ import annotations

from typing import Any

from testing.cluster.fake_kubelet import EXIT_CODE


def owner_of(pod: dict[str, Any]) -> str:
    owners = pod["metadata"].get("ownerReferences") or [{}]
    return str(owners[0].get("uid", ""))


def runs(pod: dict[str, Any]) -> bool:
    running = pod["status"].get("phase") == "Running" and bool(pod["status"].get("podIP"))
    return running and "deletionTimestamp" not in pod["metadata"]


def trains(pod: dict[str, Any]) -> bool:
    """Its process lives until its kubelet has ended it, whoever has asked for that."""
    ordered = EXIT_CODE in (pod["metadata"].get("annotations") or {})
    return pod["status"].get("phase") == "Running" and not ordered
