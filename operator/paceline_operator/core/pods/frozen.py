"""The job as coordinator and agents read it: the file `job.json` of the job's Secret (C12).

Written once, when the first child is made, and immutable from then on. What changes later (the
wanted replicas, the mode) reaches the coordinator as targets.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final

from paceline_api.enums import FabricRequirement
from paceline_api.resolve import CollectiveSettings, ResolvedJob
from paceline_api.template import TRAINER

from paceline_operator.core.job import Job

FILE: Final = "job.json"


def job_file(job: Job) -> str:
    """`paceline.coordinator.config.JobSpec`, as JSON; a test compares the two."""
    settings = job.settings
    assert settings is not None, "a job with problems has no children"
    container = trainer_of(job.template)
    return json.dumps(
        {
            # The kubelet fills $(NAME) in for the agent only, whose command is another one.
            "command": [*(container.get("command") or ()), *(container.get("args") or ())],
            "env": [],
            "workingDir": "",
            "backend": str(settings.collective.backend),
            "backoffLimit": settings.backoff_limit,
            "replicas": settings.replicas,
            "procs": settings.procs_per_replica,
            "record": False,
            "checkpoint": _checkpoint(settings),
            "gpuDirect": job.frozen["fabric"]["required"] == FabricRequirement.GPU_DIRECT,
            "job": dataclasses.asdict(settings),
        },
        indent=2,
    )


def _checkpoint(settings: ResolvedJob) -> dict[str, Any] | None:
    c = settings.checkpoint
    return {"path": c.path, "everyRounds": c.every_rounds, "keep": c.keep} if c else None


def trainer_of(template: Mapping[str, Any]) -> Mapping[str, Any]:
    containers = (template.get("spec") or {}).get("containers") or ()
    found: Mapping[str, Any] = next(c for c in containers if c.get("name") == TRAINER)
    return found


def round_settings(collective: CollectiveSettings) -> dict[str, Any]:
    """`paceline.core.protocol.records.Settings`, as in the JSON of targets and of the status."""
    c = collective
    return {
        "mode": str(c.mode),
        "quorum": c.quorum_count or 0,
        "quorum_percent": c.quorum_percent or 0,
        "random_initiator": c.random_initiator,
        "deadline_ns": c.deadline_ns or 0,
        "deadline_factor": c.deadline_factor,
        "grace_ns": -1 if c.grace_ns is None else c.grace_ns,
        "grace_share": c.grace_share or 0.0,
        "warmup_rounds": c.warmup_rounds,
        "full_every": c.full_every,
        "max_age": c.max_age,
        "late": str(c.max_age_policy),
        "decay_factor": c.decay_factor,
        "normalisation": str(c.normalisation),
        "pacing": str(c.pacing),
        "bench_after_ns": c.bench_after_ns or 0,
        "buffers_every": c.buffers_every,
        "hash_every": c.hash_every,
    }


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
