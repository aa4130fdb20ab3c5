"""Conversion of a resolved job into the configuration of its coordinator."""

from __future__ import annotations

from paceline_api.rounds import RoundSettings
from paceline_api.settings import ResolvedJob

from paceline.core.coordinator.events import Config


def config_of(job: ResolvedJob) -> Config:
    """Return the settings that the coordinator's state machine needs from a resolved job."""
    return Config(
        job=job.name,
        replicas=job.replicas,
        procs=job.procs_per_replica,
        min_replicas=job.min_replicas,
        settings=RoundSettings.of(job.collective),
        settle_ns=job.elasticity.settle_ns,
        stabilization_ns=job.elasticity.stabilization_ns,
        allowed_sizes=job.elasticity.allowed_sizes,
        freeze_timeout_ns=job.collective.freeze_timeout_ns,
        finish_deadline_ns=job.finish_deadline_ns,
        step_deadline_ns=job.step_deadline_ns,
        checkpoint_required=job.checkpoint is not None and job.checkpoint.required,
        backoff_limit=job.backoff_limit,
        failure_rules=job.failure_rules,
        max_skipped_batches=job.max_skipped_batches,
        straggler=job.straggler,
    )
