"""What of a job is told to its coordinator and its agents: once by file, later as targets (C12)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_api.jobfile import JobFile
from paceline_api.types.enums import FabricRequirement
from paceline_api.types.template import TRAINER

from paceline_operator.core.job import Job


def job_file(job: Job) -> str:
    """Written once, when the first child is made."""
    settings = job.settings
    assert settings is not None, "a job with problems has no children"
    container = trainer_of(job.template)
    return JobFile.of(
        settings,
        # The kubelet fills $(NAME) in for the agent only, whose command is another one.
        command=(*(container.get("command") or ()), *(container.get("args") or ())),
        gpu_direct=job.frozen["fabric"]["required"] == FabricRequirement.GPU_DIRECT,
    ).to_json()


def trainer_of(template: Mapping[str, Any]) -> Mapping[str, Any]:
    containers = (template.get("spec") or {}).get("containers") or ()
    found: Mapping[str, Any] = next(c for c in containers if c.get("name") == TRAINER)
    return found


def settings_differ(wanted: Mapping[str, Any], told: Mapping[str, Any]) -> list[str]:
    """Names of the settings that the coordinator has otherwise.

    `pacing` is settled once by the optimizer and cannot be changed. What an older coordinator does
    not know is no difference, or it would be told for ever.
    """
    return [
        name
        for name, value in wanted.items()
        if name != "pacing" and name in told and told[name] != value
    ]
