"""What the pods of an API server tell those that stand in for their processes."""

from __future__ import annotations

from typing import Any

from cluster.fake_kubelet import EXIT_CODE
from fake_cluster.ring import Place
from paceline_api.names import LABEL_ATTEMPT, LABEL_SLOT


def owner_of(pod: dict[str, Any]) -> str:
    owners = pod["metadata"].get("ownerReferences") or [{}]
    return str(owners[0].get("uid", ""))


def place_of(pod: dict[str, Any]) -> Place:
    labels = pod["metadata"]["labels"]
    return int(labels[LABEL_SLOT]), int(labels[LABEL_ATTEMPT])


def runs(pod: dict[str, Any]) -> bool:
    running = pod["status"].get("phase") == "Running" and bool(pod["status"].get("podIP"))
    return running and "deletionTimestamp" not in pod["metadata"]


def trains(pod: dict[str, Any]) -> bool:
    """Its process lives until its kubelet has ended it, whoever has asked for that."""
    ordered = EXIT_CODE in (pod["metadata"].get("annotations") or {})
    return pod["status"].get("phase") == "Running" and not ordered
