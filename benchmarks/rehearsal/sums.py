"""Reductions of a rehearsal: each process sums what its ranks contribute, the stage sums the rest.

What matters to the protocol is as in a real reduction. It completes on a rank only after all
members have joined it. A rank that has to promise a new generation leaves it at once. If a member
dies, only its neighbors notice, which are as many as a logarithm of the members.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from paceline.core.rank.events import ChannelFailed, Reduced
from paceline_api.ids import GenerationId, MemberId

Numbers = tuple[float, ...]
NONE: Numbers = (0.0, 0.0)
"""Empty contribution: number of samples, and the sum of their leases' numbers."""


def add(one: Numbers, other: Numbers, factor: float = 1.0) -> Numbers:
    """Return `one + factor * other`, element by element."""
    return tuple(x + y * factor for x, y in zip(one, other, strict=True))


@dataclass(frozen=True)
class Partial:
    """Contribution to a round of the members that live in one process."""

    generation: GenerationId
    round: int
    members: int
    """Number of members of the generation."""
    joined: int
    """Number of them in this process."""
    numbers: Numbers


@dataclass(frozen=True)
class Total:
    """Complete sum of a round."""

    generation: GenerationId
    round: int
    numbers: Numbers


class Seat:
    """One rank in one reduction. The first answer counts; later ones are ignored."""

    def __init__(self, me: MemberId, brought: Numbers) -> None:
        self.me, self.brought = me, brought
        self.result: Numbers = NONE
        self._answer: Reduced | ChannelFailed | None = None
        self._answered = threading.Event()

    def wait(self) -> Reduced | ChannelFailed:
        """Block until the reduction completes or fails, and return which."""
        self._answered.wait()
        assert self._answer is not None
        return self._answer

    def complete(self, total: Numbers) -> None:
        """Complete the reduction with the total."""
        if self._answer is None:
            self.result = total
            self._give(Reduced())

    def fail(self, why: str, lost: MemberId | None = None) -> None:
        """Let the reduction fail.

        `lost` is the member behind the broken link, or None if an order aborted the reduction.
        """
        if self._answer is None:
            self._give(ChannelFailed(why, lost, aborted=lost is None))

    def _give(self, answer: Reduced | ChannelFailed) -> None:
        self._answer = answer
        self._answered.set()


@dataclass
class _Round:
    members: tuple[MemberId, ...]
    here: int
    """Number of members that live in this process."""
    seats: list[Seat] = field(default_factory=list)


class LocalSums:
    """Sums of the ranks of this process; `send` passes their contribution to the stage."""

    def __init__(self, send: Callable[[Partial], None], is_here: Callable[[MemberId], bool]):
        self._send, self._is_here = send, is_here
        self._lock = threading.Lock()
        self._rounds: dict[tuple[GenerationId, int], _Round] = {}

    def join(
        self, seat: Seat, generation: GenerationId, round_: int, members: tuple[MemberId, ...]
    ) -> None:
        """Join a reduction; the last local member to join sends the process's contribution.

        Args:
            seat: The rank's contribution, which gets the answer.
            generation: Generation of the round.
            round_: Number of the round. Older rounds are forgotten.
            members: Members of the generation.
        """
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
        """Give the total to all local members of its round."""
        with self._lock:
            joined = self._rounds.pop((total.generation, total.round), None)
        for seat in joined.seats if joined else ():
            seat.complete(total.numbers)

    def lost(self, member: MemberId) -> None:
        """Fail the reduction on each local rank that has a link to the dead member."""
        with self._lock:
            waiting = [r for r in self._rounds.values() if member in r.members]
        for joined in waiting:
            linked = set(_linked(joined.members, member))
            for seat in list(joined.seats):
                if seat.me in linked:
                    seat.fail(f"the link to rank {member} broke", member)


def _linked(members: tuple[MemberId, ...], to: MemberId) -> Iterable[MemberId]:
    """Yield the members that recursive doubling links: at distances 1, 2, 4 and so on."""
    place, step = members.index(to), 1
    while step < len(members):
        yield members[(place + step) % len(members)]
        yield members[(place - step) % len(members)]
        step *= 2


class WholeSums:
    """Sums of all processes, on the stage; `send` passes a total to all of them."""

    def __init__(self, send: Callable[[Total], None]) -> None:
        self._send = send
        self._rounds: dict[tuple[GenerationId, int], tuple[int, Numbers]] = {}

    def take(self, partial: Partial) -> None:
        """Add a process's contribution; the last one of a round sends the total."""
        key = partial.generation, partial.round
        for old in [k for k in self._rounds if k < key]:
            del self._rounds[old]
        joined, numbers = self._rounds.get(key, (0, NONE))
        joined, numbers = joined + partial.joined, add(numbers, partial.numbers)
        self._rounds[key] = joined, numbers
        if joined == partial.members:
            del self._rounds[key]
            self._send(Total(partial.generation, partial.round, numbers))
