"""A job as the runtime needs it: all defaults filled in, durations in nanoseconds, plain data.

`resolve` makes it once, when the job starts; the job file then keeps it (C12). It consists of
dataclasses, enums, numbers and text, so that a rank can read it without loading the validation of a
TrainingJob.
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
"""Default of spec.finishDeadlineSeconds."""
STEP_DEADLINE_S: Final = 1800
"""Default of spec.stepDeadlineSeconds."""


@dataclass(frozen=True, slots=True)
class CollectiveSettings:
    """`spec.collective` with its defaults filled in."""

    backend: Backend
    mode: Mode
    quorum_count: int | None
    """Number of ranks; either this or `quorum_percent` is set."""
    quorum_percent: int | None
    """Percentage of the active ranks, rounded up; a whole number, so that all ranks round alike."""
    random_initiator: bool
    deadline_ns: int | None
    """Time after the first arrival in nanoseconds; None: auto."""
    deadline_factor: float
    grace_ns: int | None
    """Nanoseconds; either this or `grace_share` is set."""
    grace_share: float | None
    """Fraction of the median round."""
    warmup_rounds: int
    full_every: int
    """Every N-th round runs in Full; 0: none."""
    max_age: int
    """Age in updates of the weights; 0: no limit."""
    max_age_policy: MaxAgePolicy
    decay_factor: float
    normalisation: Normalisation
    pacing: Pacing
    """AUTO is decided by the runtime, which knows the optimizer."""
    bench_after_ns: int | None
    """Silence in nanoseconds until a rank is benched; None: auto."""
    freeze_timeout_ns: int
    buffers_every: int
    """Rounds between two averages of the buffers; 0: buffers stay local."""
    segment_bytes: int | None
    """Upper bound in bytes on a segment that is reduced at a time; None: chosen by the device."""
    wire: Wire
    """Type in which float32 sums of gradients are sent between ranks."""
    overlap: Overlap
    pipeline: int
    """Batches that a rank computes while a gradient of its own is reduced: 0 or 1."""
    hash_every: int
    """Rounds between two comparisons of the weights' hashes; 0: never."""


@dataclass(frozen=True, slots=True)
class StragglerSettings:
    """`spec.straggler` with its defaults filled in."""

    window_rounds: int
    slowdown_factor: float
    respond: tuple[StragglerResponse, ...]
    cooldown_ns: int


@dataclass(frozen=True, slots=True)
class ElasticitySettings:
    """`spec.elasticity` with its defaults filled in."""

    settle_ns: int
    stabilization_ns: int
    drain_grace_ns: int
    node_lost_ns: int
    allowed_sizes: tuple[int, ...]
    """Allowed numbers of replicas, ascending; empty: any number."""


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """`spec.checkpoint` with its defaults filled in."""

    path: str
    every_rounds: int
    keep: int
    required: bool
    """True if a checkpoint that cannot be written fails the job."""


@dataclass(frozen=True, slots=True)
class FailureRuleSettings:
    """One of `spec.failurePolicy.rules`."""

    action: FailureAction
    on_exit_codes: tuple[int, ...]
    on_reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trainer:
    """The command of a rank: the container `trainer`, with $(NAME) expanded as far as it is known.

    The agent expands it once more and makes $$ a dollar sign.
    """

    command: tuple[str, ...]
    """Program and all arguments: `command` and `args` of the container."""
    env: dict[str, str]
    env_from_cluster: tuple[str, ...]
    """Variables that only a cluster can fill in (`valueFrom`); a local run warns about them."""
    working_dir: str | None


@dataclass(frozen=True, slots=True)
class ResolvedJob:
    """All settings of a job."""

    name: str
    namespace: str
    replicas: int
    min_replicas: int
    max_replicas: int | None
    """Upper bound on `replicas`; None: no limit."""
    procs_per_replica: int
    """Protocol members in each replica: ranks, or with `model` > 1 groups of ranks (R50)."""
    model: int
    """Ranks that hold one copy of the model together; 1: each rank holds all of it."""
    suspend: bool
    backoff_limit: int
    active_deadline_ns: int | None
    """Time limit for the whole job; None: no limit."""
    finish_deadline_ns: int
    """Time limit for scripts after all ranks were released (R17)."""
    step_deadline_ns: int
    """Time limit for a script between two calls of step()."""
    metrics_port: int
    collective: CollectiveSettings
    straggler: StragglerSettings
    elasticity: ElasticitySettings
    checkpoint: CheckpointSettings | None
    failure_rules: tuple[FailureRuleSettings, ...]
    trainer: Trainer
    tensor_board: str = ""
    """`spec.logging.tensorBoard`; empty for none."""
    max_skipped_batches: int = 0
    """`spec.failurePolicy.maxSkippedBatches` (R56)."""

    @property
    def world_size(self) -> int:
        """Number of protocol members when all replicas are present."""
        return self.replicas * self.procs_per_replica
