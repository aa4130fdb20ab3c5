"""The part of a coordinator's GET /v1/status that the operator reads, with strict limits.

The sender may be of another release (C14): a missing field gets a default, and an unknown field is
skipped without being built. The coordinator runs in a pod of a user, who can make it answer
anything. Its bytes are therefore counted before anything is built from them. They are decoded into
the types below and nothing else, and texts, numbers and histories are cut to what an honest
coordinator sends.
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
"""Upper bound on an answer without its ranks; an honest history takes a third of it."""
RANK_BYTES: Final = 4 * 1024
"""Additional bytes allowed for each rank; honest ranks take 0.8 to 1.5 KiB."""
ANSWER_BYTES_MAX: Final = 6 * 1024 * 1024
"""Upper bound on any answer: 0.8 KiB for each of 7,000 ranks. Decoding holds the interpreter's
lock, and so blocks the event loop, for 2 ms per MiB."""
ANSWER_VALUES: Final = 32 * 1024
"""JSON values allowed in an answer without its ranks; a comma in a text counts as one."""
BYTES_PER_VALUE: Final = 16
"""Least number of bytes per JSON value in the part of the ranks; honest ranks use 22."""
DEAD_RANKS: Final = 128
"""Dead ranks allowed in an answer. A coordinator reports 64, and all whose pods were deleted
moments ago."""

ATTEMPT_STRIDE: Final = 1000
"""Factor in a rank's attempt: attempt of its pod x this + restarts inside the pod."""
SILENT_MS: Final = 3000
"""Least age at which a heartbeat no longer overrules evidence of death (C4), in milliseconds."""
SILENT_BEATS: Final = 3
"""Heartbeat intervals after which a heartbeat is too old, if that is longer: large jobs beat more
rarely (R42)."""

WHOLE_MAX: Final = 2**53
"""Largest number that every JSON reader represents exactly as a whole number."""
NAME_MAX: Final = 256
"""Upper bound on the length of a name, in characters."""
TEXT_MAX: Final = 2048
"""Upper bound on the length of a message; conditions are cut to 2,000 characters anyway."""
OUTCOME_MAX: Final = 8192
"""Upper bound on the message of an outcome, which includes the last lines of the script."""
WHY_MAX: Final = 512
"""Upper bound on the text that explains the state of one rank."""
KINDS_MAX: Final = 64
"""Upper bound on the number of triggers of rounds, and of settings."""
CONDITIONS_MAX: Final = 16
"""Upper bound on the number of conditions."""
HAPPENINGS_MAX: Final = 256
"""Number of the latest happenings that are kept; an honest coordinator remembers no more."""
CHANGES_MAX: Final = 256
"""Upper bound on the number of membership changes; a longer list is refused."""
PASSED_ON: Final = {
    str(reason): reason for reason in (Reason.RESUMED_FROM_CHECKPOINT, Reason.BATCH_SKIPPED)
}
"""Reasons of happenings that become Events of the job."""

ACTIVE: Final = "active"
BENCHED: Final = "benched"
SUSPECT: Final = "suspect"
DRAINING: Final = "draining"
STANDBY: Final = "standby"
DEAD: Final = "dead"
FINISHED: Final = "finished"


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a worker pod, as the coordinator reports it."""

    slot: int
    local: int
    attempt: int
    """Attempt of its pod."""
    state: str
    """State in the membership, such as ACTIVE or DRAINING."""
    rank: int | None = None
    silent_ms: int = 0
    silent_most_ms: int = SILENT_MS
    """Age in milliseconds beyond which its heartbeat no longer proves that it lives."""
    step_s: float = 0.0
    lag_s: float | None = None
    """Median of its arrivals behind the first rank; None if it has not reported one."""
    share: float | None = None
    """Fraction of the rounds in which it was active that include a contribution of it."""
    version: int = 0
    """Number of rounds that it has applied."""
    restarts: int = 0
    """Restarts of its process inside the pod."""
    pid: int = 0
    why: str = ""
    carrier: str = ""
    """Carrier of its data channel to other pods: TCP, RDMA or GPUDirect; empty if not known."""
    finished: bool = False
    """True if it has made the last round, even if its process has died since."""

    @property
    def member(self) -> str:
        """Identity as slot.process#attempt, with which its lines in the logs begin."""
        return f"{self.slot}.{self.local}#{self.attempt * ATTEMPT_STRIDE + self.restarts}"

    @property
    def pod(self) -> tuple[int, int]:
        """Slot and attempt of its pod."""
        return self.slot, self.attempt

    @property
    def speaks(self) -> bool:
        """Return True if a recent heartbeat of the rank itself shows that it lives."""
        return self.state not in (DEAD, SUSPECT) and self.silent_ms < self.silent_most_ms


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of the job, as its coordinator reports it."""

    complete: bool
    reason: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Happening:
    """A restart from a checkpoint, or a batch that was given up.

    A coordinator remembers hundreds of other happenings; the operator drops those.
    """

    seq: int
    message: str
    reason: Reason = Reason.RESUMED_FROM_CHECKPOINT


@dataclass(frozen=True, slots=True)
class CoordinatorStatus:
    """The status of a coordinator after its limits were applied."""

    pod_uid: str = ""
    seq: int = 0
    generation: str = ""
    """The present membership as incarnation.counter; empty before the first one."""
    replicas: int = 0
    has_targets: bool = True
    """True if `replicas` was pushed to this coordinator. One that does not report this counts as
    True and needs no push."""
    inventory: int = 0
    """Revision of the last inventory that it has received."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[Rank, ...] = ()
    version: int = 0
    transport: str = ""
    """Transport of the gradients; empty until it is reported."""
    transport_why: str = ""
    """The measurement by which the transport was chosen."""
    carrier: str | None = ""
    """Carrier of the gradients between pods, the worst of all ranks; empty: not known, None: the
    job's release does not measure it."""
    rounds: Mapping[str, int] = field(default_factory=dict)
    progress: float | None = None
    left_s: float | None = None
    """Seconds until the job ends at its present speed."""
    round_s: float = 0.0
    avoided_s: float = 0.0
    """Seconds of waiting that partial rounds have avoided."""
    conditions: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Reason and message by type of condition."""
    happenings: tuple[Happening, ...] = ()
    restarts: int = 0
    """Processes that agents have started in the place of others."""
    stopping: bool = False
    outcome: Outcome | None = None

    @property
    def living(self) -> tuple[Rank, ...]:
        """Ranks that are not dead."""
        return tuple(rank for rank in self.ranks if rank.state != DEAD)

    def speaking_pods(self) -> set[tuple[int, int]]:
        """Return the pods that have a rank with a recent heartbeat."""
        return {rank.pod for rank in self.ranks if rank.speaks}

    def registered_pods(self) -> set[tuple[int, int]]:
        """Return the pods with a process that has not been declared dead."""
        return {rank.pod for rank in self.living}

    def full_pods(self, procs: int) -> set[tuple[int, int]]:
        """Return the pods of whose ranks at least `procs` take part in the membership."""
        found: dict[tuple[int, int], int] = {}
        for rank in self.ranks:
            if rank.state in (ACTIVE, BENCHED) and rank.rank is not None:
                found[rank.pod] = found.get(rank.pod, 0) + 1
        return {pod for pod, count in found.items() if count >= procs}

    def standby_pods(self) -> set[tuple[int, int]]:
        """Return the pods whose ranks stand by, since the allowed size in use is full."""
        return {rank.pod for rank in self.ranks if rank.state == STANDBY}

    def highest_attempts(self) -> dict[int, int]:
        """Return the highest attempt that ever registered, by slot (C3)."""
        found: dict[int, int] = {}
        for rank in self.ranks:
            found[rank.slot] = max(found.get(rank.slot, 0), rank.attempt)
        return found


# ---- what is accepted ---------------------------------------------------------------------------


class Refused(StrEnum):
    """Reason why the operator refuses an answer: the label `reason` of its metric."""

    FORM = "form"
    """Not JSON, not of the types below, or a reply that no coordinator makes."""
    LENGTH = "length"
    """Longer than the number of the job's pods allows."""
    COUNT = "count"
    """More ranks or values than the number of the job's pods allows."""
    SHARE = "share"
    """The job or its namespace has used up its share of decoding time or bytes."""


class AnswerError(Exception):
    """Raised for an answer that the operator rejects. The next request waits `retry_s` at least."""

    def __init__(self, refused: Refused, message: str, *, retry_s: float = 0.0) -> None:
        super().__init__(message)
        self.refused = refused
        self.retry_s = retry_s


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds on the answer of a coordinator.

    It grows with the pods that exist and never with what a spec asks for: a pod costs its namespace
    quota, a number in a spec costs nothing.
    """

    ranks: int = DEAD_RANKS

    @classmethod
    def of(cls, pods: int, procs: int) -> Limits:
        """Return the limits of a job with `pods` worker pods of `procs` ranks each."""
        return cls(pods * procs + DEAD_RANKS)

    @property
    def bytes(self) -> int:
        """Upper bound on the length of the body, in bytes."""
        return min(ANSWER_BYTES + RANK_BYTES * self.ranks, ANSWER_BYTES_MAX)

    @property
    def values(self) -> int:
        """Upper bound on the number of JSON values in the body."""
        return ANSWER_VALUES + (self.bytes - ANSWER_BYTES) // BYTES_PER_VALUE


Name = Annotated[str, Meta(max_length=NAME_MAX)]
Figure = float | None
"""A number, or null: the runtime writes null for a figure that is not finite."""


class FactsBody(Struct, frozen=True, gc=False):
    """Figures that a rank has measured."""

    step_seconds: Figure = None
    lag_seconds: Figure = None


class RankBody(Struct, frozen=True, gc=False):
    """One rank in the JSON."""

    member: tuple[int, int, int]
    """Slot, process, attempt. Required, so that a list of empty objects fails at its first."""
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
    """One condition in the JSON."""

    type: Name = ""
    reason: Name = ""
    message: str = ""


class HappeningBody(Struct, frozen=True, gc=False):
    """One happening in the JSON."""

    seq: int = 0
    reason: Name = ""
    message: str = ""


class OutcomeBody(Struct, frozen=True, gc=False):
    """The outcome in the JSON."""

    complete: bool = False
    reason: Name = ""
    message: str = ""
    hint: str = ""


class ChangeBody(Struct, frozen=True, gc=False):
    """A membership change, of which no field is read: only whether there was one matters."""


class LogBody(Struct, frozen=True):
    """Figures that follow from the log of rounds."""

    rounds: dict[Name, int] = {}
    shares: dict[Name, Figure] = {}
    progress: Figure = None
    left_s: Figure = None
    round_s: Figure = None
    avoided_s: Figure = None


class StatusBody(Struct, frozen=True):
    """The whole JSON of /v1/status."""

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
    """Carrier of the gradients; None if the job's release does not measure the carrier."""
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
        raw: The body, of at most `limits.bytes`.
        limits: How much this job's coordinator may answer.

    Returns:
        The part that the operator keeps.

    Raises:
        AnswerError: The body is not of this form, or exceeds a limit.
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
    """Return the membership; empty until one is committed, since proposals are sent too."""
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
