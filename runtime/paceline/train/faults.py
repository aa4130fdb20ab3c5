"""Faults that a rank does to itself, to show what a job makes of them (`paceline run --inject`).

The text is a list such as `slow:rank=2,ms=200,p=0.3;nan:rank=1,at=round:20`:

    slow         rank, ms, p=1      sleep before announcing a step, with probability p
    slow-factor  rank, factor       every step takes `factor` times as long
    nan          rank, at=round:N   one gradient of NaN, at the first step on version N or later

`rank=random` makes one rank slow in each round, drawn alike everywhere. Kills, freezes and joins
come from outside the process and are left to the local runner.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from paceline_api.errors import EXIT_BAD_INPUT, PacelineError

from paceline import clock

RANDOM_RANK: Final = -1
OUTSIDE: Final = frozenset({"kill", "freeze", "join", "coordinator-kill", "sigterm"})

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Slow:
    rank: int
    """RANDOM_RANK: one drawn rank in each round."""
    delay_ns: int
    probability: float


@dataclass(frozen=True, slots=True)
class SlowFactor:
    rank: int
    factor: float


@dataclass(frozen=True, slots=True)
class NotANumber:
    rank: int
    version: int


Fault = Slow | SlowFactor | NotANumber


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Raises PacelineError with the wrong part. Faults of other processes are left out."""
    parts = [part.strip() for part in text.split(";")]
    return tuple(fault for part in parts if part and (fault := _parse(part)) is not None)


class Faults:
    """The faults of this rank. `rank` is the index it had when training started."""

    def __init__(self, faults: tuple[Fault, ...], rank: int) -> None:
        mine = [fault for fault in faults if fault.rank in (rank, RANDOM_RANK)]
        self._rank = rank
        self._slow = [fault for fault in mine if isinstance(fault, Slow)]
        self._factors = [fault for fault in mine if isinstance(fault, SlowFactor)]
        self._nan = [fault for fault in mine if isinstance(fault, NotANumber)]
        self._own_dice = random.Random(f"paceline fault {rank}")
        self._since_ns = clock.now_ns()

    def before_announcing(self, version: int, size: int, poison: Callable[[], None]) -> None:
        """Called by `step()` when the gradient is complete; `poison` makes it NaN."""
        delay_ns = sum(
            fault.delay_ns for fault in self._slow if self._strikes(fault, version, size)
        )
        took_ns = clock.now_ns() - self._since_ns
        delay_ns += sum(int(took_ns * (fault.factor - 1)) for fault in self._factors)
        if delay_ns:
            clock.pause(delay_ns / clock.NS_PER_S)
        due = [fault for fault in self._nan if version >= fault.version]
        if due:
            self._nan = [fault for fault in self._nan if fault not in due]
            poison()

    def step_ended(self) -> None:
        """The next step begins: what `slow-factor` measures."""
        if self._factors:
            self._since_ns = clock.now_ns()

    def _strikes(self, fault: Slow, version: int, size: int) -> bool:
        if fault.rank == RANDOM_RANK:
            # Keyed by the version, so that all ranks draw the same one for a round.
            drawn = random.Random(f"paceline slow rank {version}")
            return drawn.randrange(size) == self._rank and drawn.random() < fault.probability
        return self._own_dice.random() < fault.probability


def _parse(part: str) -> Fault | None:
    kind, _, rest = part.partition(":")
    if kind in OUTSIDE:
        return None
    pairs = [item.partition("=") for item in rest.split(",") if item]
    values = {key.strip(): value.strip() for key, _, value in pairs}
    fault: Fault
    try:
        match kind:
            case "slow":
                delay_ns = int(_take(values, "ms", _positive) * clock.NS_PER_MS)
                fault = Slow(
                    _take(values, "rank", _rank), delay_ns, _take(values, "p", _share, "1")
                )
            case "slow-factor":
                fault = SlowFactor(_take(values, "rank", _rank), _take(values, "factor", _factor))
            case "nan":
                fault = NotANumber(_take(values, "rank", _rank), _take(values, "at", _round))
            case _:
                raise ValueError(f"{kind!r} is no fault")
        if values:
            raise ValueError(f"{next(iter(values))!r} is unknown here")
    except ValueError as error:
        raise PacelineError(
            f"fault {part!r}: {error}",
            hint="write for example slow:rank=2,ms=200,p=0.3 or slow-factor:rank=1,factor=2 "
            "or nan:rank=1,at=round:20",
            exit_code=EXIT_BAD_INPUT,
        ) from None
    return fault


def _take(
    values: dict[str, str], name: str, read: Callable[[str], T], default: str | None = None
) -> T:
    text = values.pop(name, default)
    if text is None:
        raise ValueError(f"{name} is missing")
    try:
        return read(text)
    except ValueError as error:
        raise ValueError(f"{name}={text}: {error}") from None


def _rank(text: str) -> int:
    if text == "random":
        return RANDOM_RANK
    rank = int(text)
    if rank < 0:
        raise ValueError("a rank is 0 or more")
    return rank


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError("must be above 0")
    return number


def _factor(text: str) -> float:
    number = float(text)
    if not 1 <= number < math.inf:
        raise ValueError("must be 1 or more")
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise ValueError("must lie between 0 and 1")
    return number


def _round(text: str) -> int:
    word, _, number = text.partition(":")
    if word != "round":
        raise ValueError("write round:N")
    return int(number)
