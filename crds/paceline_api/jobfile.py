"""The file with the frozen settings of a job, which coordinator, agents and ranks read (C12).

The local runner writes it into the run folder, and the operator into the job's Secret, once and
before the first process starts. Later changes (the number of replicas, the mode) reach the
coordinator as targets.
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
from paceline_api.times import NS_PER_S
from paceline_api.types.enums import Wire

JOB_FILE: Final = "job.json"
FILE_BYTES_MAX: Final = 16 * 2**20
"""Upper bound on the size in bytes; far more than the settings, command and environment of a job
file of 1 MB."""
_HINT: Final = f"{ENV_SPEC} names it; start jobs with `paceline run job.yaml`, which writes it"


class CheckpointSpec(Struct, frozen=True, rename="camel"):
    """`spec.checkpoint` as a rank needs it."""

    path: str
    """Absolute, or relative to the folder in which the ranks run."""
    every_rounds: int
    keep: int


class JobFile(Struct, frozen=True, kw_only=True, rename="camel"):
    """Description of how to start a rank, for agents and ranks; all settings, for the coordinator.

    Unknown keys are ignored, because a reader may be older than the writer.
    """

    command: tuple[str, ...]
    """Command and arguments of the container `trainer`; $(NAME) is not expanded yet."""
    env: tuple[tuple[str, str], ...]
    """Environment variables in the order of the container; $(NAME) refers to a variable that is
    defined above or in the agent's environment."""
    working_dir: str
    """Absolute path; empty for the working folder of the agent."""
    backend: str
    """spec.collective.backend; it decides whether mpiexec starts the ranks."""
    segment_bytes: int | None
    """spec.collective.segmentBytes; None chooses it by the device."""
    wire: Wire
    """spec.collective.wire."""
    backoff_limit: int
    finish_deadline_ns: int = FINISH_DEADLINE_S * NS_PER_S
    """spec.finishDeadlineSeconds."""
    step_deadline_ns: int = STEP_DEADLINE_S * NS_PER_S
    """spec.stepDeadlineSeconds."""
    failure_rules: tuple[FailureRuleSettings, ...]
    """Rules of spec.failurePolicy: which failures of ranks do not count, or end the job."""
    replicas: int
    """Replicas asked for at the start; `size()` uses it before the first generation."""
    procs: int
    """Members per replica: ranks, or groups of `model` ranks (R50)."""
    model: int = 1
    """Ranks that hold one copy of the model together."""
    record: bool
    """True if each rank writes a journal for `paceline replay`."""
    measures: bool = False
    """True if each rank measures the size of its gradients for `paceline plan`."""
    reproducible: bool = False
    """True if two runs with the same ranks give the same bits, which is so in the modes Full and
    Shadow."""
    tensor_board: str = ""
    """spec.logging.tensorBoard; empty for none."""
    checkpoint: CheckpointSpec | None
    gpu_direct: bool
    """True if the job requires GPUDirect: NCCL then logs how it connects."""
    job: Raw
    """The ResolvedJob, which only the coordinator decodes. Agents and ranks may be of another
    release, and must not fail over a setting that they do not use."""

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
        """Return the job file of a resolved job.

        Args:
            job: The settings.
            command: Command and arguments of a rank.
            env: Variables that the agent adds to its own environment.
            working_dir: Working folder of the ranks; empty for that of the agent.
            record: Write journals for `paceline replay`.
            measures: Measure gradients for `paceline plan`.
            gpu_direct: The job requires GPUDirect.

        Returns:
            The job file.
        """
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
            tensor_board=job.tensor_board,
            gpu_direct=gpu_direct,
            job=Raw(msgspec.json.encode(job)),
        )

    def to_json(self) -> str:
        """Return the file's content as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self)).decode()


def read_job_file(path: Path) -> JobFile:
    """Return the content of a job file.

    Args:
        path: Path of the file.

    Returns:
        The job file; its `job` is not decoded yet.

    Raises:
        JobFileError: The file cannot be read, or is not a job file.
    """
    try:
        file = msgspec.json.decode(read_file(path, FILE_BYTES_MAX), type=JobFile)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise JobFileError(f"{path} cannot be read: {reason}", hint=_HINT) from None
    except UNDECODABLE as error:
        raise JobFileError(f"{path} is not the file of a frozen job: {error}", hint=_HINT) from None
    if not file.command:
        raise JobFileError(f"{path} has no command for the ranks", hint=_HINT)
    return file


def read_resolved_job(path: Path) -> ResolvedJob:
    """Return all settings in a job file.

    Args:
        path: Path of the file.

    Returns:
        The settings.

    Raises:
        JobFileError: The file cannot be read, or does not hold the settings of this release.
    """
    try:
        return msgspec.json.decode(read_job_file(path).job, type=ResolvedJob)
    except UNDECODABLE as error:
        raise JobFileError(f"{path} is not a resolved job: {error}", hint=_HINT) from None
