"""The limits on a coordinator's status, and the part of it that the operator keeps.

The coordinator runs in a pod of a user, who can make it answer anything. Its bytes and JSON values
are therefore counted before anything is built from them. `paceline_api.status` decodes them, with
bounds for names and whole numbers. What remains is cut here to what an honest coordinator sends and
a decision reads, so that the statuses of all jobs fit into memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Final

from msgspec.structs import replace
from paceline_api.ids import NUMBER_MAX
from paceline_api.reasons import Reason
from paceline_api.status import (
    HISTORY_MAX,
    LAG_S,
    STEP_S,
    Figure,
    LogStatus,
    Outcome,
    RankStatus,
    Status,
    StatusError,
    decode_status,
)

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
PASSED_ON: Final = (Reason.RESUMED_FROM_CHECKPOINT, Reason.BATCH_SKIPPED)
"""Reasons of history entries that become Events of the job. A coordinator remembers hundreds of
other entries; the operator drops those."""


class RefusedAnswer(StrEnum):
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

    def __init__(self, refused: RefusedAnswer, message: str, *, retry_s: float = 0.0) -> None:
        super().__init__(message)
        self.refused = refused
        self.retry_s = retry_s


@dataclass(frozen=True, slots=True)
class StatusLimits:
    """Upper bounds on the answer of a coordinator.

    It grows with the pods that exist and never with what a spec asks for: a pod costs its namespace
    quota, a number in a spec costs nothing.
    """

    ranks: int = DEAD_RANKS

    @classmethod
    def of(cls, pods: int, procs: int) -> StatusLimits:
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


def read_coordinator_status(raw: bytes | bytearray, limits: StatusLimits) -> Status:
    """Read the JSON of /v1/status.

    Args:
        raw: The body, of at most `limits.bytes`.
        limits: How much this job's coordinator may answer.

    Returns:
        The part of the status that the operator keeps.

    Raises:
        AnswerError: The body is not of this form, or exceeds a limit.
    """
    values = raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if values > limits.values:
        text = f"its answer has {values} values, {limits.values} are allowed for the job's pods"
        raise AnswerError(RefusedAnswer.COUNT, text)
    try:
        status = decode_status(raw)
    except StatusError as error:
        raise AnswerError(RefusedAnswer.FORM, f"its answer is no status: {error}") from None
    count = max(len(status.ranks), len(status.log.shares))
    if count > limits.ranks:
        text = f"its answer tells of {count} ranks, the job's pods have at most {limits.ranks}"
        raise AnswerError(RefusedAnswer.COUNT, text)
    return _kept(status)


def _kept(status: Status) -> Status:
    log = status.log
    return Status(
        job=status.job,
        coordinator=status.coordinator,
        seq=status.seq,
        generation=status.generation,
        replicas=status.replicas,
        has_targets=status.has_targets,
        membership_settings=status.membership_settings[:TEXT_MAX],
        beat_ms=status.beat_ms,
        inventory=status.inventory,
        settings=dict(islice(status.settings.items(), KINDS_MAX)),
        ranks=tuple(map(_kept_rank, status.ranks)),
        version=status.version,
        transport=status.transport,
        transport_why=status.transport_why[:TEXT_MAX],
        carrier=status.carrier,
        log=LogStatus(
            rounds=dict(islice(log.rounds.items(), KINDS_MAX)),
            progress=_clamped(log.progress),
            left_s=_clamped(log.left_s),
            round_s=_clamped(log.round_s),
            avoided_s=_clamped(log.avoided_s),
            shares=log.shares,
        ),
        changes=status.changes[-1:],
        history=tuple(
            replace(entry, message=entry.message[:TEXT_MAX], facts={})
            for entry in status.history[-HISTORY_MAX:]
            if entry.reason in PASSED_ON
        ),
        conditions=tuple(
            replace(one, message=one.message[:TEXT_MAX])
            for one in status.conditions[:CONDITIONS_MAX]
        ),
        restarts=status.restarts,
        stopping=status.stopping,
        outcome=_kept_outcome(status.outcome),
    )


def _kept_rank(rank: RankStatus) -> RankStatus:
    figures = {name: _clamped(rank.facts[name]) for name in (STEP_S, LAG_S) if name in rank.facts}
    return replace(rank, host="", facts=figures, why=rank.why[:WHY_MAX])


def _kept_outcome(outcome: Outcome | None) -> Outcome | None:
    if outcome is None:
        return None
    message, hint = outcome.message[:OUTCOME_MAX], outcome.hint[:TEXT_MAX]
    return replace(outcome, message=message, hint=hint)


def _clamped(figure: Figure) -> Figure:
    return None if figure is None else max(-NUMBER_MAX, min(figure, NUMBER_MAX))
