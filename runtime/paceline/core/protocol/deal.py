"""Deal the leases from the log alone, so that no rank needs a message about them (R14).

A lease is the samples of one optimizer step of one rank. Each lease is in exactly one place: not
dealt yet, returned to the pool, held by one active rank, or gone (applied or dropped).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final

from paceline_api.ids import MemberId

from paceline.core.protocol.records import DataPlan
from paceline.core.protocol.sampling import total_leases

DEPTH: Final = 2
"""Default number of leases that a rank holds: one in hand and the next one ready (D of R14). A rank
whose loader prefetches may hold more (D1)."""


class DealError(AssertionError):
    """Raised if a lease is not where the log puts it (I2)."""


@dataclass(slots=True)
class Deal:
    """Place of each lease: a part of the log's state."""

    next: int = 0
    """Lowest lease that was never dealt."""
    pool: list[int] = field(default_factory=list)
    """Returned leases, as a heap. The lowest one is dealt first, before new ones."""
    held: dict[MemberId, list[int]] = field(default_factory=dict)
    """Leases of each rank, in the order in which they were dealt."""
    lookahead: dict[MemberId, int] = field(default_factory=dict)
    """Number of leases that each rank may hold; `DEPTH` where it is not given."""
    count: int = field(init=False)
    """Number of leases that are held, by all ranks together."""
    short: set[MemberId] = field(init=False)
    """Ranks that may hold fewer leases than they are allowed; `refill` looks only at these."""

    def __post_init__(self) -> None:
        self.count = sum(map(len, self.held.values()))
        self.short = set(self.held)
        heapify(self.pool)

    def held_by(self, member: MemberId) -> tuple[int, ...]:
        """Return the leases that `member` holds, in the order in which they were dealt."""
        return tuple(self.held.get(member, ()))

    def all_held(self) -> tuple[tuple[MemberId, tuple[int, ...]], ...]:
        """Return the ranks that hold leases, in rank order, each with its leases."""
        return tuple((m, tuple(leases)) for m, leases in sorted(self.held.items()) if leases)

    def holders(self) -> tuple[MemberId, ...]:
        """Return the ranks that hold or have held leases and were not taken out, in rank order."""
        return tuple(sorted(self.held))

    def exhausted(self, plan: DataPlan, but_for: int = 0) -> bool:
        """Return True if every lease of the plan is gone.

        Args:
            plan: What is dealt.
            but_for: Number of held leases that count as gone.

        Returns:
            True if nothing is left to deal, and no other lease is held.
        """
        return self.next >= total_leases(plan) and not self.pool and self.count == but_for

    def first_of(self, members: Iterable[MemberId]) -> list[int]:
        """Return the oldest lease of each rank.

        Args:
            members: Ranks that hold at least one lease each.

        Returns:
            One lease for each of `members`, in their order.

        Raises:
            DealError: If one of them holds no lease.
        """
        held = self.held
        try:
            return [held[m][0] for m in members]
        except LookupError:
            without = [str(m) for m in members if not held.get(m)]
            raise DealError(f"no lease is held by {without}: {self.all_held()}") from None

    def remove_first_of(self, members: Sequence[MemberId]) -> None:
        """Remove the oldest lease of each rank, because it was applied."""
        held = self.held
        for member in members:
            del held[member][0]
        self.count -= len(members)
        self.short.update(members)

    def remove(self, member: MemberId, lease: int) -> None:
        """Remove a lease that its holder has applied or dropped; DealError if it is not held."""
        if lease not in self.held.get(member, ()):
            raise DealError(f"lease {lease} is not held by {member}: {self.all_held()}")
        self.held[member].remove(lease)
        self.count -= 1
        self.short.add(member)

    def give_back(self, member: MemberId, leases: Iterable[int]) -> None:
        """Return untouched leases of a rank to the pool."""
        for lease in leases:
            self.remove(member, lease)
            heappush(self.pool, lease)

    def take_back(self, member: MemberId, leases: Sequence[int] | None = None) -> tuple[int, ...]:
        """Take leases from a rank that was benched or has departed, and return them to the pool.

        Args:
            member: Rank that held the leases.
            leases: Leases to take if the rank holds them. None takes all and forgets the rank.

        Returns:
            The leases that were taken.
        """
        own = self.held.get(member, [])
        taken = tuple(own) if leases is None else tuple(x for x in own if x in leases)
        self.give_back(member, taken)
        if leases is None:
            self.held.pop(member, None)
        return taken

    def enlist(self, members: Iterable[MemberId]) -> None:
        """Let `refill` look at these ranks: they may hold leases now, or another number."""
        self.short.update(members)

    def refill(
        self, plan: DataPlan, places: Mapping[MemberId, int], resting: Collection[MemberId] = ()
    ) -> None:
        """Deal round robin in rank order until each rank holds its depth or no lease is left.

        Args:
            plan: What is dealt.
            places: Position of each active rank in rank order.
            resting: Ranks that take no leases.
        """
        total = total_leases(plan)
        if not self.pool and self.next >= total:
            return
        held, depth = self.held, self.lookahead
        takers = [m for m in self.short if m in places and m not in resting]
        # Resting ranks are looked at again next time. Others come back through `enlist`.
        self.short.intersection_update(resting)
        takers.sort(key=places.__getitem__)
        while takers:
            takers = [m for m in takers if len(held.get(m, ())) < depth.get(m, DEPTH)]
            leases = self._draw(len(takers), total)
            for member, lease in zip(takers, leases, strict=False):
                held.setdefault(member, []).append(lease)
            self.count += len(leases)
            if len(leases) < len(takers):
                self.short.update(takers)
                return

    def _draw(self, most: int, total: int) -> list[int]:
        """Take the next leases, at most `most`: returned ones first, then new ones."""
        pool = self.pool
        leases = [heappop(pool) for _ in range(min(most, len(pool)))] if pool else []
        new = range(self.next, min(self.next + most - len(leases), total))
        self.next += len(new)
        leases += new
        return leases
