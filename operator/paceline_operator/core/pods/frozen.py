"""Settings that coordinator and agents get: at first by file, later as targets (C12).

The file is in the job's Secret, whose name has its digest. All pods of a job that live at the same
time have the same file, so its ranks agree on everything in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_api.fields import digest
from paceline_api.jobfile import JobFile
from paceline_api.types.enums import FabricRequirement
from paceline_api.types.template import TRAINER

from paceline_operator.core.job import JobObject


def job_file(job: JobObject) -> str:
    """Return the job file for the agents and the coordinator of a job that starts now."""
    settings = job.settings
    assert settings is not None, "a job with problems has no children"
    container = trainer_of(job.template)
    return JobFile.of(
        settings,
        # $(NAME) stays as it is: the kubelet only expands the pod's own command, the agent's.
        command=(*(container.get("command") or ()), *(container.get("args") or ())),
        gpu_direct=job.resolved["fabric"]["required"] == FabricRequirement.GPU_DIRECT,
    ).to_json()


def file_id(job: JobObject) -> str:
    """Return the digest of the present job file."""
    return digest(job_file(job))


def trainer_of(template: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the container `trainer` of a pod template."""
    containers = (template.get("spec") or {}).get("containers") or ()
    trainer: Mapping[str, Any] = next(c for c in containers if c.get("name") == TRAINER)
    return trainer


def settings_differ(wanted: Mapping[str, Any], reported: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings that the coordinator has with another value.

    `pacing` is set once by the optimizer and cannot be changed. A setting that an older coordinator
    does not know is no difference; otherwise it would be sent forever.

    Args:
        wanted: Settings of the job.
        reported: Settings that the coordinator reports.

    Returns:
        The names; empty if there is nothing to send.
    """
    return [
        name
        for name, value in wanted.items()
        if name != "pacing" and name in reported and reported[name] != value
    ]
