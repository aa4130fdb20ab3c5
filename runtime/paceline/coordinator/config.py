"""Conversion of a resolved job into the configuration of its coordinator."""

from __future__ import annotations

from paceline_api.membership import MembershipSettings
from paceline_api.rounds import RoundSettings
from paceline_api.settings import ResolvedJob

from paceline.core.coordinator.events import Config


def config_of(job: ResolvedJob) -> Config:
    """Return the settings that the coordinator's state machine needs from a resolved job."""
    membership = MembershipSettings.of(job)
    return Config(
        job=job.name,
        replicas=job.replicas,
        procs=job.procs_per_replica,
        settings=RoundSettings.of(job.collective),
        freeze_timeout_ns=job.collective.freeze_timeout_ns,
        finish_deadline_ns=job.finish_deadline_ns,
        step_deadline_ns=job.step_deadline_ns,
        backoff_limit=job.backoff_limit,
        failure_rules=job.failure_rules,
        membership_settings=membership.id,
        **membership.fields(),
    )
