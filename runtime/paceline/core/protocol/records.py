"""The two kinds of records of the round log, GO and GEN, and what they are made of (R2).

Everything that must be equal on all ranks is a function of the sequence of these records
(`core.protocol.log.Log`), so each fact that such a function needs is written into one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import msgspec
from msgspec import UNSET, Struct, UnsetType
from paceline_api.rounds import RoundSettings

from paceline.core.protocol.ids import GenerationId, MemberId


class Request(Struct, frozen=True):
    """A change asked for through the coordinator; a starter writes it into a GO (R18)."""

    number: int
    settings: RoundSettings | None = None
    stop: bool = False
    """Stop with the round that carries this."""


class DataPlan(Struct, frozen=True):
    """What is dealt: `epochs` keyed permutations of `samples` indices in leases of one step."""

    samples: int = 0
    """Length of the data set; 0 = the script feeds itself, nothing is dealt."""
    batch: int = 0
    """Samples of one batch of one rank."""
    accumulate: int = 1
    """Batches per optimizer step; a lease is `batch x accumulate` samples (D1)."""
    epochs: int = 0
    seed: int = 0
    drop_last: bool = False
    """Leave out the last, smaller batch of an epoch."""
    steps: int = 0
    """Of a script that feeds itself: the job ends when so many steps are made (`Log.steps`)."""

    @property
    def ends(self) -> bool:
        """The job ends when this is worked off; else it does when all ranks have left their loops,
        and nothing can tell a rank that comes late where they are."""
        return bool(self.samples or self.steps)

    def differences(self, other: DataPlan) -> str:
        """Return what `other` has otherwise, such as `epochs: 10 -> 20`; empty if nothing."""
        both = (
            (name, getattr(self, name), getattr(other, name)) for name in self.__struct_fields__
        )
        return ", ".join(f"{name}: {one} -> {two}" for name, one, two in both if one != two)

    def goes_on_as(self, longer: DataPlan) -> bool:
        """Return True if a job of this plan may go on with `longer`: the same data, dealt in the
        same order, for as many epochs or steps or more. Leases are numbered through all epochs, so
        those that were dealt keep their meaning."""
        same = msgspec.structs.replace(self, epochs=longer.epochs, steps=longer.steps) == longer
        kind = bool(self.steps) == bool(longer.steps)
        return same and kind and self.epochs <= longer.epochs and self.steps <= longer.steps


class DropReason(StrEnum):
    STALE = "stale"
    """Older than `max_age` when it could have been announced (D4)."""
    NONFINITE = "nonfinite"
    """NaN or Inf in the gradient (I17, D9)."""
    FOREIGN = "foreign"
    """The first of a script that feeds itself, computed on weights that are not the job's."""
    REVOKED = "revoked"
    """Shares a buffer with work whose lease was dealt again (R13)."""
    SKIPPED = "skipped"
    """The user's loop took the batch and made no step of it (D1)."""
    FAILED = "failed"
    """The script failed with the batch on two ranks, and `failurePolicy` skips it (R56)."""


DROP_MEANINGS: Final[dict[DropReason, str]] = {
    DropReason.STALE: "older than maxAge",
    DropReason.NONFINITE: "NaN or Inf",
    DropReason.FOREIGN: "computed on weights that are not the job's",
    DropReason.REVOKED: "one sum with work that others had got",
    DropReason.SKIPPED: "the loop made no step of the batch",
    DropReason.FAILED: "the script failed twice with the batch",
}
"""What each reason means, for users: in the help of metrics and in dashboards."""


class Drop(Struct, frozen=True):
    """Samples that will never be applied, and why; announced by their owner, counted by the log."""

    reason: DropReason
    samples: int
    leases: tuple[int, ...] = ()


class LoggedMetric(Struct, frozen=True):
    """A user's figure, summed over the contributors of a round (D11)."""

    name: str
    total: float
    weight: float


def summed(metrics: Iterable[LoggedMetric]) -> tuple[LoggedMetric, ...]:
    """One figure of each name."""
    sums: dict[str, tuple[float, float]] = {}
    for m in metrics:
        total, weight = sums.get(m.name, (0.0, 0.0))
        sums[m.name] = total + m.total, weight + m.weight
    return tuple(LoggedMetric(name, *sums[name]) for name in sorted(sums))


class Share(Struct, frozen=True, omit_defaults=True):
    """What one rank has in a round. Only ranks that announced something are named in a GO."""

    member: MemberId
    upto: int
    """All its pending contributions with a sequence number up to this one."""
    count: int = 0
    """Number of contributions; 0 = it reduces zeros."""
    oldest: int = 0
    """Version on which the oldest of them was computed; age = round - oldest (D4)."""
    fresh: bool = False
    idle: bool = False
    samples: int = 0
    unit: int = 0
    """The buffer holds sum(per-sample gradients) / unit; equal units need no weighing (D3)."""
    discount: float = 1.0
    """Weight under `MaxAgePolicy.DECAY`, already multiplied into the buffer."""
    leases: tuple[int, ...] = ()
    drops: tuple[Drop, ...] = ()
    returned: tuple[int, ...] = ()
    """Leases given back untouched (evaluating, draining)."""
    resting: bool = False
    """Wants no leases until it says otherwise (evaluating, draining, finished)."""
    done: bool = False
    """Its loop has ended; where nothing is dealt, the job ends when all say so (R17)."""
    stop: bool = False
    """Its script ends the job here, whatever is left to do (`pl.stop`)."""
    base: int = 0
    """PENDING: version of the batch in hand, which a later round will get (MaxAgePolicy.WAIT)."""
    offset_us: int = 0
    """Arrival after the first one of this round, on the starter's clock."""
    metrics: tuple[LoggedMetric, ...] = ()


class Benched(Struct, frozen=True):
    member: MemberId
    leases: tuple[int, ...]
    """Its unannounced leases, which go back into the pool (R13)."""


class Trigger(StrEnum):
    """Why a round started; label of `paceline_rounds_total`."""

    ALL = "all"
    QUORUM = "quorum"
    DEADLINE = "deadline"
    INITIATOR = "initiator"
    TAIL = "tail"
    BENCH = "bench"
    VOID = "void"
    """Began streamed and came to nothing: a record without shares (R32)."""


class GivenUp(StrEnum):
    """Why a rank made a streamed round void (R31)."""

    LATE = "late"
    """Its patience with its own batch was over (R33)."""
    DROPPED = "dropped"
    """The script, or a change of the leases, gave up the batch that GO names."""
    NONFINITE = "nonfinite"
    """A segment had a NaN or an Inf."""
    REWRITTEN = "rewritten"
    """A segment was written again after it was handed over, or step() said other samples."""


class AnnounceKind(StrEnum):
    """What an announcement means to the starter (R11)."""

    PENDING = "pending"
    """Has something from earlier rounds; may still become fresh in this one."""
    COMING = "coming"
    """Its first segment is ready: will be fresh in this round, once backward() has ended (R28)."""
    ARRIVE = "arrive"
    """Fresh: computed on the version of this round; waits for it."""
    IDLE = "idle"
    """Nothing more to compute in this round: no lease, evaluating or draining."""
    READY = "ready"
    """Passive, with complete state: may be made active."""


class Go(Struct, frozen=True, tag="go", omit_defaults=True):
    """Round `round` starts: who contributes what, why now. Turns version `round` into the next.

    `core.protocol.composition` reads who has what, since that takes the log too."""

    generation: GenerationId
    round: int
    trigger: Trigger
    listed: tuple[Share, ...] = ()
    """Shares that the log does not tell by itself."""
    ordinary: bytes = b""
    """A bit for each active rank: it has the share that the log expects of it."""
    quiet: bytes = b""
    """Likewise: it is there and has nothing."""
    offsets: bytes = b""
    """When the ordinary ranks and then the quiet ones have arrived (`Share.offset_us`)."""
    metrics: tuple[LoggedMetric, ...] = ()
    """User's figures, summed over the ordinary ranks."""
    admitted: tuple[MemberId, ...] = ()
    """Passive members with complete state that are active from the next round (R15)."""
    benched: tuple[Benched, ...] = ()
    request: Request | None = None
    sync: bool = False
    """The contributors' float buffers are reduced along (D10)."""
    streamed: bool = False
    """Each rank reduces a segment as soon as it has it; some have said COMING only (R30)."""
    coming: bytes = b""
    """A bit for each active rank that has said no more than COMING."""
    wait_us: int = 0
    """First arrival until GO, on the starter's clock."""
    round_us: int = 0
    """The starter's previous commit until GO; 0 of a streamed round, which starts early."""
    before_us: int = 0
    """If the round before was streamed: how long it took on the starter, commit to commit."""

    @property
    def contributing(self) -> int:
        """Ranks with something in the sum."""
        ordinary = int.from_bytes(self.ordinary, "little").bit_count()
        return ordinary + sum(1 for share in self.listed if share.count)

    @property
    def degraded(self) -> bool:
        """Quorum not promised in this round (R12, R13, R20)."""
        return self.trigger in (Trigger.TAIL, Trigger.BENCH)

    @property
    def void(self) -> bool:
        return self.trigger is Trigger.VOID

    def voided(self) -> Go:
        """What is appended instead, on every rank, if a segment came back flagged (R32)."""
        return Go(self.generation, self.round, Trigger.VOID, streamed=True)


class LeftOut(Struct, frozen=True):
    member: MemberId
    why: str
    """"leave", "dead" or "silent": from then on its leases are dealt again (R9)."""


class Gen(Struct, frozen=True, tag="gen"):
    """A new membership. `members` is the rank order."""

    id: GenerationId
    members: tuple[MemberId, ...]
    with_state: tuple[MemberId, ...]
    active: tuple[MemberId, ...]
    version: int
    left_out: tuple[LeftOut, ...] = ()
    lookahead: tuple[tuple[MemberId, int], ...] = ()
    """Leases that each member may hold: D of R14 and D1."""
    plan: DataPlan | None = None
    """Set by the first generation of a job, None afterwards."""
    settings: RoundSettings | None = None
    """Likewise."""
    skips: tuple[int, ...] | UnsetType = UNSET
    """Leases that no rank computes from now on: whoever is dealt one drops it (R56). Unset, as in
    nearly every record, its bytes are those of a release that did not know of it."""


Record = Go | Gen

_pack = msgspec.msgpack.Encoder().encode


def pack_record(record: Record) -> bytes:
    """Canonical bytes of a record; the log's digest is made of them."""
    return _pack(record)
