"""Events in the job of a rehearsal, from the first registration to the last release."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Final

from paceline.clock import now_ns
from paceline_api.ids import ATTEMPT_STRIDE, MemberId
from paceline_api.status import MembershipChange
from paceline_api.times import NS_PER_S

from benchmarks.rehearsal.meters import Summary
from benchmarks.rehearsal.stage import PROCS, Sample, Stage

log = logging.getLogger("rehearsal")

NODE_SHARE: Final = 16
"""The drained node holds one in this many pods: 8 of 128 at 1,024 ranks."""


@dataclass
class Stretch:
    """A span of time in which only one thing happened."""

    begin: Sample
    end: Sample
    first_round: int
    last_round: int

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return (self.end.at_ns - self.begin.at_ns) / NS_PER_S

    @property
    def coordinator_cores(self) -> float:
        """Mean number of cores that the coordinator used."""
        return (self.end.cpu_s - self.begin.cpu_s) / self.seconds

    @property
    def players_cores(self) -> float:
        """Mean number of cores that all players used."""
        return (self.end.players_s - self.begin.players_s) / self.seconds

    @property
    def received_per_s(self) -> float:
        """Bytes per second into the coordinator."""
        return (self.end.traffic.received - self.begin.traffic.received) / self.seconds

    @property
    def sent_per_s(self) -> float:
        """Bytes per second out of the coordinator."""
        return (self.end.traffic.sent - self.begin.traffic.sent) / self.seconds


@dataclass
class Played:
    """All results of a rehearsal."""

    ranks: int
    pods: int
    stretches: dict[str, Stretch] = field(default_factory=dict)
    took_s: dict[str, float] = field(default_factory=dict)
    """Time from each event until all ranks were active again, as the status shows it."""
    changes: list[MembershipChange] = field(default_factory=list)
    summary: Summary = field(default_factory=Summary)
    memory: int = 0
    """Peak memory of any coordinator, in bytes."""


class Scenario:
    """Sequence of events that a rehearsal plays."""

    def __init__(self, stage: Stage, *, rounds: int, quiet_s: float) -> None:
        """Prepare the scenario.

        Args:
            stage: The stage to play on.
            rounds: Number of rounds between two events.
            quiet_s: Seconds of heartbeats alone.
        """
        self._stage, self._rounds, self._quiet_s = stage, rounds, quiet_s
        self._played = Played(stage.ranks, len(stage.pods))

    def play(self) -> Played:
        """Play all events until the job has ended and return what was measured."""
        self._begin()
        self._steady("rounds")
        self._heartbeats_alone()
        self._death()
        self._node()
        self._coordinator()
        self._steady("after all")
        return self._end()

    def _begin(self) -> None:
        begun_ns = now_ns()
        self._stage.start_pods()
        self._stage.until_active(self._stage.ranks)
        self._took("start", begun_ns)
        self._stage.until_round(self._stage.version + 3)  # the first rounds make the connections

    def _steady(self, name: str) -> None:
        """Let rounds with stragglers run, and nothing else."""
        begin, first = self._stage.sample(), self._stage.version
        self._stage.until_round(first + self._rounds)
        last = self._stage.version
        log.info("%s: %d", name, last - first)
        self._played.stretches[name] = Stretch(begin, self._stage.sample(), first, last)

    def _heartbeats_alone(self) -> None:
        """Measure heartbeats while all scripts are in a long batch.

        So the machine has time for what is measured.
        """
        version = self._stage.version
        self._stage.all_compute(self._quiet_s)
        time.sleep(0.4 * self._quiet_s)
        begin = self._stage.sample()
        time.sleep(0.5 * self._quiet_s)
        self._played.stretches["heartbeats"] = Stretch(
            begin, self._stage.sample(), version, version
        )
        self._stage.as_before()
        self._stage.until_round(version + 3)

    def _death(self) -> None:
        """Kill one rank; its agent starts another one, which joins."""
        self._stage.until_active(self._stage.ranks)
        victim = self._stage.active()[self._stage.ranks // 2]
        follower = MemberId(victim.slot, victim.local, victim.attempt + 1)
        begun_ns = now_ns()
        self._stage.kill(victim)
        self._stage.until(f"rank {follower}", lambda: follower in self._stage.active())
        self._everybody("death", begun_ns)

    def _node(self) -> None:
        """Evict all pods of a node; others take their places."""
        slots = sorted(self._stage.pods)[1:]
        slots = slots[: max(1, len(self._stage.pods) // NODE_SHARE)]
        begun_ns = now_ns()
        self._stage.evict(slots)
        self._stage.until(
            f"the end of pods {slots}", lambda: len(self._stage.ended(slots)) == len(slots)
        )
        self._took(f"drain of {len(slots)} x {PROCS}", begun_ns)
        begun_ns = now_ns()
        for slot in slots:
            self._stage.replace(slot)
        new = MemberId(slots[-1], PROCS - 1, ATTEMPT_STRIDE * self._stage.pods[slots[-1]])
        self._stage.until(f"rank {new}", lambda: new in self._stage.active())
        self._everybody(f"join of {len(slots)} x {PROCS}", begun_ns)

    def _coordinator(self) -> None:
        """Kill the coordinator and start it again.

        It learns everything from the registrations (R1).
        """
        self._keep()
        begun_ns = now_ns()
        self._stage.sample()
        self._stage.kill_coordinator()
        old = self._stage.status
        assert old is not None
        self._stage.start_coordinator()
        self._stage.send_inventory()
        self._stage.until(
            "the new coordinator",
            lambda: (
                self._stage.status is not None and self._stage.status.coordinator != old.coordinator
            ),
        )
        self._everybody("new coordinator", begun_ns)

    def _end(self) -> Played:
        self._stage.sample()
        self._stage.stop_job()
        pods = list(self._stage.pods)
        self._stage.until("the end of all pods", lambda: len(self._stage.ended(pods)) == len(pods))
        self._keep()
        self._played.summary = self._stage.collect()
        self._played.memory = max(sample.memory for sample in self._stage.samples)
        self._stage.acknowledge()
        return self._played

    def _everybody(self, what: str, begun_ns: int) -> None:
        """Wait until all ranks are active, record how long that took, and run some rounds."""
        self._stage.until_active(self._stage.ranks)
        self._took(what, begun_ns)
        self._stage.until_round(self._stage.version + self._rounds // 2)

    def _took(self, what: str, begun_ns: int) -> None:
        """Record the time since an event began."""
        self._played.took_s[what] = (now_ns() - begun_ns) / NS_PER_S
        log.info("%s: %.1f s", what, self._played.took_s[what])

    def _keep(self) -> None:
        """Keep the changes that a coordinator reports; the next one does not know them."""
        assert self._stage.status is not None
        self._played.changes += self._stage.status.changes
