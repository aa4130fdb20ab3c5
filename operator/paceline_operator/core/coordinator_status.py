"""What a coordinator tells in GET /v1/status, as far as the operator reads it.

The sender may be of another release (C14): what is missing gets a default, what is unknown
is ignored, and nothing here raises for a field that has another shape than expected. It runs in a
pod of a user, who can make it say anything: texts, numbers and histories are cut to what an honest
one sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from paceline_api.reasons import Reason

ATTEMPT_STRIDE: Final = 1000
"""Attempt of a rank = attempt of its pod x this + restarts inside the pod."""
SILENT_MS: Final = 3000
"""Silence after which a heartbeat no longer speaks against evidence (C4), at least."""
SILENT_BEATS: Final = 3
"""So many intervals of large jobs, whose ranks beat more rarely (R42)."""

WHOLE_MAX: Final = 2**53
"""What any JSON reader takes for a whole number."""
NAME_MAX: Final = 256
TEXT_MAX: Final = 8192
"""A message for people; an outcome's has the last lines of the script."""
KINDS_MAX: Final = 64
"""Conditions, triggers of rounds."""
HAPPENINGS_MAX: Final = 256
"""The latest; an honest coordinator remembers no more."""
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


def read_coordinator_status(data: Any) -> CoordinatorStatus:
    """From the JSON of /v1/status. Never raises."""
    body = _mapping(data)
    log = _mapping(body.get("log"))
    progress, left_s = log.get("progress"), log.get("left_s")
    silent_most_ms = max(SILENT_MS, SILENT_BEATS * _whole(body.get("beat_ms")))
    return CoordinatorStatus(
        pod_uid=_name(body.get("coordinator")),
        seq=_whole(body.get("seq")),
        generation=_generation(body),
        replicas=_whole(body.get("replicas")),
        has_targets=bool(body.get("told", True)),
        inventory=_whole(body.get("inventory")),
        settings=_mapping(body.get("settings")),
        ranks=tuple(_ranks(_items(body.get("ranks")), silent_most_ms, _mapping(log.get("shares")))),
        version=_whole(body.get("version")),
        transport=_name(body.get("transport")),
        transport_why=_text(body.get("transport_why")),
        carrier=_name(body["carrier"]) if "carrier" in body else None,
        rounds={_name(k): _whole(v) for k, v in _few(log.get("rounds"))},
        progress=_number(progress) if isinstance(progress, int | float) else None,
        left_s=_number(left_s) if isinstance(left_s, int | float) else None,
        round_s=_number(log.get("round_s")),
        avoided_s=_number(log.get("avoided_s")),
        conditions={
            _name(c.get("type")): (_name(c.get("reason")), _text(c.get("message")))
            for c in map(_mapping, _items(body.get("conditions"))[:KINDS_MAX])
        },
        happenings=tuple(
            Happening(_whole(h.get("seq")), _text(h.get("message")), reason)
            for h in map(_mapping, _items(body.get("happenings"))[-HAPPENINGS_MAX:])
            if (reason := PASSED_ON.get(_name(h.get("reason")))) is not None
        ),
        restarts=_whole(body.get("restarts")),
        stopping=bool(body.get("stopping", False)),
        outcome=_outcome(body.get("outcome")),
    )


def _generation(body: Mapping[str, Any]) -> str:
    """The server sends a mere proposal until the first membership has been committed."""
    parts = _items(body.get("generation"))
    if len(parts) != 3 or not _items(body.get("changes")):
        return ""
    return f"{_whole(parts[0])}.{_whole(parts[2])}"


def _ranks(items: Iterable[Any], silent_most_ms: int, shares: Mapping[str, Any]) -> Iterable[Rank]:
    for item in map(_mapping, items):
        member = _items(item.get("member"))
        if len(member) != 3:
            continue
        slot, local, start = map(_whole, member)
        attempt, restarts = divmod(start, ATTEMPT_STRIDE)
        place, facts = item.get("rank"), _mapping(item.get("facts"))
        share, lag_s = shares.get(f"{slot}.{local}#{start}"), facts.get("lag_seconds")
        yield Rank(
            slot=slot,
            local=local,
            attempt=attempt,
            state=_name(item.get("state")),
            rank=_whole(place) if isinstance(place, int) else None,
            silent_ms=_whole(item.get("silent_ms")),
            silent_most_ms=silent_most_ms,
            step_s=_number(facts.get("step_seconds")),
            lag_s=_number(lag_s) if isinstance(lag_s, int | float) else None,
            share=_number(share) if isinstance(share, int | float) else None,
            version=_whole(item.get("version")),
            restarts=restarts,
            pid=_whole(item.get("pid")),
            why=_text(item.get("why")),
            carrier=_name(item.get("carrier")),
            finished=bool(item.get("finished", False)),
        )


def _outcome(data: Any) -> Outcome | None:
    body = _mapping(data)
    if not body:
        return None
    return Outcome(
        complete=bool(body.get("complete", False)),
        reason=_name(body.get("reason")),
        message=_text(body.get("message")),
        hint=_text(body.get("hint")),
    )


def _mapping(data: Any) -> Mapping[str, Any]:
    return data if isinstance(data, Mapping) else {}


def _items(data: Any) -> list[Any]:
    return list(data) if isinstance(data, list | tuple) else []


def _few(data: Any) -> Iterable[tuple[Any, Any]]:
    return islice(_mapping(data).items(), KINDS_MAX)


def _name(value: Any) -> str:
    return value[:NAME_MAX] if isinstance(value, str) else ""


def _text(value: Any) -> str:
    return value[:TEXT_MAX] if isinstance(value, str) else ""


def _whole(value: Any) -> int:
    if not isinstance(value, int | float) or value != value:
        return 0
    return int(max(-WHOLE_MAX, min(value, WHOLE_MAX)))


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or value != value:
        return 0.0
    return float(max(-WHOLE_MAX, min(value, WHOLE_MAX)))
