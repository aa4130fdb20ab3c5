"""A job as the runtime needs it: every default filled in, durations in nanoseconds, plain data.

Made once by `resolve`, when the job starts, and then frozen with it in the job file (C12). Only
dataclasses, enums, numbers and text: a rank reads it without loading what validates a TrainingJob.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from paceline_api.types.enums import (
    Backend,
    FailureAction,
    MaxAgePolicy,
    Mode,
    Normalisation,
    Overlap,
    Pacing,
    StragglerResponse,
    Wire,
)

FINISH_DEADLINE_S: Final = 600
STEP_DEADLINE_S: Final = 1800
"""Defaults of spec.finishDeadlineSeconds and spec.stepDeadlineSeconds."""


@dataclass(frozen=True, slots=True)
class CollectiveSettings:
    """`spec.collective`, completed."""

    backend: Backend
    mode: Mode
    quorum_count: int | None
    """Ranks; exactly one of this and `quorum_percent` is set."""
    quorum_percent: int | None
    """Share of the active ranks, to be rounded up; whole, so that no rank rounds differently."""
    random_initiator: bool
    deadline_ns: int | None
    """None: auto."""
    deadline_factor: float
    grace_ns: int | None
    """Exactly one of this and `grace_share` is set."""
    grace_share: float | None
    """Share of the median round."""
    warmup_rounds: int
    full_every: int
    """0: never."""
    max_age: int
    """Rounds; 0: no limit."""
    max_age_policy: MaxAgePolicy
    decay_factor: float
    normalisation: Normalisation
    pacing: Pacing
    """AUTO is settled by the runtime, which knows the optimizer."""
    bench_after_ns: int | None
    """None: auto."""
    freeze_timeout_ns: int
    buffers_every: int
    """Rounds; 0: buffers stay local."""
    segment_bytes: int | None
    wire: Wire
    """Bound of what is reduced at a time; None: by the device."""
    overlap: Overlap
    pipeline: int
    """Batches that a rank computes while a gradient of its own is reduced: 0 or 1."""
    hash_every: int
    """Rounds; 0: never."""


@dataclass(frozen=True, slots=True)
class StragglerSettings:
    """`spec.straggler`, completed."""

    window_rounds: int
    slowdown_factor: float
    respond: tuple[StragglerResponse, ...]
    cooldown_ns: int


@dataclass(frozen=True, slots=True)
class ElasticitySettings:
    """`spec.elasticity`, completed."""

    settle_ns: int
    stabilization_ns: int
    drain_grace_ns: int
    node_lost_ns: int
    allowed_sizes: tuple[int, ...]
    """Replicas; empty: any number."""


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """`spec.checkpoint`, completed."""

    path: str
    every_rounds: int
    keep: int
    required: bool
    """One that cannot be written fails the job."""


@dataclass(frozen=True, slots=True)
class FailureRuleSettings:
    """One of `spec.failurePolicy.rules`."""

    action: FailureAction
    on_exit_codes: tuple[int, ...]
    on_reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trainer:
    """What one rank runs: the container `trainer`, with `$(NAME)` filled in as a kubelet does."""

    command: tuple[str, ...]
    """Program and all arguments: `command` and `args` of the container."""
    env: dict[str, str]
    env_from_cluster: tuple[str, ...]
    """Variables that only a cluster can fill in (`valueFrom`), for a warning in a local run."""
    working_dir: str | None


@dataclass(frozen=True, slots=True)
class ResolvedJob:
    name: str
    namespace: str
    replicas: int
    min_replicas: int
    max_replicas: int | None
    """None: no limit."""
    procs_per_replica: int
    """Members of the protocol in each replica: ranks, or with `model` groups of them (R50)."""
    model: int
    """Ranks that hold one copy of the model together; 1: each holds all of it."""
    suspend: bool
    backoff_limit: int
    active_deadline_ns: int | None
    """None: no limit."""
    finish_deadline_ns: int
    """How long scripts may run after the release (R17)."""
    step_deadline_ns: int
    """How long a script may take between two calls of step()."""
    metrics_port: int
    collective: CollectiveSettings
    straggler: StragglerSettings
    elasticity: ElasticitySettings
    checkpoint: CheckpointSettings | None
    failure_rules: tuple[FailureRuleSettings, ...]
    trainer: Trainer
    max_skipped_batches: int = 0
    """`spec.failurePolicy.maxSkippedBatches` (R56)."""

    @property
    def world_size(self) -> int:
        """Members when all wanted replicas are there."""
        return self.replicas * self.procs_per_replica
