"""The two kinds of records in the round log, GO and GEN, and their parts (R2).

Everything that must be equal on all ranks is a function of the sequence of these records
(`core.protocol.log.Log`). So each fact that such a function needs is written into one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace
from paceline_api.ids import GenerationId, MemberId
from paceline_api.rounds import RoundSettings


class Request(Struct, frozen=True):
    """Change that was requested through the coordinator; a starter writes it into a GO (R18)."""

    number: int
    """Number of the request; a GO carries only a number above the log's highest."""
    settings: RoundSettings | None = None
    """New settings; None keeps the present ones."""
    stop: bool = False
    """True to stop the job with the round that carries the request."""


class DataPlan(Struct, frozen=True):
    """Data to deal: `epochs` keyed permutations of `samples` indices, in leases of one step."""

    samples: int = 0
    """Length of the data set. 0 means that the script feeds itself and nothing is dealt."""
    batch: int = 0
    """Samples in one batch of one rank."""
    accumulate: int = 1
    """Batches per optimizer step; a lease is `batch x accumulate` samples (D1)."""
    epochs: int = 0
    seed: int = 0
    drop_last: bool = False
    """True to leave out the last lease of an epoch if it has fewer samples."""
    steps: int = 0
    """Number of steps (`Log.steps`) after which the job of a script that feeds itself ends; 0 for
    no such end."""
    slots: int | UnsetType = UNSET
    """Number of ranks with which a script begins that steps its own optimizers (S1). Each round is
    then an operation of the script (docs/design/scripts.md). Where it is unset, because the job
    steps the optimizer, the bytes are those of a release that did not know the field."""

    @property
    def script(self) -> int:
        """Number of slots of a script that steps its own optimizers; 0 for any other."""
        return self.slots or 0

    @property
    def ends(self) -> bool:
        """Return True if the job ends when this plan is worked off.

        Otherwise the job ends when all ranks have left their loops. Nothing can then tell a rank
        that joins late how far the loops of the others are.
        """
        return bool(self.samples or self.steps)

    def differences(self, other: DataPlan) -> str:
        """Return how `other` differs, such as `epochs: 10 -> 20`; empty if it does not."""
        both = (
            (name, getattr(self, name), getattr(other, name)) for name in self.__struct_fields__
        )
        return ", ".join(f"{name}: {one} -> {two}" for name, one, two in both if one != two)

    def goes_on_as(self, longer: DataPlan) -> bool:
        """Return True if a job with this plan may continue with another one.

        Leases are numbered through all epochs, so those that were dealt keep their meaning.

        Args:
            longer: The other plan.

        Returns:
            True if it deals the same data in the same order, for as many epochs or steps or more.
        """
        same = msgspec.structs.replace(self, epochs=longer.epochs, steps=longer.steps) == longer
        kind = bool(self.steps) == bool(longer.steps)
        return same and kind and self.epochs <= longer.epochs and self.steps <= longer.steps


class DropReason(StrEnum):
    """Why samples were dropped."""

    STALE = "stale"
    """Older than `max_age` when it could have been announced (D4)."""
    NONFINITE = "nonfinite"
    """NaN or Inf in the gradient (I17, D9)."""
    FOREIGN = "foreign"
    """Computed on weights that are not the job's: the first step of a script that feeds itself."""
    REVOKED = "revoked"
    """Merged in one buffer with work whose lease was dealt again (R13)."""
    SKIPPED = "skipped"
    """Batch that the script's loop took without making a step of it (D1)."""
    FAILED = "failed"
    """Batch with which the script failed on two ranks, and which `failurePolicy` skips (R56)."""
    UNLIKE = "unlike"
    """Late in a script whose next backward pass is of another kind, so that no average can take it
    (S17.5)."""
    ENDED = "ended"
    """Late when no further step of the script comes on its rank (S17.12)."""
    ABSENT = "absent"
    """Batches of a slot of a script that had no rank: no other rank has them (S9)."""


DROP_MEANINGS: Final[dict[DropReason, str]] = {
    DropReason.STALE: "older than maxAge",
    DropReason.NONFINITE: "NaN or Inf",
    DropReason.FOREIGN: "computed on weights that are not the job's",
    DropReason.REVOKED: "one sum with work that others had got",
    DropReason.SKIPPED: "the loop made no step of the batch",
    DropReason.FAILED: "the script failed twice with the batch",
    DropReason.UNLIKE: "late, and the script's next backward pass was of another kind",
    DropReason.ENDED: "late when the script ended",
    DropReason.ABSENT: "batches of a lost rank",
}
"""Meaning of each reason for users, in the help of metrics and in dashboards."""


class Drop(Struct, frozen=True):
    """Samples that will never be applied, and why; announced by their owner, counted by the log."""

    reason: DropReason
    samples: int
    leases: tuple[int, ...] = ()


class LoggedMetric(Struct, frozen=True):
    """User metric, summed over the contributors of a round (D11)."""

    name: str
    total: float
    weight: float


def summed(metrics: Iterable[LoggedMetric]) -> tuple[LoggedMetric, ...]:
    """Return one metric of each name, with its totals and weights summed."""
    sums: dict[str, tuple[float, float]] = {}
    for m in metrics:
        total, weight = sums.get(m.name, (0.0, 0.0))
        sums[m.name] = total + m.total, weight + m.weight
    return tuple(LoggedMetric(name, *sums[name]) for name in sorted(sums))


class Operation(Struct, frozen=True, omit_defaults=True, array_like=True):
    """What the ranks of a script sum in one round: a backward pass, or a collective call (S3)."""

    name: str
    """BACKWARD, or the call with its arguments, such as `all_reduce(sum, float32[3])`."""
    place: int = 0
    """Part of the script in which it is: even between two passes over the loader, odd in one."""
    number: int = 0
    """Number of the operation within its place."""
    opens: bool = True
    """True if a script that joins can begin here: at a point, or at the first operation since a
    batch was taken."""
    parts: tuple[tuple[str, int], ...] = ()
    """Type and number of elements of each buffer that is summed. A rank without the script's
    tensors contributes zeros of these sizes."""
    model: int = 0
    """Number of the model whose gradients a backward pass averages."""
    settles: bool = False
    """True for a backward pass from which on no gradient may be late: it reaches other parameters
    than the one before, or adds to an average, or has a GradScaler (S17.5). Ranks may differ in
    this."""

    @property
    def is_call(self) -> bool:
        """Return True if this is a collective call of the script."""
        return self.name != BACKWARD

    @property
    def spot(self) -> tuple[int, int]:
        """Place of the operation and its number there."""
        return self.place, self.number

    @property
    def kind(self) -> tuple[int, tuple[tuple[str, int], ...]]:
        """What a backward pass reaches: gradients of two kinds cannot be added."""
        return self.model, self.parts

    @property
    def needs_everybody(self) -> bool:
        """Return True if the operation is made only with all active ranks (S17.5, S17.7)."""
        return self.settles or self.is_call

    def is_as(self, other: Operation | None) -> bool:
        """Return True if another rank's operation is the same one."""
        return other is not None and replace(other, settles=self.settles) == self

    def __str__(self) -> str:
        """Return the name, and for a backward pass the number of elements."""
        if self.is_call:
            return self.name
        return f"backward() of {sum(count for _, count in self.parts)} parameters"


BACKWARD: Final = "backward"
"""Name of the operation that averages the gradients of a backward pass."""


class Share(Struct, frozen=True, omit_defaults=True):
    """Contribution of one rank to a round. GO names only ranks that announced something."""

    member: MemberId
    upto: int
    """Sequence number up to which GO takes the pending contributions of the rank."""
    count: int = 0
    """Number of contributions. With 0 the rank reduces zeros."""
    oldest: int = 0
    """Version on which the oldest of them was computed (D4)."""
    fresh: bool = False
    """True if the rank arrived before GO with a gradient of this round."""
    idle: bool = False
    """True if the rank announced IDLE."""
    samples: int = 0
    """Samples of all its contributions."""
    unit: int = 0
    """Unit of the buffer, which holds sum(sample gradients) / unit. Equal units need no weighing
    (D3)."""
    discount: float = 1.0
    """Weight under `MaxAgePolicy.DECAY`, already multiplied into the buffer."""
    leases: tuple[int, ...] = ()
    """Leases that the contributions work off."""
    drops: tuple[Drop, ...] = ()
    returned: tuple[int, ...] = ()
    """Leases that are given back untouched, because the rank evaluates or drains."""
    resting: bool = False
    """True if the rank wants no leases until it announces otherwise: it evaluates, drains or has
    finished."""
    done: bool = False
    """True if the loop of the rank has ended. Where nothing is dealt, the job ends when all ranks
    report this (R17)."""
    stop: bool = False
    """True if the script of the rank ends the job here, whatever is left to do (`pl.stop`)."""
    base: int = 0
    """Version of the batch in hand, which a later round will get. Set in PENDING, for
    MaxAgePolicy.WAIT and grace."""
    offset_us: int = 0
    """Arrival time after the first arrival of this round, on the starter's clock, in microseconds.
    """
    metrics: tuple[LoggedMetric, ...] = ()
    """User metrics of the contributions."""
    operation: Operation | None = None
    """Operation of a script that the rank waits in; None in a job that steps the optimizer."""
    where: str = ""
    """File and line of the script at which it called the operation."""


class Benched(Struct, frozen=True):
    """Rank that this round makes passive because it did not finish a step in time (R13)."""

    member: MemberId
    leases: tuple[int, ...]
    """Leases of the rank that it has not announced, which go back into the pool (R13)."""


class Trigger(StrEnum):
    """Why a round started; label of `paceline_rounds_total`."""

    ALL = "all"
    QUORUM = "quorum"
    DEADLINE = "deadline"
    INITIATOR = "initiator"
    TAIL = "tail"
    BENCH = "bench"
    VOID = "void"
    """The round started streamed and was aborted; its record has no shares (R32)."""


class GivenUp(StrEnum):
    """Why a rank made a streamed round void (R31)."""

    LATE = "late"
    """The rank's batch was not complete before its timeout (R33)."""
    DROPPED = "dropped"
    """The batch that GO names was dropped, by the script or by a change of the leases."""
    NONFINITE = "nonfinite"
    """A segment had a NaN or an Inf."""
    REWRITTEN = "rewritten"
    """A segment was written again after it was handed over, or step() differs from COMING in
    leases, samples or unit."""


class AnnounceKind(StrEnum):
    """Kind of an announcement, which tells the starter what the rank has (R11)."""

    PENDING = "pending"
    """The rank has contributions or drops of earlier rounds, and may still become fresh in this
    one."""
    COMING = "coming"
    """The first segment of its batch is ready. It will be fresh in this round once backward() has
    ended (R28)."""
    ARRIVE = "arrive"
    """The rank is fresh and waits for the round, or with a pipeline has a gradient under way (R36).
    """
    IDLE = "idle"
    """The rank computes nothing more in this round: it has no lease, evaluates, drains or has
    finished."""
    READY = "ready"
    """The rank is passive, has the complete state, and may be made active."""


class Go(Struct, frozen=True, tag="go", omit_defaults=True):
    """Record that starts round `round`, with who contributes what and why the round starts now.

    The round turns version `round` into the next one. Which rank has what follows from this record
    and the log together (`core.protocol.composition`).
    """

    generation: GenerationId
    round: int
    trigger: Trigger
    listed: tuple[Share, ...] = ()
    """Shares that the log does not predict."""
    ordinary: bytes = b""
    """One bit for each active rank: it has the share that the log predicts."""
    quiet: bytes = b""
    """One bit for each active rank: it is idle and has nothing to contribute."""
    offsets: bytes = b""
    """Arrival times of the ordinary ranks and then of the quiet ones (`Share.offset_us`), encoded.
    """
    metrics: tuple[LoggedMetric, ...] = ()
    """User metrics, summed over the ordinary ranks."""
    admitted: tuple[MemberId, ...] = ()
    """Passive members with complete state that are active from the next round (R15)."""
    benched: tuple[Benched, ...] = ()
    """Ranks that are passive from the next round."""
    request: Request | None = None
    """Request that takes effect with this round."""
    sync: bool = False
    """True if the float buffers of the contributors are reduced with the gradients (D10)."""
    streamed: bool = False
    """True if each rank reduces a segment as soon as it is ready; some ranks announced only COMING
    (R30)."""
    coming: bytes = b""
    """One bit for each active rank, in a streamed round: it announced no more than COMING."""
    wait_us: int = 0
    """Time from the first arrival to GO, on the starter's clock."""
    round_us: int = 0
    """Time from the starter's previous commit to GO; 0 in a streamed round, which starts early."""
    before_us: int = 0
    """Duration of the previous round on the starter, commit to commit, if it was streamed;
    otherwise 0."""
    operation: Operation | None = None
    """Operation of a script that this round carries out. None in a job that steps the optimizer,
    and in a round in which no rank waits in an operation."""

    @property
    def contributing(self) -> int:
        """Number of ranks with something in the sum."""
        ranks = int.from_bytes(self.ordinary, "little").bit_count()
        for share in self.listed:
            if share.count:
                ranks += 1
        return ranks

    @property
    def degraded(self) -> bool:
        """Return True if the quorum is not promised in this round (R12, R13, R20)."""
        return self.trigger in (Trigger.TAIL, Trigger.BENCH)

    @property
    def void(self) -> bool:
        """Return True if the round was aborted and changes no weights (R32)."""
        return self.trigger is Trigger.VOID

    def voided(self) -> Go:
        """Return the record that all ranks append instead if a segment came back flagged (R32)."""
        return Go(self.generation, self.round, Trigger.VOID, streamed=True)


class LeftOut(Struct, frozen=True):
    """Member of the previous generation that the new one leaves out."""

    member: MemberId
    why: str
    """One of "leave", "dead" and "silent". The leases of the member are dealt again from then on
    (R9)."""


class Gen(Struct, frozen=True, tag="gen"):
    """Record of a new membership; `members` is the rank order."""

    id: GenerationId
    members: tuple[MemberId, ...]
    with_state: tuple[MemberId, ...]
    active: tuple[MemberId, ...]
    version: int
    left_out: tuple[LeftOut, ...] = ()
    lookahead: tuple[tuple[MemberId, int], ...] = ()
    """Number of leases that each member may hold (D of R14, D1)."""
    plan: DataPlan | None = None
    """Data plan of the job. The first generation sets it, also the first one from a checkpoint;
    None in the others."""
    settings: RoundSettings | None = None
    """Settings of the job; set where `plan` is."""
    skips: tuple[int, ...] | UnsetType = UNSET
    """Leases that no rank computes from now on: a rank that is dealt one drops it (R56). Where it
    is unset, as in nearly every record, the bytes are those of a release that did not know the
    field."""
    unwanted: int | UnsetType = UNSET
    """Number of slots of a script that the owner of the job wants no rank in (S3). Unset if all are
    wanted."""


Record = Go | Gen

_pack = msgspec.msgpack.Encoder().encode


def pack_record(record: Record) -> bytes:
    """Return the canonical bytes of a record, from which the log's digest is made."""
    return _pack(record)
