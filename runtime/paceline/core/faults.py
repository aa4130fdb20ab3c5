"""Faults that a user asks for by `--inject`: one grammar for everybody who carries them out.

    kind:key=value,key=value        kill:rank=1,at=round:50

`slow`, `slow-factor` and `nan` happen inside a rank, which finds them in PACELINE_FAULTS; all
others are done to processes from outside, by the local runner. `rank` names a *place*: slot x
procsPerReplica + process. That is the rank of the first generation; here it stays the same when
others leave, and a process that is started again in that place is meant as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from paceline_api.errors import EXIT_BAD_INPUT, PacelineError
from paceline_api.types.durations import format_duration, parse_duration

SEPARATOR: Final = ";"
"""Between the faults of one text."""


class FaultKind(StrEnum):
    SLOW = "slow"
    """`ms` more in each step, or with probability `p`."""
    SLOW_FACTOR = "slow-factor"
    """Each step takes `factor` times as long."""
    NAN = "nan"
    """The first gradient that is computed on version `at` or a later one is not a number; once."""
    KILL = "kill"
    """SIGKILL."""
    FREEZE = "freeze"
    """SIGSTOP; SIGCONT after `for`, or never."""
    SIGTERM = "sigterm"
    """SIGTERM to the replica of the rank, as an eviction sends it: it drains and is replaced."""
    JOIN = "join"
    """`n` more replicas."""
    COORDINATOR_KILL = "coordinator-kill"
    """SIGKILL to the coordinator, which the runner starts again."""


INSIDE_A_RANK: Final = frozenset({FaultKind.SLOW, FaultKind.SLOW_FACTOR, FaultKind.NAN})


@dataclass(frozen=True, slots=True)
class At:
    """When: in the first moment that the committed version is `round`, or so long after the start.

    Exactly one of the two is set."""

    round: int | None = None
    after_ns: int | None = None

    def reached(self, *, version: int, elapsed_ns: int) -> bool:
        if self.round is not None:
            return version >= self.round
        assert self.after_ns is not None, self
        return elapsed_ns >= self.after_ns


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind
    rank: int | None = None
    """Place; None for `slow` with `rank=random`: in each step another one, drawn by the ranks
    alike; None also for faults that are done to no rank."""
    at: At | None = None
    delay_ns: int = 0
    """slow."""
    probability: float = 1.0
    """slow."""
    factor: float = 1.0
    """slow-factor."""
    duration_ns: int = 0
    """freeze; 0 = for ever."""
    count: int = 1
    """join."""


class FaultError(PacelineError):
    """A text that is no fault."""

    def __init__(self, text: str, problem: str, *, hint: str) -> None:
        super().__init__(f'--inject "{text}": {problem}', hint=hint, exit_code=EXIT_BAD_INPUT)


EXAMPLES: Final = {
    FaultKind.SLOW: "slow:rank=2,ms=200",
    FaultKind.SLOW_FACTOR: "slow-factor:rank=2,factor=2",
    FaultKind.NAN: "nan:rank=1,at=round:20",
    FaultKind.KILL: "kill:rank=1,at=round:50",
    FaultKind.FREEZE: "freeze:rank=1,at=round:20,for=3s",
    FaultKind.SIGTERM: "sigterm:rank=1,at=round:40",
    FaultKind.JOIN: "join:at=round:80",
    FaultKind.COORDINATOR_KILL: "coordinator-kill:at=round:30",
}


def parse_faults(text: str) -> list[Fault]:
    """All faults of a text such as PACELINE_FAULTS; an empty text has none. Raises FaultError."""
    return [_parse(part.strip()) for part in text.split(SEPARATOR) if part.strip()]


def format_faults(faults: Iterable[Fault]) -> str:
    """Inverse of `parse_faults`."""
    return SEPARATOR.join(_format(fault) for fault in faults)


def check_ranks(faults: Iterable[Fault], ranks: int) -> None:
    """Raises FaultError for a fault whose place does not exist even at the job's largest size."""
    for fault in faults:
        if fault.rank is not None and fault.rank >= ranks:
            raise FaultError(
                _format(fault),
                f"the job has {ranks} ranks",
                hint=f"ranks count from 0 to {ranks - 1}",
            )


# ---- reading ----------------------------------------------------------------------------------


def _number(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e9:
        raise ValueError(text)
    return value


def _place(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def _place_or_random(text: str) -> int | None:
    return None if text == "random" else _place(text)


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError(text)
    return value


def _factor(text: str) -> float:
    value = _number(text)
    if value < 1:
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 1000:
        raise ValueError(text)
    return value


def _milliseconds(text: str) -> int:
    return round(_number(text) * 1e6)


def _at(text: str) -> At:
    kind, _, value = text.partition(":")
    if kind == "round":
        return At(round=_place(value))
    if kind == "time":
        return At(after_ns=parse_duration(value))
    raise ValueError(text)


def _at_round(text: str) -> At:
    at = _at(text)
    if at.round is None:
        raise ValueError(text)
    return at


@dataclass(frozen=True, slots=True)
class _Key:
    field: str
    read: Callable[[str], Any]
    want: str
    needed: bool = True


_RANK = _Key("rank", _place, "a rank, such as 1")
_AT = _Key("at", _at, "round:N or time:5s")
_KEYS: Final[dict[FaultKind, dict[str, _Key]]] = {
    FaultKind.SLOW: {
        "rank": _Key("rank", _place_or_random, "a rank, such as 1, or random"),
        "ms": _Key("delay_ns", _milliseconds, "milliseconds, such as 200"),
        "p": _Key("probability", _share, "a probability above 0 and up to 1", needed=False),
    },
    FaultKind.SLOW_FACTOR: {
        "rank": _RANK,
        "factor": _Key("factor", _factor, "a factor of 1 or more, such as 2"),
    },
    FaultKind.NAN: {"rank": _RANK, "at": _Key("at", _at_round, "round:N")},
    FaultKind.KILL: {"rank": _RANK, "at": _AT},
    FaultKind.FREEZE: {
        "rank": _RANK,
        "at": _AT,
        "for": _Key("duration_ns", parse_duration, "a duration such as 3s or 200ms", needed=False),
    },
    FaultKind.SIGTERM: {"rank": _RANK, "at": _AT},
    FaultKind.JOIN: {
        "at": _AT,
        "n": _Key("count", _count, "a number of replicas, 1 or more", needed=False),
    },
    FaultKind.COORDINATOR_KILL: {"at": _AT},
}


def _parse(text: str) -> Fault:
    name, _, rest = text.partition(":")
    try:
        kind = FaultKind(name.strip())
    except ValueError:
        known = ", ".join(FaultKind)
        raise FaultError(
            text,
            f'there is no fault "{name.strip()}"',
            hint=f"known: {known}; for example {EXAMPLES[FaultKind.KILL]}",
        ) from None
    keys, example = _KEYS[kind], f"for example {EXAMPLES[kind]}"
    values: dict[str, Any] = {}
    for pair in (part.strip() for part in rest.split(",") if part.strip()):
        name, equals, value = (piece.strip() for piece in pair.partition("="))
        if name not in keys:
            known = ", ".join(keys)
            raise FaultError(text, f'{kind} knows no "{name}"', hint=f"it takes {known}; {example}")
        key = keys[name]
        if key.field in values:
            raise FaultError(text, f'"{name}" is given twice', hint=example)
        try:
            values[key.field] = key.read(value)
        except ValueError:
            shown = f'"{value}"' if equals else "nothing"
            raise FaultError(text, f"{name} is {shown}, not {key.want}", hint=example) from None
    for name, key in keys.items():
        if key.needed and key.field not in values:
            raise FaultError(text, f"{name} is missing ({key.want})", hint=example)
    return Fault(kind, **values)


# ---- writing ----------------------------------------------------------------------------------


def _format(fault: Fault) -> str:
    known, pairs = _KEYS[fault.kind], []
    if "rank" in known:
        pairs.append(f"rank={'random' if fault.rank is None else fault.rank}")
    if "ms" in known:
        pairs.append(f"ms={fault.delay_ns / 1e6:.15g}")
    if fault.probability != 1:
        pairs.append(f"p={fault.probability!r}")
    if "factor" in known:
        pairs.append(f"factor={fault.factor:.17g}")
    if fault.at is not None:
        pairs.append(f"at={_format_at(fault.at)}")
    if fault.duration_ns:
        pairs.append(f"for={format_duration(fault.duration_ns)}")
    if fault.count != 1:
        pairs.append(f"n={fault.count}")
    return f"{fault.kind}:{','.join(pairs)}"


def _format_at(at: At) -> str:
    if at.round is not None:
        return f"round:{at.round}"
    assert at.after_ns is not None, at
    return f"time:{format_duration(at.after_ns)}"
