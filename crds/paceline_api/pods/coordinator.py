"""The coordinator's pod, as far as the job says what it is; the operator adds its own part."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

from paceline_api.pods.hardening import user_of
from paceline_api.pods.inherited import tolerations_of
from paceline_api.types.policies import CoordinatorPod
from paceline_api.types.template import TRAINER

COORDINATOR: Final = "coordinator"
INHERITED: Final = (
    *("imagePullSecrets", "schedulerName", "priorityClassName", "runtimeClassName"),
    *("nodeSelector", "securityContext"),
    "serviceAccountName",  # for its image pull secrets; its token is not mounted
)
"""Fields of the template that the coordinator's pod shares, since it runs the workers' image."""
RESOURCES: Final = {
    "requests": {"cpu": "100m", "memory": "128Mi"},
    "limits": {"cpu": "1", "memory": "1Gi"},
}
"""Resources of the coordinator's container unless the spec sets them. A quota on limits demands
both; one thread does almost all of its work."""
STORAGE: Final = "ephemeral-storage"
OWN_STORAGE: Final = {"requests": "64Mi", "limits": "1Gi"}
"""Local storage of the coordinator if the trainer names its own, as a quota on it demands."""


def coordinator_spec(
    template: Mapping[str, Any],
    wanted: CoordinatorPod | None,
    *,
    equipped: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], bool]:
    """Return the spec of the coordinator's pod before the operator's variables and volumes.

    Args:
        template: Pod template of the workers.
        wanted: `spec.coordinator`.
        equipped: The template with what its fabric profile adds; None if there is no profile.

    Returns:
        The spec with one container, and whether the container runs as root.
    """
    equipped = equipped or template
    below = template["spec"]
    trainer = next(c for c in equipped["spec"]["containers"] if c["name"] == TRAINER)
    # The same image runs as the same user.
    user, is_root = user_of(equipped, trainer)
    container: dict[str, Any] = {
        "name": COORDINATOR,
        "image": trainer.get("image", ""),
        "resources": (wanted.resources if wanted else None) or _resources(trainer),
        "securityContext": {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            **user,
        },
    }
    if "imagePullPolicy" in trainer:
        container["imagePullPolicy"] = trainer["imagePullPolicy"]
    spec: dict[str, Any] = {"containers": [container], "restartPolicy": "Always"}
    spec |= {key: copy.deepcopy(below[key]) for key in INHERITED if key in below}
    if isinstance(spec.get("securityContext"), dict):
        spec["securityContext"].pop("sysctls", None)  # they are for the node of a worker
    if tolerations := tolerations_of(equipped, trainer):
        spec["tolerations"] = tolerations
    placed = wanted.model_dump(mode="json", by_alias=True, exclude_none=True) if wanted else {}
    placed.pop("resources", None)
    # Pod affinity of the workers does not apply to the coordinator; node affinity does.
    nodes = (below.get("affinity") or {}).get("nodeAffinity")
    if nodes and "nodeSelector" not in placed:
        spec["affinity"] = {"nodeAffinity": copy.deepcopy(nodes)}
    return spec | placed, is_root


def _resources(trainer: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    made: dict[str, dict[str, str]] = copy.deepcopy(RESOURCES)
    resources = trainer.get("resources")
    for part, amount in OWN_STORAGE.items():
        of_trainer = resources.get(part) if isinstance(resources, Mapping) else None
        if isinstance(of_trainer, Mapping) and STORAGE in of_trainer:
            made[part][STORAGE] = amount
    return made
