"""What a coordinator tells in GET /v1/status, as far as the operator reads it.

The sender may be of another release (C14): a field that is missing gets a default, and one that is
unknown is skipped without being built. The coordinator runs in a pod of a user, who can make it say
anything. So its bytes are counted before anything is made of them, decoded into the types below and
into nothing else, and what is kept of texts, numbers and histories is cut to what an honest one
sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct
from paceline_api.decoding import UNDECODABLE
from paceline_api.reasons import Reason

ANSWER_BYTES: Final = 256 * 1024
"""Bound of an answer without its ranks; an honest history takes a third of it."""
RANK_BYTES: Final = 4 * 1024
"""More for each rank; honest ones take 0.8 to 1.5 KiB."""
ANSWER_BYTES_MAX: Final = 6 * 1024 * 1024
"""Bound of any answer, 0.8 KiB for each of 7,000 ranks. Decoding holds the interpreter's lock, and
so the event loop, for 2 ms per MiB."""
ANSWER_VALUES: Final = 32 * 1024
"""JSON values in an answer without its ranks: a comma in a text counts as one."""
BYTES_PER_VALUE: Final = 16
"""At most one JSON value in so many bytes, in the part of the ranks; honest ones have one in 22."""
DEAD_RANKS: Final = 128
"""A coordinator tells of 64 ranks that are dead, and of all whose pods went moments ago."""

ATTEMPT_STRIDE: Final = 1000
"""Attempt of a rank = attempt of its pod x this + restarts inside the pod."""
SILENT_MS: Final = 3000
"""Silence after which a heartbeat no longer speaks against evidence (C4), at least."""
SILENT_BEATS: Final = 3
"""So many intervals of large jobs, whose ranks beat more rarely (R42)."""

WHOLE_MAX: Final = 2**53
"""What any JSON reader takes for a whole number."""
NAME_MAX: Final = 256
TEXT_MAX: Final = 2048
"""A message for people; a condition of the API server is not longer."""
OUTCOME_MAX: Final = 8192
"""Of an outcome, whose message has the last lines of the script."""
WHY_MAX: Final = 512
"""Of one rank."""
KINDS_MAX: Final = 64
"""Triggers of rounds, settings."""
CONDITIONS_MAX: Final = 16
HAPPENINGS_MAX: Final = 256
"""The latest; an honest coordinator remembers no more."""
CHANGES_MAX: Final = 256
PASSED_ON: Final = {
    str(reason): reason for reason in (Reason.RESUMED_FROM_CHECKPOINT, Reason.BATCH_SKIPPED)
}
"""Happenings that become Events of the job."""

ACTIVE: Final = "active"
BENCHED: Final = "benched"
SUSPECT: Final = "suspect"
DRAINING: Final = "draining"
STANDBY: Final = "standby"
DEAD: Final = "dead"
FINISHED: Final = "finished"


@dataclass(frozen=True, slots=True)
class Rank:
    slot: int
    local: int
    attempt: int
    """Of its pod."""
    state: str
    rank: int | None = None
    silent_ms: int = 0
    silent_most_ms: int = SILENT_MS
    """Beyond it its heartbeat is too old to speak for it."""
    step_s: float = 0.0
    lag_s: float | None = None
    """Median of its arrivals after the first rank; None: it has not said."""
    share: float | None = None
    """Rounds with a contribution of it, of those in which it was active."""
    version: int = 0
    """Rounds that it has applied."""
    restarts: int = 0
    """Of its process, inside of the pod."""
    pid: int = 0
    why: str = ""
    carrier: str = ""
    """What carries its data channel to other pods: TCP, RDMA, GPUDirect; empty: not known."""
    finished: bool = False
    """It has made the last round, whatever became of its process since."""

    @property
    def member(self) -> str:
        """slot.process#attempt, as its lines in the logs begin."""
        return f"{self.slot}.{self.local}#{self.attempt * ATTEMPT_STRIDE + self.restarts}"

    @property
    def pod(self) -> tuple[int, int]:
        return self.slot, self.attempt

    @property
    def speaks(self) -> bool:
        """Its own heartbeat says that it lives."""
        return self.state not in (DEAD, SUSPECT) and self.silent_ms < self.silent_most_ms


@dataclass(frozen=True, slots=True)
class Outcome:
    complete: bool
    reason: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Happening:
    """That the job goes on from a checkpoint, or has given up a batch. Of the others, of which a
    coordinator remembers hundreds, the operator tells nobody."""

    seq: int
    message: str
    reason: Reason = Reason.RESUMED_FROM_CHECKPOINT


@dataclass(frozen=True, slots=True)
class CoordinatorStatus:
    pod_uid: str = ""
    seq: int = 0
    generation: str = ""
    """incarnation.counter of the present membership; empty before the first."""
    replicas: int = 0
    has_targets: bool = True
    """Somebody has pushed `replicas` to this coordinator. One that says nothing needs no push."""
    inventory: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[Rank, ...] = ()
    version: int = 0
    transport: str = ""
    """What moves the gradients; empty while nobody has said."""
    transport_why: str = ""
    """The measurement that led to it."""
    carrier: str | None = ""
    """What carries them between pods, on the worst of the ranks; empty: not known, None: this
    release does not look into it."""
    rounds: Mapping[str, int] = field(default_factory=dict)
    progress: float | None = None
    left_s: float | None = None
    """Seconds to its end, at the present speed."""
    round_s: float = 0.0
    avoided_s: float = 0.0
    conditions: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """type -> (reason, message)"""
    happenings: tuple[Happening, ...] = ()
    restarts: int = 0
    """Processes started by their agents in the place of others."""
    stopping: bool = False
    outcome: Outcome | None = None

    @property
    def living(self) -> tuple[Rank, ...]:
        return tuple(rank for rank in self.ranks if rank.state != DEAD)

    def speaking_pods(self) -> set[tuple[int, int]]:
        return {rank.pod for rank in self.ranks if rank.speaks}

    def registered_pods(self) -> set[tuple[int, int]]:
        """Pods with a process that has not been declared dead."""
        return {rank.pod for rank in self.living}

    def full_pods(self, procs: int) -> set[tuple[int, int]]:
        """Pods of which all ranks take part in the membership."""
        found: dict[tuple[int, int], int] = {}
        for rank in self.ranks:
            if rank.state in (ACTIVE, BENCHED) and rank.rank is not None:
                found[rank.pod] = found.get(rank.pod, 0) + 1
        return {pod for pod, count in found.items() if count >= procs}

    def standby_pods(self) -> set[tuple[int, int]]:
        """Pods that are ready, and more than the largest of allowedSizes that is reached."""
        return {rank.pod for rank in self.ranks if rank.state == STANDBY}

    def highest_attempts(self) -> dict[int, int]:
        """Highest attempt that ever registered, by slot (C3)."""
        found: dict[int, int] = {}
        for rank in self.ranks:
            found[rank.slot] = max(found.get(rank.slot, 0), rank.attempt)
        return found


# ---- what is accepted ---------------------------------------------------------------------------


class Refused(StrEnum):
    """Why the operator refuses an answer: label `reason` of its metric."""

    FORM = "form"
    """Neither JSON nor of the types below, or a reply that no coordinator makes."""
    LENGTH = "length"
    """Longer than the job's pods allow."""
    COUNT = "count"
    """More ranks or values than the job's pods allow."""
    SHARE = "share"
    """The job, or its namespace, has used up its share of the operator's time or reading."""


class AnswerError(Exception):
    """An answer that the operator does not take. `retry_s`: no sooner is it asked again."""

    def __init__(self, refused: Refused, message: str, *, retry_s: float = 0.0) -> None:
        super().__init__(message)
        self.refused = refused
        self.retry_s = retry_s


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a coordinator may answer. It grows with the pods that exist, never with what a spec
    asks for: a pod costs its namespace quota, a number in a spec costs nothing."""

    ranks: int = DEAD_RANKS

    @classmethod
    def of(cls, pods: int, procs: int) -> Limits:
        """Return the limits of a job with so many worker pods of `procs` ranks each."""
        return cls(pods * procs + DEAD_RANKS)

    @property
    def bytes(self) -> int:
        return min(ANSWER_BYTES + RANK_BYTES * self.ranks, ANSWER_BYTES_MAX)

    @property
    def values(self) -> int:
        return ANSWER_VALUES + (self.bytes - ANSWER_BYTES) // BYTES_PER_VALUE


Name = Annotated[str, Meta(max_length=NAME_MAX)]
Figure = float | None
"""JSON has no word for a figure that is not finite: the runtime writes null for one."""


class FactsBody(Struct, frozen=True, gc=False):
    step_seconds: Figure = None
    lag_seconds: Figure = None


class RankBody(Struct, frozen=True, gc=False):
    member: tuple[int, int, int]
    """Required, so that a list of empty objects ends at its first one."""
    state: Name = ""
    rank: int | None = None
    silent_ms: int = 0
    facts: FactsBody = FactsBody()
    version: int = 0
    pid: int = 0
    why: str = ""
    carrier: Name = ""
    finished: bool = False


class ConditionBody(Struct, frozen=True, gc=False):
    type: Name = ""
    reason: Name = ""
    message: str = ""


class HappeningBody(Struct, frozen=True, gc=False):
    seq: int = 0
    reason: Name = ""
    message: str = ""


class OutcomeBody(Struct, frozen=True, gc=False):
    complete: bool = False
    reason: Name = ""
    message: str = ""
    hint: str = ""


class ChangeBody(Struct, frozen=True, gc=False):
    """Nothing of it is read: the operator asks whether there was one."""


class LogBody(Struct, frozen=True):
    rounds: dict[Name, int] = {}
    shares: dict[Name, Figure] = {}
    progress: Figure = None
    left_s: Figure = None
    round_s: Figure = None
    avoided_s: Figure = None


class StatusBody(Struct, frozen=True):
    coordinator: Name = ""
    seq: int = 0
    generation: tuple[int, Name, int] = (0, "", 0)
    replicas: int = 0
    told: bool = True
    beat_ms: int = 0
    inventory: int = 0
    settings: dict[Name, Name | int | float | bool | None] = {}
    ranks: tuple[RankBody, ...] = ()
    version: int = 0
    transport: Name = ""
    transport_why: str = ""
    carrier: Name | None = None
    """None: this release does not look into it."""
    log: LogBody = LogBody()
    changes: Annotated[tuple[ChangeBody, ...], Meta(max_length=CHANGES_MAX)] = ()
    happenings: tuple[HappeningBody, ...] = ()
    conditions: tuple[ConditionBody, ...] = ()
    restarts: int = 0
    stopping: bool = False
    outcome: OutcomeBody | None = None


_DECODER: Final = msgspec.json.Decoder(StatusBody)


def read_coordinator_status(raw: bytes | bytearray, limits: Limits) -> CoordinatorStatus:
    """Read the JSON of /v1/status.

    Args:
        raw: The body, which is of at most `limits.bytes`.
        limits: How much this job may say.

    Returns:
        What the operator keeps of it.

    Raises:
        AnswerError: It is not of this form, or says more than it may.
    """
    values = raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if values > limits.values:
        text = f"its answer has {values} values, {limits.values} are allowed for the job's pods"
        raise AnswerError(Refused.COUNT, text)
    try:
        body = _DECODER.decode(raw)
    except UNDECODABLE as error:
        raise AnswerError(Refused.FORM, f"its answer is no status: {error}") from None
    most = limits.ranks
    if len(body.ranks) > most or len(body.log.shares) > most:
        count = max(len(body.ranks), len(body.log.shares))
        text = f"its answer tells of {count} ranks, the job's pods have at most {most}"
        raise AnswerError(Refused.COUNT, text)
    return _kept(body)


def _kept(body: StatusBody) -> CoordinatorStatus:
    log = body.log
    silent_most_ms = max(SILENT_MS, SILENT_BEATS * _whole(body.beat_ms))
    return CoordinatorStatus(
        pod_uid=body.coordinator,
        seq=_whole(body.seq),
        generation=_generation(body),
        replicas=_whole(body.replicas),
        has_targets=body.told,
        inventory=_whole(body.inventory),
        settings=dict(islice(body.settings.items(), KINDS_MAX)),
        ranks=tuple(_ranks(body.ranks, silent_most_ms, log.shares)),
        version=_whole(body.version),
        transport=body.transport,
        transport_why=body.transport_why[:TEXT_MAX],
        carrier=body.carrier,
        rounds={name: _whole(count) for name, count in islice(log.rounds.items(), KINDS_MAX)},
        progress=_figure(log.progress),
        left_s=_figure(log.left_s),
        round_s=_figure(log.round_s) or 0.0,
        avoided_s=_figure(log.avoided_s) or 0.0,
        conditions={
            c.type: (c.reason, c.message[:TEXT_MAX]) for c in body.conditions[:CONDITIONS_MAX]
        },
        happenings=tuple(
            Happening(_whole(h.seq), h.message[:TEXT_MAX], reason)
            for h in body.happenings[-HAPPENINGS_MAX:]
            if (reason := PASSED_ON.get(h.reason)) is not None
        ),
        restarts=_whole(body.restarts),
        stopping=body.stopping,
        outcome=_outcome(body.outcome),
    )


def _generation(body: StatusBody) -> str:
    """The server sends a mere proposal until the first membership has been committed."""
    if not body.changes:
        return ""
    incarnation, _, counter = body.generation
    return f"{_whole(incarnation)}.{_whole(counter)}"


def _ranks(
    items: Iterable[RankBody], silent_most_ms: int, shares: Mapping[str, Figure]
) -> Iterable[Rank]:
    for item in items:
        slot, local, start = map(_whole, item.member)
        attempt, restarts = divmod(start, ATTEMPT_STRIDE)
        yield Rank(
            slot=slot,
            local=local,
            attempt=attempt,
            state=item.state,
            rank=_whole(item.rank) if item.rank is not None else None,
            silent_ms=_whole(item.silent_ms),
            silent_most_ms=silent_most_ms,
            step_s=_figure(item.facts.step_seconds) or 0.0,
            lag_s=_figure(item.facts.lag_seconds),
            share=_figure(shares.get(f"{slot}.{local}#{start}")),
            version=_whole(item.version),
            restarts=restarts,
            pid=_whole(item.pid),
            why=item.why[:WHY_MAX],
            carrier=item.carrier,
            finished=item.finished,
        )


def _outcome(body: OutcomeBody | None) -> Outcome | None:
    if body is None:
        return None
    return Outcome(
        complete=body.complete,
        reason=body.reason,
        message=body.message[:OUTCOME_MAX],
        hint=body.hint[:TEXT_MAX],
    )


def _whole(value: int) -> int:
    return max(-WHOLE_MAX, min(value, WHOLE_MAX))


def _figure(value: Figure) -> float | None:
    return None if value is None else float(max(-WHOLE_MAX, min(value, WHOLE_MAX)))
