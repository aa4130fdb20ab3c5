"""How the files of a function come to the pods of a cluster: in a ConfigMap of the job's own."""

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
    """The job, its trainer's container with the files below its run folder."""
    found = copy.deepcopy(dict(job))
    pod = found["spec"]["template"]["spec"]
    volume = {"name": VOLUME, "configMap": {"name": config_map}}
    pod["volumes"] = [*pod.get("volumes", ()), volume]
    for container in pod["containers"]:
        if container["name"] == TRAINER:
            mount = {"name": VOLUME, "mountPath": f"{POD_RUN_DIR}/{FOLDER}", "readOnly": True}
            container["volumeMounts"] = [*container.get("volumeMounts", ()), mount]
    return found


def config_map(name: str, job: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    """`job`: as the API server holds it. Goes with it; immutable, so that no kubelet watches it."""
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
