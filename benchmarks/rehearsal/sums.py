"""The reductions of a rehearsal: each process adds up what its ranks bring, the stage the rest.

What matters to the protocol is as in a real one: it is complete on a rank only after all members
have joined it; a rank that has to promise a new generation leaves it at once; and of a member that
dies its neighbours hear, which are as many as a logarithm of the members.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from paceline.core.protocol.ids import GenerationId, MemberId
from paceline.core.rank.events import ChannelFailed, Reduced

Numbers = tuple[float, ...]
NONE: Numbers = (0.0, 0.0)
"""Samples, and the sum of their leases' numbers."""


def add(one: Numbers, other: Numbers, factor: float = 1.0) -> Numbers:
    return tuple(x + y * factor for x, y in zip(one, other, strict=True))


@dataclass(frozen=True)
class Partial:
    """What the members that live in one process have brought to a round."""

    generation: GenerationId
    round: int
    members: int
    """Of the generation."""
    joined: int
    """Of them in this process."""
    numbers: Numbers


@dataclass(frozen=True)
class Total:
    generation: GenerationId
    round: int
    numbers: Numbers


class Seat:
    """One rank in one reduction. The first answer counts."""

    def __init__(self, me: MemberId, brought: Numbers) -> None:
        self.me, self.brought = me, brought
        self.result: Numbers = NONE
        self._answer: Reduced | ChannelFailed | None = None
        self._answered = threading.Event()

    def wait(self) -> Reduced | ChannelFailed:
        self._answered.wait()
        assert self._answer is not None
        return self._answer

    def complete(self, total: Numbers) -> None:
        if self._answer is None:
            self.result = total
            self._give(Reduced())

    def fail(self, why: str, lost: MemberId | None = None) -> None:
        """`lost`: the member behind the broken link; None if an order ended it."""
        if self._answer is None:
            self._give(ChannelFailed(why, lost, aborted=lost is None))

    def _give(self, answer: Reduced | ChannelFailed) -> None:
        self._answer = answer
        self._answered.set()


@dataclass
class _Round:
    members: tuple[MemberId, ...]
    here: int
    """Members that live in this process."""
    seats: list[Seat] = field(default_factory=list)


class LocalSums:
    """Of the ranks of this process. `send` takes what they brought to the stage."""

    def __init__(self, send: Callable[[Partial], None], is_here: Callable[[MemberId], bool]):
        self._send, self._is_here = send, is_here
        self._lock = threading.Lock()
        self._rounds: dict[tuple[GenerationId, int], _Round] = {}

    def join(
        self, seat: Seat, generation: GenerationId, round_: int, members: tuple[MemberId, ...]
    ) -> None:
        key = generation, round_
        with self._lock:
            for old in [k for k in self._rounds if k < key]:
                del self._rounds[old]
            if key not in self._rounds:
                self._rounds[key] = _Round(members, sum(map(self._is_here, members)))
            joined = self._rounds[key]
            joined.seats.append(seat)
            if len(joined.seats) < joined.here:
                return
        numbers = NONE
        for each in joined.seats:
            numbers = add(numbers, each.brought)
        self._send(Partial(generation, round_, len(members), joined.here, numbers))

    def complete(self, total: Total) -> None:
        with self._lock:
            joined = self._rounds.pop((total.generation, total.round), None)
        for seat in joined.seats if joined else ():
            seat.complete(total.numbers)

    def lost(self, member: MemberId) -> None:
        """Whoever has a link to it sees that it broke."""
        with self._lock:
            waiting = [r for r in self._rounds.values() if member in r.members]
        for joined in waiting:
            linked = set(_linked(joined.members, member))
            for seat in list(joined.seats):
                if seat.me in linked:
                    seat.fail(f"the link to rank {member} broke", member)


def _linked(members: tuple[MemberId, ...], to: MemberId) -> Iterable[MemberId]:
    """As recursive doubling links them: at distances 1, 2, 4 and so on."""
    place, step = members.index(to), 1
    while step < len(members):
        yield members[(place + step) % len(members)]
        yield members[(place - step) % len(members)]
        step *= 2


class WholeSums:
    """On the stage: adds up what the processes send. `send` takes the total to all of them."""

    def __init__(self, send: Callable[[Total], None]) -> None:
        self._send = send
        self._rounds: dict[tuple[GenerationId, int], tuple[int, Numbers]] = {}

    def take(self, partial: Partial) -> None:
        key = partial.generation, partial.round
        for old in [k for k in self._rounds if k < key]:
            del self._rounds[old]
        joined, numbers = self._rounds.get(key, (0, NONE))
        joined, numbers = joined + partial.joined, add(numbers, partial.numbers)
        self._rounds[key] = joined, numbers
        if joined == partial.members:
            del self._rounds[key]
            self._send(Total(partial.generation, partial.round, numbers))
