"""The checkpoint folder that all ranks of a simulated job share: slow, and sometimes full.

A checkpoint is a copy of a rank's weights with its log. All ranks see it once it is published.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.protocol.snapshot import Kept, LogSnapshot
from paceline.core.rank import events as ev

from testing.simulation.sums import Sum

if TYPE_CHECKING:
    from testing.simulation.ranks import SimRank
    from testing.simulation.simulation import Simulation


@dataclass(frozen=True)
class Copy:
    """One checkpoint."""

    log: LogSnapshot
    finished: bool
    weights: Sum
    accumulated: Sum

    @property
    def kept(self) -> Kept:
        """Identity of the checkpoint, as a rank reports it."""
        log = self.log
        return Kept(log.gen.id, log.version, log.digest, log.request, self.finished)


class Disk:
    """The shared folder; it keeps the last two published checkpoints."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.published: list[Copy] = []
        self.written: dict[SimRank, Copy] = {}

    def look(self) -> ev.CheckpointFound:
        """Return the newest checkpoint, as a rank would find it now."""
        return ev.CheckpointFound(self.published[-1].kept if self.published else None)

    def save(self, rank: SimRank, order: ev.Save) -> None:
        """Copy a rank's state, and post Written to the rank after a delay."""
        copy = Copy(order.log, order.finished, rank.weights, rank.accumulated)
        problem = "no space left" if self._is_full() else ""
        if not problem:
            self.written[rank] = copy
        self._answer(rank, ev.Written(order.log.version, problem))

    def publish(self, rank: SimRank, order: ev.Publish) -> None:
        """Publish the copy that a rank wrote, and post Published to it after a delay."""
        problem = "no space left" if self._is_full() else ""
        copy = self.written.pop(rank)
        if not problem:
            self.sim.checkers.published(rank, copy)
            self.sim.tell(f"checkpoint {order.version} of {rank.me}")
            self.published = [c for c in self.published if c.log.version < order.version]
            self.published = [*self.published, copy][-2:]
        self._answer(rank, ev.Published(order.version, problem))

    def drop(self, rank: SimRank) -> None:
        """Discard the copy that a rank wrote and did not publish."""
        self.written.pop(rank, None)

    def load(self, rank: SimRank, kept: Kept) -> ev.Restored:
        """Restore a published checkpoint into a rank."""
        (copy,) = [c for c in self.published if c.kept == kept]
        rank.weights, rank.accumulated = copy.weights, copy.accumulated
        self.sim.tell(f"{rank.me} restores checkpoint {copy.log.version}")
        return ev.Restored(copy.log)

    def _is_full(self) -> bool:
        return self.sim.rng.random() < self.sim.world.disk_full

    def _answer(self, rank: SimRank, answer: ev.Written | ev.Published) -> None:
        ms = self.sim.rng.uniform(0.1, self.sim.world.disk_ms)
        self.sim.after(ms, lambda: rank.post(answer))
