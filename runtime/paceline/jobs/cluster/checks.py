"""What an API server says to the pods of a job that does not exist yet, by dry runs.

The pod is that of a worker as its template has it, with the security settings of every pod of a
job. What the operator adds besides (its variables, its volumes, a fabric profile) is left out.
"""

from __future__ import annotations

import copy
from typing import Any, Final

from paceline_api.names import worker_name
from paceline_api.pods.advice import NO_DRY_RUN, NO_RIGHT, worker_field
from paceline_api.pods.hardening import harden
from paceline_api.types.job import TrainingJob

from paceline.jobs.cluster.server import ApiServer
from paceline.jobs.errors import AwayError, JobsError, NameTakenError
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


def check_pod(
    server: ApiServer,
    namespace: str,
    job: TrainingJob,
    wrong: list[ClusterFinding],
    unknown: list[ClusterFinding],
) -> None:
    """Send a worker's pod as a dry run.

    Args:
        server: The API server.
        namespace: Namespace of the job.
        job: The job, merged with its runtime.
        wrong: What is wrong is added to it.
        unknown: What could not be checked is added to it.
    """
    path = f"/api/v1/namespaces/{namespace}/pods"
    try:
        server.create(path, worker_pod(job), DRY_RUN)
    except NameTakenError:
        return
    except JobsError as error:
        field = worker_field(error.message)
        hint = f"correct {field}, or have an administrator permit it"
        if NO_RIGHT.search(error.message):
            hint = "ask for the right to create pods, or have somebody who has it check the job"
        elif NO_DRY_RUN in error.message or isinstance(error, AwayError):
            hint = "try again, or submit the job: a condition tells what the cluster says to it"
        elif all(finding.field != field for finding in wrong):
            wrong.append(ClusterFinding(field, f"a worker's pod: {error.message}", hint))
            return
        else:
            return
        unknown.append(ClusterFinding(field, f"a worker's pod: {error.message}", hint))
