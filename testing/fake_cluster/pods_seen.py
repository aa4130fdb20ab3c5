"""Pods of an API server, as read by the stubs that replace their processes."""

from __future__ import annotations

from typing import Any

from testing.cluster.fake_kubelet import EXIT_CODE


def owner_of(pod: dict[str, Any]) -> str:
    """Return the uid of a pod's first owner, or ""."""
    owners = pod["metadata"].get("ownerReferences") or [{}]
    return str(owners[0].get("uid", ""))


def runs(pod: dict[str, Any]) -> bool:
    """Return True if a pod runs, has an address and is not being deleted."""
    running = pod["status"].get("phase") == "Running" and bool(pod["status"].get("podIP"))
    return running and "deletionTimestamp" not in pod["metadata"]


def trains(pod: dict[str, Any]) -> bool:
    """Return True until the pod's kubelet has ended its process, even if it is being deleted."""
    ordered = EXIT_CODE in (pod["metadata"].get("annotations") or {})
    return pod["status"].get("phase") == "Running" and not ordered
