"""Simulated reductions: when they complete, and on which ranks they never do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.protocol.records import Gen
from paceline_api.ids import GenerationId, MemberId

from testing.simulation.sums import Sum, add

if TYPE_CHECKING:
    from testing.simulation.ranks import SimRank
    from testing.simulation.simulation import Simulation


class Reductions:
    """All reductions of a job.

    A reduction completes at a rank only after every member has joined it. Then it completes at each
    rank separately, and perhaps never if a member has left since.
    """

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.joined: dict[tuple[GenerationId, int, int], dict[MemberId, Sum]] = {}
        """Contributions by (generation, round, segment)."""
        self.never: dict[tuple[MemberId, int], GenerationId | None] = {}
        """(rank, round) -> first generation that tries the round, in which it does not complete
        there."""

    def join(self, rank: SimRank, gen: Gen, round_: int, segment: int, own: Sum) -> None:
        """Add a rank's contribution; the last one schedules the completion at all members."""
        joined = self.joined.setdefault((gen.id, round_, segment), {})
        assert rank.me not in joined, f"{rank.me} reduces segment {segment} of {round_} twice"
        joined[rank.me] = own
        for old in [k for k in self.joined if k[0] == gen.id and k[1] < round_ - 2]:
            del self.joined[old]
        if set(joined) != set(gen.members):
            return
        total: Sum = {}
        for share in joined.values():
            add(total, share)
        for member in gen.members:
            ms = self.sim.rng.uniform(0.1, 5.0)
            self.sim.after(ms, lambda x=member: self._complete(x, gen, round_, segment, total))  # type: ignore[misc]

    def _complete(self, member: MemberId, gen: Gen, round_: int, segment: int, total: Sum) -> None:
        if (member, round_) in self.never:
            first = self.never[member, round_] = self.never[member, round_] or gen.id
            if first == gen.id:
                return
        gone = [x for x in gen.members if not self._takes_part(x, gen.id)]
        if gone and self.sim.rng.random() < 0.5:
            return
        self.sim.ranks[member].complete(gen.id, round_, segment, total)

    def _takes_part(self, member: MemberId, generation: GenerationId) -> bool:
        rank = self.sim.ranks[member]
        return rank.alive and rank.state.promise <= generation

    def fail(self, lost: MemberId) -> None:
        """Abort at once on some peers of a lost rank; the others wait for the coordinator."""
        for rank in self.sim.ranks.values():
            group = rank.group
            if rank.reducing is None or group is None or lost not in group.gen.members:
                continue
            if self.sim.rng.random() < 0.5:
                ms = self.sim.rng.uniform(0.1, 30)
                self.sim.after(ms, lambda x=rank: x.abort("peer lost", aborted=False))  # type: ignore[misc]
