"""Who holds which lease: dealt from the log alone, so that no rank needs a message about it (R14).

A lease is the samples of one optimizer step of one rank. It is in exactly one place: not dealt yet,
returned to the pool, held by one active rank, or gone (applied or dropped).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final

from paceline.core.protocol.ids import MemberId
from paceline.core.protocol.records import DataPlan
from paceline.core.protocol.sampling import total_leases

DEPTH: Final = 2
"""D of R14: one lease in hand, the next one ready; more where a loader prefetches (D1)."""


class DealError(AssertionError):
    """A lease is not where the log says that it is (I2)."""


@dataclass(slots=True)
class Deal:
    next: int = 0
    """First lease that was never dealt."""
    pool: list[int] = field(default_factory=list)
    """Returned leases, as a heap: the lowest one is dealt first, before new ones."""
    held: dict[MemberId, list[int]] = field(default_factory=dict)
    lookahead: dict[MemberId, int] = field(default_factory=dict)
    count: int = field(init=False)
    """Leases that are held."""
    short: set[MemberId] = field(init=False)
    """Whom to look at when leases are dealt: others hold as many as they may."""

    def __post_init__(self) -> None:
        self.count = sum(map(len, self.held.values()))
        self.short = set(self.held)
        heapify(self.pool)

    def held_by(self, member: MemberId) -> tuple[int, ...]:
        return tuple(self.held.get(member, ()))

    def all_held(self) -> tuple[tuple[MemberId, tuple[int, ...]], ...]:
        return tuple((m, tuple(leases)) for m, leases in sorted(self.held.items()) if leases)

    def holders(self) -> tuple[MemberId, ...]:
        return tuple(sorted(self.held))

    def exhausted(self, plan: DataPlan, but_for: int = 0) -> bool:
        """Every lease of the last epoch is gone, `but_for` of the held ones counted as gone."""
        return self.next >= total_leases(plan) and not self.pool and self.count == but_for

    def first_of(self, members: Iterable[MemberId]) -> list[int]:
        """The oldest lease of each of them."""
        held = self.held
        try:
            return [held[m][0] for m in members]
        except LookupError:
            without = [str(m) for m in members if not held.get(m)]
            raise DealError(f"no lease is held by {without}: {self.all_held()}") from None

    def remove_first_of(self, members: Sequence[MemberId]) -> None:
        """What `first_of` names was applied."""
        held = self.held
        for member in members:
            del held[member][0]
        self.count -= len(members)
        self.short.update(members)

    def remove(self, member: MemberId, lease: int) -> None:
        """Applied or dropped by the rank that holds it."""
        if lease not in self.held.get(member, ()):
            raise DealError(f"lease {lease} is not held by {member}: {self.all_held()}")
        self.held[member].remove(lease)
        self.count -= 1
        self.short.add(member)

    def give_back(self, member: MemberId, leases: Iterable[int]) -> None:
        """Untouched leases return to the pool."""
        for lease in leases:
            self.remove(member, lease)
            heappush(self.pool, lease)

    def take_back(self, member: MemberId, leases: Sequence[int] | None = None) -> tuple[int, ...]:
        """Take `leases`, or all, from a rank that was benched or has departed; what was taken."""
        own = self.held.get(member, [])
        taken = tuple(own) if leases is None else tuple(x for x in own if x in leases)
        self.give_back(member, taken)
        if leases is None:
            self.held.pop(member, None)
        return taken

    def enlist(self, members: Iterable[MemberId]) -> None:
        """They may hold leases from now on, or others than before."""
        self.short.update(members)

    def refill(
        self, plan: DataPlan, places: Mapping[MemberId, int], resting: Collection[MemberId] = ()
    ) -> None:
        """Deal round robin in rank order until everybody holds its depth or nothing is left.

        `places`: of those who take part, in rank order; the resting ones take nothing."""
        total = total_leases(plan)
        if not self.pool and self.next >= total:
            return
        held, depth = self.held, self.lookahead
        takers = [m for m in self.short if m in places and m not in resting]
        # Who rests or is not active is looked at again when that has changed.
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
        """The next leases: returned ones, then new ones, as far as there are any."""
        pool = self.pool
        leases = [heappop(pool) for _ in range(min(most, len(pool)))] if pool else []
        new = range(self.next, min(self.next + most - len(leases), total))
        self.next += len(new)
        leases += new
        return leases
