"""Messages on their way, and reductions: delays, order, what a death or a cut takes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct
from paceline.core import coordinator as coord
from paceline.core import messages as m
from paceline.core.protocol.ids import GenerationId, MemberId
from paceline.core.protocol.records import Gen
from paceline.core.rank import events as ev
from sim.sums import Sum, add
from sim.world import MS

if TYPE_CHECKING:
    from sim.ranks import SimRank
    from sim.simulation import Simulation


Gate = Callable[[tuple[object, ...], Struct, Callable[[], None]], bool]
"""(lane, message, what sends it on) -> whether it was taken away."""


class Links:
    """In order per pair of ends, with any delay; lost if an end is gone or cut off by then."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.last: dict[tuple[object, ...], int] = {}
        self.open: dict[tuple[MemberId, str], int] = {}
        """Connections of ranks to coordinators, by the number that tells old from new."""
        self.cut: set[MemberId] = set()
        self.gate: Gate | None = None
        """A script may hold or drop single messages."""

    def _send(
        self,
        lane: tuple[object, ...],
        message: Struct,
        action: Callable[[], None],
        ms: float = 0,
    ) -> None:
        if self.gate is None or not self.gate(lane, message, lambda: self._later(lane, action, ms)):
            self._later(lane, action, ms)

    def _later(self, lane: tuple[object, ...], action: Callable[[], None], ms: float = 0) -> None:
        low, high = self.sim.world.delay_ms
        due = self.sim.now + int((self.sim.rng.uniform(low, high) + ms) * MS)
        due = max(due, self.last.get(lane, 0) + 1)
        self.last[lane] = due
        self.sim.at(due, action)

    # ---- rank and rank --------------------------------------------------------------------

    def to_peer(self, src: MemberId, dst: MemberId, message: m.PeerMessage) -> None:
        self._send((src, dst), message, lambda: self._deliver(src, dst, message))

    def send_part(self, src: MemberId, dst: MemberId, part: m.Part, result: Sum | None) -> None:
        def arrive() -> None:
            self.sim.ranks[dst].part_result = result
            self._deliver(src, dst, part)

        self._send((src, dst), part, arrive)

    def send_state(
        self, src: MemberId, dst: MemberId, state: m.State, copied: tuple[Sum, Sum]
    ) -> None:
        def arrive() -> None:
            self.sim.ranks[dst].staged[state.generation] = copied
            self._deliver(src, dst, state)

        ms = self.sim.rng.uniform(0, self.sim.world.stream_ms)
        self._send((src, dst, "stream"), state, arrive, ms)

    def _deliver(self, src: MemberId, dst: MemberId, message: m.PeerMessage) -> None:
        rank = self.sim.ranks.get(dst)
        if rank is None or not rank.running:
            return
        if not isinstance(message, m.Start | m.Announce):
            self.sim.tell(f"{src} -> {dst}: {type(message).__name__}")
        rank.post(message)

    # ---- rank and coordinator -------------------------------------------------------------

    def connect(self, rank: SimRank, name: str) -> None:
        if name in self.sim.coordinators and rank.running and rank.me not in self.cut:
            self.sim.count += 1
            self.open[rank.me, name] = self.sim.count
            rank.post(ev.Connected())
        elif name in self.sim.coordinators and rank.released and rank.me not in self.cut:
            self.sim.count += 1
            self.open[rank.me, name] = self.sim.count
            self.to_coordinators(rank.me, rank.state.registration())

    def disconnect(self, member: MemberId, *, noticed: bool = True) -> None:
        for key in [k for k in self.open if k[0] == member]:
            del self.open[key]
            if noticed:
                self.sim.to_coordinators(coord.RankGone(member), key[1])

    def to_coordinators(self, src: MemberId, message: m.RankMessage) -> None:
        for (member, name), number in list(self.open.items()):
            if member == src:
                self._up(src, name, number, message)

    def _up(self, src: MemberId, name: str, number: int, message: m.RankMessage) -> None:
        def arrive() -> None:
            if self.open.get((src, name)) == number:
                self.sim.to_coordinators(coord.FromRank(message), name)

        self._send((src, name), message, arrive)

    def to_rank(self, name: str, dst: MemberId, message: m.ToRank | m.BeatEvery) -> None:
        number = self.open.get((dst, name))

        def arrive() -> None:
            rank = self.sim.ranks.get(dst)
            lost = number is None or self.open.get((dst, name)) != number
            if name not in self.sim.coordinators:  # its last words arrive or not
                lost = lost or self.sim.rng.random() < 0.5
            if rank is not None and rank.running and not lost:
                if isinstance(message, m.BeatEvery):
                    rank.told_to_beat_every(message.ms)
                    return
                self.sim.tell(f"{name} -> {dst}: {_short(message)}")
                rank.post(message)

        self._send((name, dst), message, arrive)


def _short(message: Struct) -> str:
    match message:
        case m.Prepare(id=id_):
            return f"Prepare {id_}"
        case m.CommitChange(id=id_, base=base):
            return f"Commit {id_} as a change of {base}"
        case m.Commit(gen=gen, joiners=joiners, behind=behind):
            extra = [f" joiners={list(map(str, joiners))}"] if joiners else []
            extra += [f" behind={[str(x) for x, _, _ in behind]}"] if behind else []
            return f"Commit {gen.id}{''.join(extra)}"
    return type(message).__name__


class Reductions:
    """A reduction can complete at a rank only after every member joined it; then at each rank
    by itself, and perhaps never where a member has gone since."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.joined: dict[tuple[GenerationId, int], dict[MemberId, Sum]] = {}
        self.never: dict[tuple[MemberId, int], GenerationId | None] = {}
        """(rank, round): does not complete there in the first generation that tries."""

    def join(self, rank: SimRank, gen: Gen, round_: int, own: Sum) -> None:
        joined = self.joined.setdefault((gen.id, round_), {})
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
            self.sim.after(ms, lambda x=member: self._complete(x, gen, round_, total))  # type: ignore[misc]

    def _complete(self, member: MemberId, gen: Gen, round_: int, total: Sum) -> None:
        if (member, round_) in self.never:
            first = self.never[member, round_] = self.never[member, round_] or gen.id
            if first == gen.id:
                return
        gone = [x for x in gen.members if not self._takes_part(x, gen.id)]
        if gone and self.sim.rng.random() < 0.5:
            return
        self.sim.ranks[member].complete(gen.id, round_, total)

    def _takes_part(self, member: MemberId, generation: GenerationId) -> bool:
        rank = self.sim.ranks[member]
        return rank.alive and rank.state.promise <= generation

    def fail(self, lost: MemberId) -> None:
        """Some peers see at once that a member is gone; the others wait for the coordinator."""
        for rank in self.sim.ranks.values():
            group = rank.group
            if rank.reducing is None or group is None or lost not in group.gen.members:
                continue
            if self.sim.rng.random() < 0.5:
                ms = self.sim.rng.uniform(0.1, 30)
                self.sim.after(ms, lambda x=rank: x.abort("peer lost", aborted=False))  # type: ignore[misc]
