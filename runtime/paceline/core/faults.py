"""The faults that a user injects with `--inject`: one grammar for all components that cause them.

    kind:key=value,key=value        kill:rank=1,at=round:50

`slow`, `slow-factor`, `shift` and `nan` happen inside a rank, which reads them from
PACELINE_FAULTS. The local runner causes all others from outside the process. `rank` names a
*place*: slot x procsPerReplica + process. In the first generation that is the rank. Unlike a rank
it stays the same when others leave, and it includes a process that is restarted in that place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from paceline_api.errors import EXIT_BAD_INPUT, PacelineError
from paceline_api.types.durations import format_duration, parse_duration

from paceline.core.loads import LOADS, Load, LoadError

SEPARATOR: Final = ";"
"""Separator between the faults of one text."""


class FaultKind(StrEnum):
    """The kinds of faults."""

    SLOW = "slow"
    """Each step takes `ms` longer, or does so with probability `p`. With `dist` or `load`, the
    duration of each step is drawn instead and includes the script's own computing; a step is
    never shortened."""
    SLOW_FACTOR = "slow-factor"
    """Each step takes `factor` times as long."""
    SHIFT = "shift"
    """Each step takes longer by one of as many delays as there are ranks, from `min` to `max`. In
    each step every rank has a different delay, and in the next step it has the next one."""
    NAN = "nan"
    """The first gradient that is computed on version `at` or later is set to NaN, once."""
    KILL = "kill"
    """Send SIGKILL to the rank."""
    FREEZE = "freeze"
    """Send SIGSTOP to the rank, and SIGCONT after `for`, or never."""
    SIGTERM = "sigterm"
    """Send SIGTERM to the replica of the rank, as an eviction does: it drains and is replaced."""
    JOIN = "join"
    """Add `n` replicas."""
    COORDINATOR_KILL = "coordinator-kill"
    """Send SIGKILL to the coordinator; the runner restarts it."""


INSIDE_A_RANK: Final = frozenset(
    {FaultKind.SLOW, FaultKind.SLOW_FACTOR, FaultKind.SHIFT, FaultKind.NAN}
)
"""The faults that a rank causes itself."""


@dataclass(frozen=True, slots=True)
class At:
    """The time of a fault: a committed version, or a time since the start.

    Exactly one of the two fields is set.
    """

    round: int | None = None
    """The fault happens as soon as the committed version is at least this."""
    after_ns: int | None = None
    """The fault happens this long after the first generation, in nanoseconds."""

    def reached(self, *, version: int, elapsed_ns: int) -> bool:
        """Return True if the fault is due.

        Args:
            version: Present committed version.
            elapsed_ns: Nanoseconds since the first generation.

        Returns:
            True if the version or the time is reached.
        """
        if self.round is not None:
            return version >= self.round
        assert self.after_ns is not None, self
        return elapsed_ns >= self.after_ns


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to inject."""

    kind: FaultKind
    rank: int | None = None
    """Place of the rank. None for `slow` with `rank=random`, where all ranks draw the same random
    rank in each step. None for a load, which applies to each rank. None for faults that concern
    no rank."""
    at: At | None = None
    """Time of the fault; None for faults that happen in every step."""
    delay_ns: int = 0
    """slow: additional time of a step."""
    probability: float = 1.0
    """slow: probability of the delay in a step."""
    load: Load | None = None
    """slow: distribution of the duration of a step, before `scale`."""
    scale: float = 1.0
    """slow with a load: factor on the drawn duration."""
    seed: int = 0
    """slow with a load: seed of the draws."""
    factor: float = 1.0
    """slow-factor: factor on the duration of a step."""
    least_ns: int = 0
    """shift: shortest delay."""
    most_ns: int = 0
    """shift: longest delay."""
    duration_ns: int = 0
    """freeze: time until the rank continues; 0 = never."""
    count: int = 1
    """join: number of replicas to add."""


class FaultError(PacelineError):
    """Raised for a text that is not a valid fault."""

    def __init__(self, text: str, problem: str, *, hint: str) -> None:
        super().__init__(f'--inject "{text}": {problem}', hint=hint, exit_code=EXIT_BAD_INPUT)


EXAMPLES: Final = {
    FaultKind.SLOW: "slow:rank=2,ms=200",
    FaultKind.SLOW_FACTOR: "slow-factor:rank=2,factor=2",
    FaultKind.SHIFT: "shift:min=50,max=400",
    FaultKind.NAN: "nan:rank=1,at=round:20",
    FaultKind.KILL: "kill:rank=1,at=round:50",
    FaultKind.FREEZE: "freeze:rank=1,at=round:20,for=3s",
    FaultKind.SIGTERM: "sigterm:rank=1,at=round:40",
    FaultKind.JOIN: "join:at=round:80",
    FaultKind.COORDINATOR_KILL: "coordinator-kill:at=round:30",
}
"""An example of each kind, for error messages."""

LOAD_EXAMPLES: Final = {
    "dist": "slow:dist=lognormal,mean=120,sd=70,min=20,max=340",
    "load": "slow:load=lstm,scale=0.1",
}
"""An example of `slow` with each of these keys, for error messages."""


def parse_faults(text: str) -> list[Fault]:
    """Parse all faults of a text such as PACELINE_FAULTS.

    Raises FaultError for a text that is not valid.

    Args:
        text: Faults, separated by SEPARATOR; may be empty.

    Returns:
        The faults, in order.
    """
    return [_parse(part.strip()) for part in text.split(SEPARATOR) if part.strip()]


def format_faults(faults: Iterable[Fault]) -> str:
    """Format faults as text; the inverse of `parse_faults`."""
    return SEPARATOR.join(_format(fault) for fault in faults)


def check_ranks(faults: Iterable[Fault], ranks: int) -> None:
    """Check that the place of each fault exists at the job's largest size.

    Args:
        faults: The faults.
        ranks: Largest number of ranks of the job.

    Raises:
        FaultError: A place does not exist.
    """
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


def _scale(text: str) -> float:
    value = _number(text)
    if value <= 0:
        raise ValueError(text)
    return value


def _seed(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def _lognormal(text: str) -> str:
    if text != "lognormal":
        raise ValueError(text)
    return text


def _published(text: str) -> Load:
    if text not in LOADS:
        raise ValueError(text)
    return LOADS[text]


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
    """How the value of one key is parsed, and what is expected of it."""

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
    FaultKind.SHIFT: {
        "min": _Key("least_ns", _milliseconds, "milliseconds, such as 50"),
        "max": _Key("most_ns", _milliseconds, "milliseconds, such as 400"),
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
_OF_ALL: Final = {
    "rank": _Key("rank", _place, "a rank, such as 1; without it all ranks", needed=False),
    "scale": _Key("scale", _scale, "a factor above 0, such as 0.1", needed=False),
    "seed": _Key("seed", _seed, "a whole number, such as 1", needed=False),
}
"""Keys of `slow` with any kind of load."""
_LOAD_KEYS: Final[dict[str, dict[str, _Key]]] = {
    "dist": {
        "dist": _Key("dist", _lognormal, "lognormal"),
        "mean": _Key("mean_ns", _milliseconds, "milliseconds, such as 120"),
        "sd": _Key("sd_ns", _milliseconds, "milliseconds, such as 70"),
        "min": _Key("min_ns", _milliseconds, "milliseconds, such as 20"),
        "max": _Key("max_ns", _milliseconds, "milliseconds, such as 340"),
        **_OF_ALL,
    },
    "load": {"load": _Key("load", _published, " or ".join(LOADS)), **_OF_ALL},
}
"""Keys of `slow` if this key is among them."""


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
    pairs = [_pair(part) for part in rest.split(",") if part.strip()]
    drawn = _drawn(kind, {name for name, _ in pairs})
    keys, example = (
        (_LOAD_KEYS[drawn], LOAD_EXAMPLES[drawn]) if drawn else (_KEYS[kind], EXAMPLES[kind])
    )
    called, example = f"{kind} with {drawn}" if drawn else str(kind), f"for example {example}"
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name not in keys:
            known = ", ".join(keys)
            raise FaultError(
                text, f'{called} knows no "{name}"', hint=f"it takes {known}; {example}"
            )
        key = keys[name]
        if key.field in values:
            raise FaultError(text, f'"{name}" is given twice', hint=example)
        try:
            values[key.field] = key.read(value or "")
        except ValueError:
            shown = "nothing" if value is None else f'"{value}"'
            raise FaultError(text, f"{name} is {shown}, not {key.want}", hint=example) from None
    for name, key in keys.items():
        if key.needed and key.field not in values:
            raise FaultError(text, f"{name} is missing ({key.want})", hint=example)
    try:
        return _fault(kind, values)
    except LoadError as error:
        raise FaultError(text, str(error), hint=example) from None


def _pair(part: str) -> tuple[str, str | None]:
    name, equals, value = (piece.strip() for piece in part.partition("="))
    return name, value if equals else None


def _drawn(kind: FaultKind, names: set[str]) -> str | None:
    """Return the key that makes `slow` draw its durations, or None."""
    if kind is not FaultKind.SLOW:
        return None
    return next((name for name in _LOAD_KEYS if name in names), None)


def _fault(kind: FaultKind, values: dict[str, Any]) -> Fault:
    """Make a fault of parsed values.

    Args:
        kind: Kind of the fault.
        values: Parsed values by field; changed in place.

    Returns:
        The fault.

    Raises:
        LoadError: The values contradict each other.
    """
    if "dist" in values:
        del values["dist"]
        parts = {name: values.pop(name) for name in ("mean_ns", "sd_ns", "min_ns", "max_ns")}
        values["load"] = Load(**parts)
        values["load"].curve()
    if kind is FaultKind.SHIFT and values["least_ns"] > values["most_ns"]:
        raise LoadError("min is more than max")
    return Fault(kind, **values)


# ---- writing ----------------------------------------------------------------------------------


def _format(fault: Fault) -> str:
    return f"{fault.kind}:{','.join(f'{name}={value}' for name, value in _pairs(fault).items())}"


def _pairs(fault: Fault) -> dict[str, str]:
    if fault.load is not None:
        return _load_pairs(fault, fault.load)
    known, pairs = _KEYS[fault.kind], {}
    if "rank" in known:
        pairs["rank"] = "random" if fault.rank is None else str(fault.rank)
    if "ms" in known:
        pairs["ms"] = _in_ms(fault.delay_ns)
    if fault.probability != 1:
        pairs["p"] = repr(fault.probability)
    if "factor" in known:
        pairs["factor"] = f"{fault.factor:.17g}"
    if "min" in known:
        pairs |= {"min": _in_ms(fault.least_ns), "max": _in_ms(fault.most_ns)}
    if fault.at is not None:
        pairs["at"] = _format_at(fault.at)
    if fault.duration_ns:
        pairs["for"] = format_duration(fault.duration_ns)
    if fault.count != 1:
        pairs["n"] = str(fault.count)
    return pairs


def _load_pairs(fault: Fault, load: Load) -> dict[str, str]:
    pairs = {} if fault.rank is None else {"rank": str(fault.rank)}
    names = [name for name, published in LOADS.items() if published == load]
    if names:
        pairs["load"] = names[0]
    else:
        pairs |= {"dist": "lognormal", "mean": _in_ms(load.mean_ns), "sd": _in_ms(load.sd_ns)}
        pairs |= {"min": _in_ms(load.min_ns), "max": _in_ms(load.max_ns)}
    if fault.scale != 1:
        pairs["scale"] = f"{fault.scale:.17g}"
    if fault.seed:
        pairs["seed"] = str(fault.seed)
    return pairs


def _in_ms(ns: int) -> str:
    return f"{ns / 1e6:.15g}"


def _format_at(at: At) -> str:
    if at.round is not None:
        return f"round:{at.round}"
    assert at.after_ns is not None, at
    return f"time:{format_duration(at.after_ns)}"
