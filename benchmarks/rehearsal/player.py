"""A process that plays many pods of a rehearsal, with all their ranks.

Its main thread executes the stage's orders. An event loop in a second thread runs the agents and
all connections to the coordinator. Each rank has a thread of its own.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from paceline.control.tls import pinned
from paceline.core.agent.exits import EndKind
from paceline_api.ids import MemberId

from benchmarks.rehearsal.meters import Summary
from benchmarks.rehearsal.pod import Job, Pod
from benchmarks.rehearsal.rank import RehearsedRank, Surroundings
from benchmarks.rehearsal.sums import LocalSums, Partial, Total

SWITCH_INTERVAL_S: Final = 0.1
"""Switch interval of the interpreter lock. A rank's thread seldom works for a millisecond; with the
default of 5 ms the waiting threads only wake each other."""
STRAGGLES_EVERY: Final = 16
"""One rank in this many is slow."""
SLOWNESS: Final = 4.0
"""Factor on the batch times of slow ranks, until the stage sets another."""


@dataclass(frozen=True)
class Part:
    """Share of the job's pods that one process plays, and how to reach the job."""

    index: int
    processes: int
    coordinator: str
    token: str
    certificate: Path
    own: tuple[Path, Path]
    """Certificate and key of the job's agents."""
    sockets: Path
    procs: int
    """Number of ranks of a pod."""
    step_s: float

    def plays(self, member: MemberId) -> bool:
        """Return True if this process plays the member."""
        return member.slot % self.processes == self.index


# ---- from the stage --------------------------------------------------------------------------


@dataclass(frozen=True)
class StartPod:
    """Order to start a pod."""

    slot: int
    attempt: int


@dataclass(frozen=True)
class EvictPod:
    """Order to evict a pod, as when its node is drained."""

    slot: int


@dataclass(frozen=True)
class Kill:
    """Order to kill a rank."""

    member: MemberId


@dataclass(frozen=True)
class Gone:
    """Notice that a member has died in some process: links to it break."""

    member: MemberId


@dataclass(frozen=True)
class Pace:
    """Order to change the length of batches."""

    step_s: float
    """Length of the batches from now on."""
    slowness: float
    """Factor on the batches of slow ranks."""


@dataclass(frozen=True)
class Report:
    """Order to report all measurements and end."""


Order = StartPod | EvictPod | Kill | Gone | Pace | Total | Report


# ---- to the stage ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Died:
    """Notice that a rank has died."""

    member: MemberId


@dataclass(frozen=True)
class PodEnded:
    """Notice that a pod has ended."""

    slot: int
    attempt: int
    end: EndKind
    message: str


Note = Partial | Died | PodEnded | Summary


class Player:
    """Runs the pods of one process and follows the stage's orders."""

    def __init__(self, stage: Connection[Note, Order], part: Part) -> None:
        self._stage, self._part = stage, part
        self._speaking = threading.Lock()
        self._pace = Pace(part.step_s, SLOWNESS)
        tls = pinned(part.certificate, part.own)
        assert tls is not None
        self._job = Job(part.coordinator, part.token, tls, part.procs)
        sums = LocalSums(self._say, part.plays)
        self._around = Surroundings(part.sockets, sums, self._batch_s)
        self._sums = sums
        self._pods: dict[int, Pod] = {}
        self._ranks: list[RehearsedRank] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agents", daemon=True)

    def play(self) -> None:
        """Execute orders until the stage asks for the report."""
        self._thread.start()
        while True:
            order = self._stage.recv()
            match order:
                case Total():
                    self._sums.complete(order)
                case Gone(member=member):
                    self._sums.lost(member)
                case StartPod():
                    self._loop.call_soon_threadsafe(self._start, order)
                case EvictPod(slot=slot):
                    self._loop.call_soon_threadsafe(self._pods[slot].evict)
                case Kill(member=member):
                    self._loop.call_soon_threadsafe(self._pods[member.slot].kill, member)
                case Pace():
                    self._pace = order
                case Report():
                    self._say(self._summary())
                    self._loop.call_soon_threadsafe(self._loop.stop)
                    self._thread.join()
                    return

    def _say(self, note: Note) -> None:
        """Send a note to the stage; any thread may call this."""
        with self._speaking:
            self._stage.send(note)

    def _batch_s(self, member: MemberId) -> float:
        """Return the length of the next batch of a member."""
        place = member.slot * self._part.procs + member.local
        slow = place % STRAGGLES_EVERY == STRAGGLES_EVERY // 2
        return self._pace.step_s * (self._pace.slowness if slow else 1.0)

    # ---- on the loop ----------------------------------------------------------------------

    def _start(self, order: StartPod) -> None:
        pod = self._pods[order.slot] = Pod(
            order.slot, order.attempt, self._job, self._around, born=self._born, died=self._died
        )
        task = self._loop.create_task(self._see_to_its_end(pod))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _see_to_its_end(self, pod: Pod) -> None:
        """Run a pod and report its end."""
        ended = await pod.run()
        self._say(PodEnded(pod.slot, pod.attempt, ended.end, ended.message))

    def _born(self, rank: RehearsedRank) -> None:
        self._ranks.append(rank)

    def _died(self, rank: RehearsedRank) -> None:
        if rank.exit is None:
            self._say(Died(rank.me))

    def _summary(self) -> Summary:
        summary = Summary()
        for rank in self._ranks:
            summary.add(rank.meter, first=rank.me.attempt == 0)
            summary.accounts.append(rank.account())
        return summary


def play(stage: Connection[Note, Order], part: Part) -> None:
    """Run a player process from its start to its end."""
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    assert "torch" not in sys.modules, "a rehearsal's processes must be small"
    gc.freeze()
    Player(stage, part).play()
