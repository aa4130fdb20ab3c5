"""Who holds which lease: dealt from the log alone, so that no rank needs a message about it (R14).

A lease is the samples of one optimizer step of one rank. It is in exactly one place: not dealt yet,
returned to the pool, held by one active rank, or gone (applied or dropped).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
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
    """Returned leases; dealt before new ones."""
    held: dict[MemberId, list[int]] = field(default_factory=dict)
    lookahead: dict[MemberId, int] = field(default_factory=dict)

    def held_by(self, member: MemberId) -> tuple[int, ...]:
        return tuple(self.held.get(member, ()))

    def all_held(self) -> tuple[tuple[MemberId, tuple[int, ...]], ...]:
        return tuple((m, tuple(leases)) for m, leases in sorted(self.held.items()) if leases)

    def holders(self) -> tuple[MemberId, ...]:
        return tuple(sorted(self.held))

    def exhausted(self, plan: DataPlan, but_for: Collection[int] = ()) -> bool:
        """Every lease of the last epoch is gone, those of `but_for` counted as gone."""
        return (
            self.next >= total_leases(plan)
            and not self.pool
            and all(lease in but_for for leases in self.held.values() for lease in leases)
        )

    def remove(self, member: MemberId, lease: int) -> None:
        """Applied or dropped by the rank that holds it."""
        if lease not in self.held.get(member, ()):
            raise DealError(f"lease {lease} is not held by {member}: {self.all_held()}")
        self.held[member].remove(lease)

    def give_back(self, member: MemberId, leases: Iterable[int]) -> None:
        """Untouched leases return to the front of the pool."""
        for lease in leases:
            self.remove(member, lease)
            self.pool.append(lease)
        self.pool.sort()

    def take_back(self, member: MemberId, leases: Sequence[int] | None = None) -> tuple[int, ...]:
        """Take `leases`, or all, from a rank that was benched or has departed; what was taken."""
        if leases is None:
            taken = tuple(self.held.pop(member, ()))
        else:
            taken = tuple(x for x in self.held.get(member, ()) if x in leases)
            self.held[member] = [x for x in self.held.get(member, ()) if x not in leases]
        self.pool = sorted([*self.pool, *taken])
        return taken

    def refill(self, plan: DataPlan, takers: Sequence[MemberId]) -> None:
        """Deal round robin in rank order until everybody holds its depth or nothing is left."""
        total = total_leases(plan)
        dealt = True
        while dealt and (self.pool or self.next < total):
            dealt = False
            for member in takers:
                own = self.held.setdefault(member, [])
                if len(own) >= self.lookahead.get(member, DEPTH):
                    continue
                if self.pool:
                    own.append(self.pool.pop(0))
                elif self.next < total:
                    own.append(self.next)
                    self.next += 1
                else:
                    continue
                dealt = True
