"""The file that a job is frozen in (C12), which coordinator, agents and ranks read.

The local runner writes it into the run folder, the operator into the job's Secret: once, before the
first process is started. What changes later (the wanted replicas, the mode) reaches the coordinator
as targets.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Raw, Struct

from paceline_api.bounded import read_file
from paceline_api.decoding import UNDECODABLE
from paceline_api.errors import JobFileError
from paceline_api.names import ENV_SPEC
from paceline_api.rounds import RoundSettings
from paceline_api.settings import (
    FINISH_DEADLINE_S,
    STEP_DEADLINE_S,
    FailureRuleSettings,
    ResolvedJob,
)
from paceline_api.types.enums import Wire

JOB_FILE: Final = "job.json"
FILE_BYTES_MAX: Final = 16 * 2**20
"""Far more than the settings, the command and the environment of a job file of 1 MB."""
_HINT: Final = f"{ENV_SPEC} names it; start jobs with `paceline run job.yaml`, which writes it"


class CheckpointSpec(Struct, frozen=True, rename="camel"):
    """`spec.checkpoint`, as a rank needs it."""

    path: str
    """Absolute, or relative to the folder in which the ranks run."""
    every_rounds: int
    keep: int


class JobFile(Struct, frozen=True, kw_only=True, rename="camel"):
    """How a rank is started, for agents and ranks, and all settings, for the coordinator.

    Unknown keys are ignored: a reader may be older than the writer.
    """

    command: tuple[str, ...]
    """Command and arguments of the container `trainer`, $(NAME) not expanded yet."""
    env: tuple[tuple[str, str], ...]
    """In the order of the container; $(NAME) stands for a variable defined above or outside."""
    working_dir: str
    """Absolute; empty = that of the agent."""
    backend: str
    """spec.collective.backend; decides whether a rank is started by mpiexec."""
    segment_bytes: int | None
    """spec.collective.segmentBytes; None: by the device."""
    wire: Wire
    """spec.collective.wire."""
    backoff_limit: int
    finish_deadline_ns: int = FINISH_DEADLINE_S * 10**9
    """spec.finishDeadlineSeconds."""
    step_deadline_ns: int = STEP_DEADLINE_S * 10**9
    """spec.stepDeadlineSeconds."""
    failure_rules: tuple[FailureRuleSettings, ...]
    """Of spec.failurePolicy: which deaths of ranks do not count, or end the job."""
    replicas: int
    """Wanted when the job started; what `size()` says before the first generation."""
    procs: int
    """Members per replica: ranks, or groups of `model` ranks (R50)."""
    model: int = 1
    """Ranks that hold one copy of the model together."""
    record: bool
    """Each rank keeps a journal, for `paceline replay`."""
    measures: bool = False
    """Each rank measures how large its gradients are, for `paceline plan`."""
    reproducible: bool = False
    """Two runs with the same ranks have the same bits: spec.collective.mode is Full or Shadow."""
    checkpoint: CheckpointSpec | None
    gpu_direct: bool
    """The job requires GPUDirect: NCCL is to say in a log how it connects."""
    job: Raw
    """The ResolvedJob, which the coordinator alone decodes: agents and ranks may be of another
    release, and do not fail over a setting that they never look at."""

    @classmethod
    def of(
        cls,
        job: ResolvedJob,
        *,
        command: Iterable[str],
        env: Iterable[tuple[str, str]] = (),
        working_dir: str = "",
        record: bool = False,
        measures: bool = False,
        gpu_direct: bool = False,
    ) -> JobFile:
        """`env`: what the agent adds to its own environment."""
        c = job.checkpoint
        return cls(
            command=tuple(command),
            env=tuple(env),
            working_dir=working_dir,
            backend=job.collective.backend,
            segment_bytes=job.collective.segment_bytes,
            wire=job.collective.wire,
            backoff_limit=job.backoff_limit,
            finish_deadline_ns=job.finish_deadline_ns,
            step_deadline_ns=job.step_deadline_ns,
            failure_rules=job.failure_rules,
            replicas=job.replicas,
            procs=job.procs_per_replica,
            model=job.model,
            record=record,
            measures=measures,
            reproducible=RoundSettings.of(job.collective).is_synchronous,
            checkpoint=CheckpointSpec(c.path, c.every_rounds, c.keep) if c else None,
            gpu_direct=gpu_direct,
            job=Raw(msgspec.json.encode(job)),
        )

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self)).decode()


def read_job_file(path: Path) -> JobFile:
    """Raises JobFileError."""
    try:
        file = msgspec.json.decode(read_file(path, FILE_BYTES_MAX), type=JobFile)
    except OSError as error:
        told = (error.strerror or str(error)).lower()
        raise JobFileError(f"{path} cannot be read: {told}", hint=_HINT) from None
    except UNDECODABLE as error:
        raise JobFileError(f"{path} is no job that was frozen: {error}", hint=_HINT) from None
    if not file.command:
        raise JobFileError(f"{path} has no command for the ranks", hint=_HINT)
    return file


def read_resolved_job(path: Path) -> ResolvedJob:
    """Raises JobFileError."""
    try:
        return msgspec.json.decode(read_job_file(path).job, type=ResolvedJob)
    except UNDECODABLE as error:
        raise JobFileError(f"{path} is no resolved job: {error}", hint=_HINT) from None
