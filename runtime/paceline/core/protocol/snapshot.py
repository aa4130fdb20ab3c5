"""The round log as plain data: what a joiner receives and a checkpoint stores (R2, R15).

`log.Log` and `ledger.Ledger` are made from it and turn into it. Its parts are values, so that they
can be compared and sent.
"""

from __future__ import annotations

from msgspec import Struct, field
from paceline_api.ids import GenerationId, MemberId
from paceline_api.rounds import RoundSettings

from paceline.core.protocol.records import DataPlan, DropReason, Gen, Trigger
from paceline.core.protocol.shadow import ShadowReport


class Totals(Struct):
    """Counts of the samples of one rank or of several (I1). The ledger adds to its own copy."""

    applied: int = 0
    """Samples that a round applied."""
    late: int = 0
    """Part of `applied` that was not fresh."""
    dropped: int = 0
    """Samples that will never be applied."""
    discounted: float = 0.0
    """Part of `applied` that `MaxAgePolicy.DECAY` took away."""
    redealt: int = 0
    """Samples of leases that went back into the pool, because their holder departed or was benched.
    """
    rounds: int = 0
    """Number of rounds with a contribution."""


class EpochCount(Struct, frozen=True):
    """Leases of one unfinished epoch that are gone, and their applied and dropped samples."""

    epoch: int
    leases: int = 0
    applied: int = 0
    dropped: int = 0


class LedgerSnapshot(Struct, frozen=True):
    """A whole `core.protocol.ledger.Ledger` as plain data; its fields are explained there."""

    by_member: tuple[tuple[MemberId, Totals], ...]
    departed: Totals
    dropped: tuple[tuple[DropReason, int], ...]
    open_epochs: tuple[EpochCount, ...]
    epochs_exact: int
    epochs_short: int
    metrics: tuple[tuple[str, float, float], ...]
    before_epoch: tuple[tuple[str, float, float], ...]
    last_epoch: tuple[tuple[str, float, float], ...]
    rounds: tuple[tuple[Trigger, int], ...]
    streamed: int
    contributions: int
    contributions_before: int


class LogSnapshot(Struct, frozen=True):
    """A whole `core.protocol.log.Log` as plain data; its fields are explained there (R2)."""

    index: int
    digest: str
    version: int
    gen: Gen
    active: tuple[MemberId, ...]
    with_state: tuple[MemberId, ...]
    benched: tuple[MemberId, ...]
    resting: tuple[MemberId, ...]
    done: tuple[MemberId, ...]
    plan: DataPlan
    settings: RoundSettings
    request: int
    stopping: bool
    stopped_by: MemberId | None
    started: int
    next_lease: int
    pool: tuple[int, ...]
    held: tuple[tuple[MemberId, tuple[int, ...]], ...]
    lookahead: tuple[tuple[MemberId, int], ...]
    after_void: bool
    after_streamed: bool
    heard: tuple[tuple[MemberId, int], ...]
    upto: tuple[tuple[MemberId, int], ...]
    usual: tuple[tuple[MemberId, int], ...]
    accumulated: int = field(name="banked")
    accumulated_count: int = field(name="banked_count")
    accumulated_steps: int = field(name="banked_steps")
    updates: int
    updated: tuple[int, ...]
    progress: tuple[int, int]
    steps: tuple[int, int]
    round_us: tuple[int, ...]
    offsets_us: tuple[int, ...]
    shadow: ShadowReport
    ledger: LedgerSnapshot
    skips: tuple[int, ...] = ()
    owing: tuple[MemberId, ...] = ()
    step_at: tuple[int, int] | None = None
    settles: bool = False
    after_gen: bool = True
    slot_0_ended: bool = False


class Kept(Struct, frozen=True):
    """Checkpoint that a rank can read (R19, R26)."""

    generation: GenerationId
    """Last GEN record of its log. The newest checkpoint is the greatest (generation, version)."""
    version: int
    digest: str
    request: int = 0
    """Highest request number in its log (R18)."""
    finished: bool = False
    """True if the job ended with this version, and not because a stop was requested (C1)."""
