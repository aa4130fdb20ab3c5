"""Delivery of a function's files to the pods of a cluster, in a ConfigMap that the job owns."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from paceline_api.names import LABEL_JOB, POD_RUN_DIR
from paceline_api.types.job import API_VERSION, KIND
from paceline_api.types.template import TRAINER

from paceline.function.packed import FOLDER

VOLUME = "paceline-function"


def with_function(job: Mapping[str, Any], config_map: str) -> dict[str, Any]:
    """Return a copy of the job whose trainer mounts the ConfigMap below its run folder.

    Args:
        job: The TrainingJob, as in YAML.
        config_map: Name of the ConfigMap.

    Returns:
        A deep copy of `job` with one more volume and one more volume mount.
    """
    copied = copy.deepcopy(dict(job))
    pod = copied["spec"]["template"]["spec"]
    volume = {"name": VOLUME, "configMap": {"name": config_map}}
    pod["volumes"] = [*pod.get("volumes", ()), volume]
    for container in pod["containers"]:
        if container["name"] == TRAINER:
            mount = {"name": VOLUME, "mountPath": f"{POD_RUN_DIR}/{FOLDER}", "readOnly": True}
            container["volumeMounts"] = [*container.get("volumeMounts", ()), mount]
    return copied


def config_map(name: str, job: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    """Return the manifest of a ConfigMap that holds the files of a function.

    The job owns it, so it is deleted with the job. It is immutable, so no kubelet watches it.

    Args:
        name: Name of the ConfigMap.
        job: The TrainingJob, as the API server holds it, with its uid.
        files: Content of the files, by file name.

    Returns:
        The ConfigMap, as in YAML.
    """
    meta = job["metadata"]
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": meta["name"], "uid": meta["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name,
            "labels": {LABEL_JOB: meta["name"]},
            "ownerReferences": [owner],
        },
        "immutable": True,
        "data": dict(files),
    }
