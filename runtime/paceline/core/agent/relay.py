"""Relay between the ranks of a pod and the coordinator, over one connection per pod (R43).

Each rank keeps the order of its own messages and answers. The agent has one connection for all of
its ranks and does not interpret what it passes on. Its only task is to keep connections apart.
Every connection to a coordinator has a number. A rank is given the number and registers for it;
messages that it sends for another number are dropped. So a rank and a coordinator exchange what
they would exchange over a connection of their own.

Heartbeats are not passed on one by one. `beat` names the ranks that were heard, and lists those
with news.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace
from paceline_api.ids import NO_GENERATION, MemberId
from paceline_api.types.enums import Network

from paceline.core.messages import (
    Doing,
    Heartbeat,
    Introduce,
    PodBeat,
    RankEnvelope,
    RankFigures,
    RankGone,
    RankMessage,
    Register,
    Saved,
    Stopped,
)

LONG_MS: Final = 1_500
"""Time at one piece of work above which each beat reports it. A communication thread that waits for
messages wakes up every second, so it stays below (R35)."""
ALIKE: Final = 8
"""Tolerance of compared times: those that differ by at most 1/ALIKE of the longer are equal."""
SHORT_MS: Final = 100
"""Lower bound on compared reduction times: all shorter ones count as equal."""


@dataclass(slots=True)
class _Line:
    """State of the line to one rank process."""

    connection: int = 0
    """Connection number that the rank was given last; 0 if none."""
    register: Register | None = None
    """Last registration of the rank for that number."""
    introduced: bool = False
    """True if it has ever registered. It takes part in the job, so the greeting waits for its
    registration."""
    beat: Heartbeat | None = None
    """Last heartbeat since the last beat of the pod; None if there was none."""
    reported: Heartbeat | None = None
    """The heartbeat that the coordinator knows from this connection."""
    figures: RankFigures | None = None
    """Last figures that were not passed on yet; None if there are none."""


class Relay:
    """Relay of one pod, as a pure state machine.

    The caller owns the lines and the connection, and makes all calls from one thread.
    """

    def __init__(self, slot: int, attempt: int, *, long_ms: int = LONG_MS) -> None:
        """Start without lines and without a connection.

        Args:
            slot: Slot of the pod.
            attempt: Attempt of the pod in that slot.
            long_ms: Time at one piece of work, in milliseconds, above which each beat reports it.
        """
        self._slot, self._attempt, self._long_ms = slot, attempt, long_ms
        self._lines: dict[MemberId, _Line] = {}
        self._numbers = 0
        self._connected = False
        self._greeted = False
        self._carriers: tuple[tuple[MemberId, Network], ...] | None = None

    # ---- lines ----------------------------------------------------------------------------

    @property
    def lines(self) -> list[MemberId]:
        """Members that have a line, in rank order."""
        return sorted(self._lines)

    def open(self, member: MemberId) -> Introduce | None:
        """Add the line of a new process.

        Args:
            member: The rank.

        Returns:
            The message to send to it; None without a connection to a coordinator.
        """
        self._lines[member] = _Line()
        return self.anew(member)

    def anew(self, member: MemberId) -> Introduce | None:
        """Give a rank a new connection number, because messages on their way to it were lost.

        To the rank this looks like a new connection to the coordinator: it registers again.

        Args:
            member: The rank.

        Returns:
            The message to send to it; None if it has no line, or without a connection.
        """
        if not self._connected or member not in self._lines:
            return None
        self._numbers += 1
        before = self._lines[member]
        self._lines[member] = _Line(self._numbers, introduced=before.introduced)
        return Introduce(self._numbers)

    def close(self, member: MemberId) -> list[RankMessage | RankGone]:
        """Remove the line of a rank.

        Args:
            member: The rank.

        Returns:
            Messages to pass on: its last figures, if any, and `RankGone`. Empty if the coordinator
            does not know the rank.
        """
        line = self._lines.pop(member, None)
        if line is None or line.register is None:
            return []
        return [*([line.figures] if line.figures is not None else []), RankGone(member)]

    # ---- the connection -------------------------------------------------------------------

    def connect(self) -> list[tuple[MemberId, Introduce]]:
        """Note a new connection to a coordinator.

        The greeting follows when `awaits` is false, or after a timeout of the caller's.

        Returns:
            The message to send to each rank.
        """
        self._connected, self._greeted, self._carriers = True, False, None
        anew = ((member, self.anew(member)) for member in sorted(self._lines))
        return [(member, word) for member, word in anew if word is not None]

    @property
    def awaits(self) -> bool:
        """True while a rank that takes part has not registered for this connection."""
        return any(line.introduced and line.register is None for line in self._lines.values())

    def greet(self) -> tuple[Register, ...]:
        """Return the registrations received so far, for the greeting.

        Later ones are passed on as they come.

        Returns:
            One registration per rank, in rank order.
        """
        self._greeted = True
        lines = (line.register for _, line in sorted(self._lines.items()))
        return tuple(register for register in lines if register is not None)

    def disconnect(self) -> None:
        """Note that the connection has ended, and drop what was sent for it."""
        self._connected = False
        for member, line in self._lines.items():
            self._lines[member] = _Line(introduced=line.introduced)

    # ---- messages -------------------------------------------------------------------------

    def hear(self, member: MemberId, envelope: RankEnvelope) -> list[RankMessage]:
        """Process a message of a rank.

        Args:
            member: The rank on whose line it came.
            envelope: The message, with the connection number that it was sent for.

        Returns:
            Messages to pass on at once. Empty if the message is for another connection, or is kept
            for the greeting or for the next beat.

        Raises:
            ValueError: The message is in the name of another rank, or the rank has not registered.
        """
        message = envelope.message
        if message.member != member:
            raise ValueError(f"rank {member} sends in the name of {message.member}")
        line = self._lines.get(member)
        if line is None or not line.connection or envelope.connection != line.connection:
            return []
        if isinstance(message, Register):
            line.register, line.introduced = message, True
            return [message] if self._greeted else []
        if line.register is None:
            raise ValueError(f"rank {member} has not introduced itself")
        if isinstance(message, Heartbeat):
            line.beat = message
            return []
        if isinstance(message, RankFigures):
            line.figures = message
            return []
        if isinstance(message, Stopped | Saved) and line.figures is not None:
            # These figures may be the last ones. They must arrive before the end of the job.
            last, line.figures = line.figures, None
            return [last, message]
        return [message]

    def listeners(self, members: Iterable[MemberId]) -> list[MemberId]:
        """Return those of the given ranks that may receive messages of this coordinator.

        The others have to register first, and the coordinator repeats its request then.

        Args:
            members: Ranks that a message is addressed to.

        Returns:
            The registered ones, in the given order.
        """
        return [x for x in members if x in self._lines and self._lines[x].register is not None]

    def figures(self) -> list[RankFigures]:
        """Return the figures that have come since the last call, in rank order."""
        figures = []
        for _, line in sorted(self._lines.items()):
            if line.figures is not None:
                figures.append(line.figures)
                line.figures = None
        return figures

    def beat(self, carriers: tuple[tuple[MemberId, Network], ...] = ()) -> PodBeat:
        """Return the beat of the pod: a summary of all heartbeats since the last one.

        Args:
            carriers: Network that carries the data channel of each rank, as far as known.

        Returns:
            The ranks that were heard; promise, last GEN record and version that most of them share;
            and the heartbeats that contain news.
        """
        beats = {x: line.beat for x, line in sorted(self._lines.items()) if line.beat is not None}
        alike = Counter((beat.promise, beat.last) for beat in beats.values())
        common = max(alike, key=lambda pair: alike[pair], default=(NO_GENERATION, NO_GENERATION))
        changed, version = [], 0
        for member, beat in beats.items():
            line = self._lines[member]
            line.beat = None
            terse = self._terse(beat)
            if (beat.promise, beat.last) == common:
                version = max(version, beat.version)
                if line.reported is not None and _is_known(line.reported, terse):
                    continue
            line.reported = terse
            changed.append(terse)
        news, self._carriers = carriers != self._carriers, carriers
        return PodBeat(
            self._slot,
            self._attempt,
            heard=tuple((member.local, member.attempt) for member in beats),
            promise=common[0],
            last=common[1],
            version=version,
            changed=tuple(changed),
            carriers=carriers if news else None,
        )

    def _terse(self, beat: Heartbeat) -> Heartbeat:
        """Return the heartbeat without the time at work, unless that is long."""
        doing = beat.doing
        if doing is None or doing.for_ms > self._long_ms:
            return beat
        return replace(beat, doing=replace(doing, for_ms=0, round=-1))


def _is_known(known: Heartbeat, beat: Heartbeat) -> bool:
    """Return True if a heartbeat holds no news but promise, last record and version.

    Those are in the beat of the pod, once for all ranks.

    Args:
        known: The heartbeat that the coordinator knows.
        beat: The new heartbeat.

    Returns:
        True if it need not be listed.
    """
    return (
        _facts(known) == _facts(beat)
        and _alike(known.step_s, beat.step_s)
        and _alike(_usual_ms(known.doing), _usual_ms(beat.doing))
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
