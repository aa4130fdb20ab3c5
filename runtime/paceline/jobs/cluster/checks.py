"""What an API server says to the pods of a job that does not exist yet, by dry runs.

The pods are those of a worker and of the coordinator as the job has them, with the security
settings of every pod of a job. What the operator adds besides (its variables, its volumes, a fabric
profile) is left out.
"""

from __future__ import annotations

import copy
from typing import Any, Final

from paceline_api.names import coordinator_name, worker_name
from paceline_api.pods.advice import (
    NO_DRY_RUN,
    NO_RIGHT,
    QUOTA,
    refused_field,
)
from paceline_api.pods.coordinator import COORDINATOR, coordinator_spec
from paceline_api.pods.hardening import harden
from paceline_api.pods.inherited import annotations_of, labels_of
from paceline_api.pods.quota import Shortage, shortages, text_of
from paceline_api.types.job import TrainingJob

from paceline.jobs.cluster.server import ApiServer
from paceline.jobs.errors import AwayError, JobsError, NameTakenError, NotAllowedError
from paceline.jobs.interface import ClusterFinding

DRY_RUN: Final = {"fieldValidation": "Strict", "dryRun": "All"}


def worker_pod(job: TrainingJob) -> dict[str, Any]:
    """Return a worker's pod of a job, as far as its template says what it is."""
    template = copy.deepcopy(job.to_mapping()["spec"]["template"])
    spec, metadata = template["spec"], template.get("metadata") or {}
    harden(spec)
    spec["restartPolicy"] = "Never"
    for container in spec["containers"]:
        if not str(container.get("workingDir", "/")).startswith("/"):
            del container["workingDir"]  # relative to the job file, for local runs
    kept = {key: metadata[key] for key in ("labels", "annotations") if metadata.get(key)}
    name = worker_name(job.metadata.name, 0, 1)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **kept}, "spec": spec}


def coordinator_pod(job: TrainingJob) -> dict[str, Any]:
    """Return the coordinator's pod of a job, as far as the job says what it is."""
    template = job.to_mapping()["spec"]["template"]
    spec, is_root = coordinator_spec(template, job.spec.coordinator)
    harden(spec, root=[COORDINATOR] if is_root else ())
    metadata = {
        "name": coordinator_name(job.metadata.name, 1),
        "labels": labels_of(template),
        "annotations": annotations_of(template),
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def check_pods(
    server: ApiServer,
    namespace: str,
    job: TrainingJob,
    wrong: list[ClusterFinding],
    unknown: list[ClusterFinding],
) -> None:
    """Send the pod of a worker and that of the coordinator as dry runs, and add up all of them.

    What is refused for the worker is mostly refused for the coordinator as well, so it is not sent
    then. What the pods take together is compared with the quotas of the namespace, of which the API
    server itself compares one pod at a time.

    Args:
        server: The API server.
        namespace: Namespace of the job.
        job: The job, merged with its runtime.
        wrong: What is wrong is added to it.
        unknown: What could not be checked is added to it.
    """
    path = f"/api/v1/namespaces/{namespace}"
    pods = []
    for what, pod, of_worker, count in (
        ("a worker's pod", worker_pod(job), True, job.spec.replicas or 1),
        ("the coordinator's pod", coordinator_pod(job), False, 1),
    ):
        try:
            pods.append((server.create(f"{path}/pods", pod, DRY_RUN), count))
        except NameTakenError:
            return
        except JobsError as error:
            field = refused_field(error.message, of_worker=of_worker)
            finding = ClusterFinding(field, f"{what}: {error.message}", _hint(error, field))
            if _is_unknown(error):
                unknown.append(finding)
            elif all(each.field != field for each in wrong):
                wrong.append(finding)
            return
    try:
        quotas = server.get(f"{path}/resourcequotas")["items"]
    except NotAllowedError as error:
        message = f"what all pods together take of the quotas: {error.message}"
        unknown.append(ClusterFinding("", message, "have somebody with the right look"))
        return
    workers = pods[0][1]
    wrong += [_too_little(each, workers) for each in shortages(quotas, pods)]


def _is_unknown(error: JobsError) -> bool:
    """Return True if an error leaves open whether the API server would take the pod."""
    no_answer = NO_DRY_RUN in error.message or isinstance(error, AwayError)
    return no_answer or NO_RIGHT.search(error.message) is not None


def _hint(error: JobsError, field: str) -> str:
    if NO_RIGHT.search(error.message):
        return "ask for the right to create pods, or have somebody who has it check the job"
    if _is_unknown(error):
        return "try again, or submit the job: a condition tells what the cluster says to it"
    return f"correct {field}, or have an administrator permit it"


def _too_little(short: Shortage, workers: int) -> ClusterFinding:
    asked, used, hard = (
        text_of(value, short.resource) for value in (short.asked, short.used, short.hard)
    )
    several = "1 worker" if workers == 1 else f"{workers:,} workers"
    return ClusterFinding(
        refused_field(QUOTA, of_worker=True),
        f"the pods of {several} and of the coordinator together: exceeded quota: {short.quota}, "
        f"requested: {short.resource}={asked}, used: {short.resource}={used}, "
        f"limited: {short.resource}={hard}",
        "raise the quota or lower spec.replicas or the resources of spec.template",
    )
