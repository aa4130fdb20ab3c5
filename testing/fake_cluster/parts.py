"""Building blocks of the fake clusters: a job's manifest, and what a coordinator knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline_api.names import LABEL_ATTEMPT, LABEL_SLOT

NAMESPACE = "default"
START_S = 1_800_000_000.0
KEY = "0a0b0c0d"
"""Id of the operator's key."""


def job_body(name: str = "digits", **spec: Any) -> dict[str, Any]:
    """Return the manifest of a job with two replicas, changed by these fields of the spec."""
    trainer = {"name": "trainer", "image": "trainer:1", "command": ["python3", "train.py"]}
    return {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "replicas": 2,
            "suspend": False,
            "template": {"spec": {"containers": [trainer]}},
            **spec,
        },
    }


@dataclass
class Ranks:
    """Knowledge of one coordinator process; it is lost with its pod."""

    uid: str
    replicas: int
    revision: int = 0
    inventory: frozenset[tuple[int, int]] = frozenset()
    members: set[tuple[int, int]] = field(default_factory=set)
    formed: int = 0
    had_state: bool = False
    """True once a rank with weights has registered."""
    dead: set[tuple[int, int]] = field(default_factory=set)
    outcome: dict[str, Any] | None = None
    stopping: bool = False
    seq: int = 0
    drained: set[tuple[int, int]] = field(default_factory=set)


def place_of(body: Mapping[str, Any]) -> tuple[int, int]:
    """Return (slot, attempt) of a worker pod from its labels."""
    labels = body["metadata"]["labels"]
    return int(labels[LABEL_SLOT]), int(labels[LABEL_ATTEMPT])
