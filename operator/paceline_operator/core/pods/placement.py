"""Placement of pods: spread over nodes, together in one topology domain, away from slow nodes.

An explicit spread entry is always set. Without one the scheduler looks through all Services of the
namespace for every pod, which makes it quadratic in the number of jobs.
"""

from __future__ import annotations

from typing import Any, Final

from paceline_api import names

from paceline_operator.core.job import JobObject

HOSTNAME: Final = "kubernetes.io/hostname"
"""Label of a node with its host name."""


def spread(spec: dict[str, Any], job: JobObject, *, avoid: tuple[str, ...] = ()) -> None:
    """Add the placement of a worker's pod, in place; what the template sets stays.

    Args:
        spec: Spec of the pod.
        job: The job.
        avoid: Names of nodes on which the pod must not run.
    """
    assert job.spec is not None
    _spread(spec, job, names.ROLE_WORKER)
    scheduling = job.spec.scheduling
    if scheduling is not None and scheduling.topology_key:
        _together(spec, job, scheduling.topology_key)
    for node in avoid:
        _keep_away(spec, node)


def spread_by_name(spec: dict[str, Any], job: JobObject) -> None:
    """Add a spread entry to a coordinator's pod, to spare the scheduler a search."""
    _spread(spec, job, names.ROLE_COORDINATOR)


def _spread(spec: dict[str, Any], job: JobObject, role: str) -> None:
    if spec.get("topologySpreadConstraints"):
        return
    spec["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": HOSTNAME,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": _peers(job, role),
        }
    ]


def _together(spec: dict[str, Any], job: JobObject, key: str) -> None:
    affinity = spec.setdefault("affinity", {}).setdefault("podAffinity", {})
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", [])
    required.append({"labelSelector": _peers(job, names.ROLE_WORKER), "topologyKey": key})


def _peers(job: JobObject, role: str) -> dict[str, Any]:
    return {"matchLabels": {names.LABEL_JOB: job.name, names.LABEL_ROLE: role}}


def _keep_away(spec: dict[str, Any], node: str) -> None:
    """Exclude a node from the affinity of a pod.

    Terms are alternatives, so each of them gets the exclusion. A field takes one value only.
    """
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    selector = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = selector.setdefault("nodeSelectorTerms", [])
    if not terms:
        terms.append({})
    for term in terms:
        fields = term.setdefault("matchFields", [])
        fields.append({"key": "metadata.name", "operator": "NotIn", "values": [node]})
