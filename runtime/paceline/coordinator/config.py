"""What a coordinator must know of its job, from the file that the job was frozen in (C12)."""

from __future__ import annotations

from pathlib import Path

import msgspec
from paceline_api.enums import MaxAgePolicy, Pacing
from paceline_api.resolve import CollectiveSettings, ResolvedJob

from paceline.core.coordinator.events import Config
from paceline.core.protocol import records
from paceline.environment import ENV_SPEC, AgentSpec, CheckpointSpec, SettingsError

_LATE = {
    MaxAgePolicy.DROP: records.Late.DROP,
    MaxAgePolicy.DECAY: records.Late.DECAY,
    MaxAgePolicy.WAIT: records.Late.WAIT,
}
_PACING = {
    Pacing.ROUND: records.Pacing.ROUND,
    Pacing.SAMPLES: records.Pacing.SAMPLES,
    Pacing.AUTO: records.Pacing.AUTO,
}


class JobSpec(AgentSpec, frozen=True, kw_only=True, rename="camel"):
    """The file named by PACELINE_SPEC, which coordinator, agents and ranks share. Agents read what
    starts a rank, the coordinator reads `job`."""

    job: ResolvedJob


def job_spec(job: ResolvedJob, *, working_dir: str, record: bool = False) -> JobSpec:
    trainer = job.trainer
    return JobSpec(
        command=trainer.command,
        env=tuple(trainer.env.items()),
        working_dir=working_dir,
        backend=job.collective.backend,
        backoff_limit=job.backoff_limit,
        replicas=job.replicas,
        procs=job.procs_per_replica,
        record=record,
        checkpoint=checkpoint_spec(job),
        job=job,
    )


def checkpoint_spec(job: ResolvedJob) -> CheckpointSpec | None:
    c = job.checkpoint
    return CheckpointSpec(c.path, c.every_rounds, c.keep) if c else None


def read_job(path: Path) -> ResolvedJob:
    """Raises SettingsError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=JobSpec).job
    except OSError as error:
        raise SettingsError(ENV_SPEC, f"names {path}, which cannot be read: {error}") from None
    except msgspec.MsgspecError as error:
        raise SettingsError(ENV_SPEC, f"names {path}, which is no resolved job: {error}") from None


def config_of(job: ResolvedJob) -> Config:
    return Config(
        job=job.name,
        replicas=job.replicas,
        procs=job.procs_per_replica,
        min_replicas=job.min_replicas,
        settings=settings_of(job.collective),
        settle_ns=job.elasticity.settle_ns,
        stabilization_ns=job.elasticity.stabilization_ns,
        allowed_sizes=job.elasticity.allowed_sizes,
        freeze_timeout_ns=job.collective.freeze_timeout_ns,
        backoff_limit=job.backoff_limit,
        straggler=job.straggler,
    )


def settings_of(collective: CollectiveSettings) -> records.Settings:
    """How rounds are started and weighed, as the first generation records it (R2)."""
    c = collective
    return records.Settings(
        mode=records.Mode(c.mode),
        quorum=c.quorum_count or 0,
        quorum_percent=c.quorum_percent or 0,
        random_initiator=c.random_initiator,
        deadline_ns=c.deadline_ns or 0,
        deadline_factor=c.deadline_factor,
        grace_ns=-1 if c.grace_ns is None else c.grace_ns,
        grace_share=c.grace_share or 0.0,
        warmup_rounds=c.warmup_rounds,
        full_every=c.full_every,
        max_age=c.max_age,
        late=_LATE[c.max_age_policy],
        decay_factor=c.decay_factor,
        normalisation=records.Normalisation(c.normalisation),
        pacing=_PACING[c.pacing],
        bench_after_ns=c.bench_after_ns or 0,
        buffers_every=c.buffers_every,
        hash_every=c.hash_every,
    )
