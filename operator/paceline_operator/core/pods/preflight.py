"""What is asked of the API server before the first pod of a job's attempt is made (C22).

The coordinator's pod is made first, and shows what the cluster says to all that a worker shares
with it: image, user, account, labels. For a worker that asks for more, a dry run of one worker's
pod comes before any pod. What it names beside itself, a dry run does not look at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline_api.pods.coordinator import INHERITED
from paceline_api.pods.manifest import items_of
from paceline_api.pods.needed import CLAIM, SECRET, Needed, needed
from paceline_api.types.fabric import PLAIN

from paceline_operator.core.job import JobObject
from paceline_operator.core.pods.fabric import ChosenFabric

OF_POD: Final = (*INHERITED, "containers", "restartPolicy")
"""Fields of a template that the coordinator's pod has as well."""
OF_TRAINER: Final = ("name", "image", "imagePullPolicy", "command", "args", "workingDir")
"""Fields of the trainer that the coordinator has as well, or that are in no pod."""
LOOKED_UP: Final = (SECRET, CLAIM)
LOOKED_UP_MAX: Final = 16
"""Upper bound on the objects of a job that are looked up."""


def needs_dry_run(job: JobObject, fabric: ChosenFabric) -> bool:
    """Return True if a worker's pod asks for more than the coordinator's pod.

    Args:
        job: A job with a valid spec.
        fabric: The fabric profile of its pods.

    Returns:
        False if the creation of the coordinator's pod shows all that a dry run would show.
    """
    spec = job.template["spec"]
    metadata = job.template.get("metadata")
    if fabric.profile != PLAIN or metadata or _says_more(spec, OF_POD):
        return True
    containers = items_of(spec, "containers")
    return len(containers) != 1 or any(
        _says_more(container, (*OF_TRAINER, "env"))
        or any("valueFrom" in variable for variable in items_of(container, "env"))
        for container in containers
    )


def _says_more(where: Mapping[str, Any], fields: tuple[str, ...]) -> bool:
    return any(value is not None for field, value in where.items() if field not in fields)


def looked_up(job: JobObject) -> tuple[Needed, ...]:
    """Return the Secrets and claims that a job names, each once, by the first field that does.

    They are what a pod waits for on its node without a word of the API server, and what the
    operator can look for with the rights that it has.

    Args:
        job: A job with a valid spec.

    Returns:
        At most LOOKED_UP_MAX objects.
    """
    assert job.spec is not None
    claim = job.spec.checkpoint.claim_name if job.spec.checkpoint else None
    spec = {"template": job.template, "checkpoint": {"claimName": claim}}
    by_name: dict[tuple[str, str], Needed] = {}
    for each in needed({"metadata": {}, "spec": spec}):
        if each.kind in LOOKED_UP:
            by_name.setdefault((each.kind, each.name), each)
    return tuple(by_name.values())[:LOOKED_UP_MAX]
