"""One voice per pod (R43): what an agent passes on between its ranks and the coordinator.

Each rank keeps its own order of words, and its own answers; the agent has one connection for all of
them and no opinion. It only keeps them apart: every connection to a coordinator has a number, a
rank is told of it and says who it is, and what it says for another number is dropped. So a rank and
a coordinator hear of each other what they would over a connection of their own.

Heartbeats are not passed on one by one: `beat` tells who was heard, and of whom something changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from paceline.core.messages import (
    Doing,
    Figures,
    Heartbeat,
    Introduce,
    Network,
    PodBeat,
    RankGone,
    RankMessage,
    Register,
    Said,
    Saved,
    Stopped,
)
from paceline.core.protocol.ids import NO_GENERATION, MemberId

LONG_MS: Final = 1_500
"""A communication thread that waits for news looks up every second (R35). Of one that has been at
something for longer, each beat tells for how long."""
ALIKE: Final = 8
"""Times that differ by less than this part of the longer one are the same news."""
SHORT_MS: Final = 100
"""So do reductions that all take less than this."""


@dataclass(slots=True)
class _Line:
    """One rank's."""

    connection: int = 0
    """The number that it was told last; 0: none."""
    register: Register | None = None
    """The last one that it has said for that number."""
    introduced: bool = False
    """Ever: it takes part, so its answer is worth waiting for."""
    beat: Heartbeat | None = None
    """The last one, if it came since the last beat of the pod."""
    told: Heartbeat | None = None
    """What the coordinator knows of it over this connection."""
    figures: Figures | None = None


class Relay:
    """Of one pod. Pure: whoever drives it owns the lines and the connection."""

    def __init__(self, slot: int, attempt: int, *, long_ms: int = LONG_MS) -> None:
        self._slot, self._attempt, self._long_ms = slot, attempt, long_ms
        self._lines: dict[MemberId, _Line] = {}
        self._numbers = 0
        self._connected = False
        self._greeted = False
        self._carriers: tuple[tuple[MemberId, Network], ...] | None = None

    # ---- lines ----------------------------------------------------------------------------

    @property
    def lines(self) -> list[MemberId]:
        return sorted(self._lines)

    def open(self, member: MemberId) -> Introduce | None:
        """There is a line to a new process. What it is to be told, if anything."""
        self._lines[member] = _Line()
        return self.anew(member)

    def anew(self, member: MemberId) -> Introduce | None:
        """What was on its way to this rank is lost: as if its connection were another one."""
        if not self._connected or member not in self._lines:
            return None
        self._numbers += 1
        before = self._lines[member]
        self._lines[member] = _Line(self._numbers, introduced=before.introduced)
        return Introduce(self._numbers)

    def close(self, member: MemberId) -> list[RankMessage | RankGone]:
        """Its line has ended. What the coordinator is to be told, if it knows the rank."""
        line = self._lines.pop(member, None)
        if line is None or line.register is None:
            return []
        return [*([line.figures] if line.figures is not None else []), RankGone(member)]

    # ---- the connection -------------------------------------------------------------------

    def connect(self) -> list[tuple[MemberId, Introduce]]:
        """There is a new connection: who is told so. Then comes the greeting, when nobody is
        awaited any more."""
        self._connected, self._greeted, self._carriers = True, False, None
        told = ((member, self.anew(member)) for member in sorted(self._lines))
        return [(member, word) for member, word in told if word is not None]

    @property
    def awaits(self) -> bool:
        """Somebody who takes part has not introduced himself for this connection."""
        return any(line.introduced and line.register is None for line in self._lines.values())

    def greet(self) -> tuple[Register, ...]:
        """Who has introduced himself by now; who does later is passed on."""
        self._greeted = True
        lines = (line.register for _, line in sorted(self._lines.items()))
        return tuple(register for register in lines if register is not None)

    def disconnect(self) -> None:
        """The connection has ended, and with it what was said for it."""
        self._connected = False
        for member, line in self._lines.items():
            self._lines[member] = _Line(introduced=line.introduced)

    # ---- words ----------------------------------------------------------------------------

    def hear(self, member: MemberId, said: Said) -> list[RankMessage]:
        """What is to be passed on at once. Raises ValueError if it is no word of this rank."""
        message = said.message
        if message.member != member:
            raise ValueError(f"rank {member} speaks for {message.member}")
        line = self._lines.get(member)
        if line is None or not line.connection or said.connection != line.connection:
            return []
        if isinstance(message, Register):
            line.register, line.introduced = message, True
            return [message] if self._greeted else []
        if line.register is None:
            raise ValueError(f"rank {member} has not introduced itself")
        if isinstance(message, Heartbeat):
            line.beat = message
            return []
        if isinstance(message, Figures):
            line.figures = message
            return []
        if isinstance(message, Stopped | Saved) and line.figures is not None:
            # Perhaps the last ones: the end of the job must not come before them.
            last, line.figures = line.figures, None
            return [last, message]
        return [message]

    def listeners(self, members: Iterable[MemberId]) -> list[MemberId]:
        """Who of them hears what this coordinator says. The others introduce themselves first, and
        are asked again then."""
        return [x for x in members if x in self._lines and self._lines[x].register is not None]

    def figures(self) -> list[Figures]:
        """What has come since it was asked last."""
        found = []
        for _, line in sorted(self._lines.items()):
            if line.figures is not None:
                found.append(line.figures)
                line.figures = None
        return found

    def beat(self, carriers: tuple[tuple[MemberId, Network], ...] = ()) -> PodBeat:
        """What the heartbeats since the last one say."""
        heard = {x: line.beat for x, line in sorted(self._lines.items()) if line.beat is not None}
        alike = Counter((beat.promise, beat.last) for beat in heard.values())
        common = max(alike, key=lambda pair: alike[pair], default=(NO_GENERATION, NO_GENERATION))
        changed, version = [], 0
        for member, beat in heard.items():
            line = self._lines[member]
            line.beat = None
            said = self._terse(beat)
            if (beat.promise, beat.last) == common:
                version = max(version, beat.version)
                if line.told is not None and _is_known(line.told, said):
                    continue
            line.told = said
            changed.append(said)
        news, self._carriers = carriers != self._carriers, carriers
        return PodBeat(
            self._slot,
            self._attempt,
            heard=tuple((member.local, member.attempt) for member in heard),
            promise=common[0],
            last=common[1],
            version=version,
            changed=tuple(changed),
            carriers=carriers if news else None,
        )

    def _terse(self, beat: Heartbeat) -> Heartbeat:
        """How long it has been at work is told only of who is at it for long."""
        doing = beat.doing
        if doing is None or doing.for_ms > self._long_ms:
            return beat
        return replace(beat, doing=replace(doing, for_ms=0, round=-1))


def _is_known(told: Heartbeat, beat: Heartbeat) -> bool:
    """Nothing that is judged has changed but what all ranks of the pod say alike."""
    return (
        _facts(told) == _facts(beat)
        and _alike(told.step_s, beat.step_s)
        and _alike(_usual_ms(told.doing), _usual_ms(beat.doing))
    )


def _facts(beat: Heartbeat) -> Heartbeat:
    doing = beat.doing
    if doing is not None:
        doing = replace(doing, usual_ms=0)
    return replace(
        beat, promise=NO_GENERATION, last=NO_GENERATION, version=0, doing=doing, step_s=0.0
    )


def _usual_ms(doing: Doing | None) -> int:
    return max(SHORT_MS, doing.usual_ms) if doing is not None else 0


def _alike(a: float, b: float) -> bool:
    return abs(a - b) * ALIKE <= max(a, b)
