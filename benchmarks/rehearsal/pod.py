"""One pod of a rehearsal: the agent's real decisions, over ranks that are threads.

As `paceline.agent.supervisor` does with processes, it starts, drains and ends the ranks of its pod,
and tells the coordinator which have died. Lives on the event loop of its process.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, assert_never

from paceline.agent.coordinator_client import FAREWELL_S
from paceline.agent.coordinator_client import PACE as AGENT_PACE
from paceline.clock import NS_PER_S, now_ns
from paceline.control.client import ControlClient
from paceline.core import wire
from paceline.core.agent import supervise
from paceline.core.agent.exits import Ended, RankOutcome
from paceline.core.messages import (
    AgentBeat,
    AgentDone,
    AgentHello,
    Closing,
    Dismiss,
    DrainPod,
    KillRank,
    RankMessage,
    Shutdown,
    ToAgent,
    ToRank,
)
from paceline.core.protocol.ids import MemberId
from paceline.core.rank import events as ev
from paceline.worker.coordinator_client import PACE as RANK_PACE

from benchmarks.rehearsal.rank import RehearsedRank, Surroundings

LIMITS: Final = supervise.Limits(restarts_max=6, drain_ns=600 * NS_PER_S)
"""A drain of many ranks takes its time on two cores; nobody is to be killed for that."""
PATIENCE_S: Final = 120.0
"""For the answer to a ping. Where hundreds of ranks share a core, a connection without one is
slow, not dead."""
SIGKILL: Final = -9


@dataclass(frozen=True)
class Job:
    """What the operator's Secret and environment tell to a pod."""

    coordinator: str
    token: str
    tls: ssl.SSLContext
    procs: int


class RankLink:
    """A rank's connection to the coordinator, on the loop of its process (the product gives it a
    thread of its own)."""

    def __init__(self, job: Job, rank: RehearsedRank, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._client: ControlClient[ToRank] = ControlClient(
            (job.coordinator,),
            "/v1/ranks",
            job.token,
            pace=replace(RANK_PACE, ping_s=PATIENCE_S),
            greet=rank.machine.state.registration,
            beat=rank.heartbeat,
            decode=wire.message_to_rank,
            obey=rank.obey,
            keeps=False,
            connected=partial(_connected, rank),
            tls=job.tls,
        )
        self._task = loop.create_task(self._client.run())

    def send(self, message: RankMessage) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._client.send, message)

    def close(self, *, killed: bool) -> None:
        """On the loop. A killed rank says nothing more; another one says it to the end."""
        if killed or not self._client.connected:
            self._task.cancel()
        else:
            self._client.leave()

    async def closed(self) -> None:
        await asyncio.wait([self._task])


def _connected(rank: RehearsedRank) -> None:
    rank.meter.registered_ns = rank.meter.registered_ns or now_ns()
    rank.post(ev.Connected())


@dataclass
class _Slot:
    place: supervise.Place
    rank: RehearsedRank | None = None
    link: RankLink | None = None
    timer: asyncio.TimerHandle | None = None


class Pod:
    def __init__(
        self,
        slot: int,
        attempt: int,
        job: Job,
        around: Surroundings,
        *,
        born: Callable[[RehearsedRank], None],
        died: Callable[[RehearsedRank], None],
    ) -> None:
        """`born` and `died` hear of every rank."""
        self.slot, self.attempt = slot, attempt
        self._job, self._around, self._born, self._died = job, around, born, died
        self._loop = asyncio.get_running_loop()
        self._slots = [
            _Slot(supervise.Place(slot, local, attempt, LIMITS)) for local in range(job.procs)
        ]
        self._done: asyncio.Future[Ended] = self._loop.create_future()
        self._leaving = False
        self._link: ControlClient[ToAgent] = ControlClient(
            (job.coordinator,),
            "/v1/agents",
            job.token,
            pace=replace(AGENT_PACE, ping_s=PATIENCE_S),
            greet=self._hello,
            beat=lambda: AgentBeat(slot, attempt),
            decode=wire.message_to_agent,
            obey=self._obey,
            keeps=True,
            tls=job.tls,
        )

    async def run(self) -> Ended:
        """Until all its ranks have ended and the coordinator has heard of it."""
        link = asyncio.create_task(self._link.run())
        for slot in self._slots:
            self._post(slot, supervise.Tick())
        ended = await self._done
        self._link.leave(AgentDone(self.slot, self.attempt, str(ended.end), ended.message))
        left = asyncio.create_task(self._link.left.wait())
        await asyncio.wait([left], timeout=FAREWELL_S)
        left.cancel()
        link.cancel()
        await asyncio.wait([link, *(asyncio.ensure_future(x) for x in self._closings())])
        return ended

    def _closings(self) -> list[asyncio.Task[None]]:
        links = (slot.link for slot in self._slots if slot.link is not None)
        return [asyncio.create_task(link.closed()) for link in links]

    # ---- what happens to it ---------------------------------------------------------------

    def evict(self) -> None:
        """SIGTERM, as when its node is drained."""
        self._drain("SIGTERM")

    def kill(self, member: MemberId) -> None:
        """SIGKILL to one of its ranks, from outside."""
        for slot in self._slots:
            if slot.rank is not None and slot.rank.me == member:
                slot.rank.kill()

    def _obey(self, order: ToAgent) -> None:
        match order:
            case KillRank(member=member, why=why):
                for slot in self._slots:
                    if slot.place.member == member:
                        self._post(slot, supervise.Kill(why))
            case DrainPod(why=why):
                self._drain(why)
            case Closing():
                self._leaving = True
                for slot in self._slots:
                    self._post(slot, supervise.Closing())
            case Shutdown(why=why):
                self._leaving = True
                for slot in self._slots:
                    self._post(slot, supervise.Shutdown(why))
            case _:
                assert_never(order)

    def _drain(self, why: str) -> None:
        self._leaving = True
        for slot in self._slots:
            self._post(slot, supervise.Drain(why))

    # ---- its places -----------------------------------------------------------------------

    def _post(self, slot: _Slot, event: supervise.Event) -> None:
        for effect in slot.place.handle(now_ns(), event):
            self._do(slot, effect)
        self._arm(slot)
        places = [each.place for each in self._slots]
        reason = supervise.reason_to_leave(places)
        if reason and not self._leaving:
            self._drain(f"the pod is given up: {reason}")
        end = supervise.pod_end(places)
        if end is not None and not self._done.done():
            self._done.set_result(end)

    def _do(self, slot: _Slot, effect: supervise.Effect) -> None:
        match effect:
            case supervise.Launch(member=member):
                self._launch(slot, member)
            case supervise.Command(kind="drain"):
                assert slot.rank is not None
                slot.rank.post(ev.Drain())
            case supervise.Command(why=why):
                assert slot.rank is not None
                slot.rank.obey(Dismiss(why))
            case supervise.SendKill():
                assert slot.rank is not None
                slot.rank.kill()
            case supervise.Report(message=message):
                self._link.send(message)
            case _:
                assert_never(effect)

    def _launch(self, slot: _Slot, member: MemberId) -> None:
        rank = slot.rank = RehearsedRank(
            member,
            self._around,
            told=lambda *end: self._on_loop(partial(self._told, *end)),
            ended=lambda rank: self._on_loop(partial(self._ended, rank)),
        )
        rank.link = slot.link = RankLink(self._job, rank, self._loop)
        self._born(rank)
        rank.start()
        self._loop.call_soon(self._up, slot, rank)

    def _up(self, slot: _Slot, rank: RehearsedRank) -> None:
        if slot.rank is rank and slot.place.phase is supervise.Phase.STARTING:
            self._post(slot, supervise.Up(os.getpid()))
            outcome = supervise.ReportedOutcome(RankOutcome.PRESENT, "")
            self._post(slot, outcome)

    def _told(self, rank: RehearsedRank, end: ev.Exit) -> None:
        outcome = RankOutcome.FINISHED if end.finished else RankOutcome.DISMISSED
        released = rank.machine.state.released
        told = supervise.ReportedOutcome(outcome, "" if end.finished else end.why, released)
        self._post(self._slot_of(rank), told)

    def _ended(self, rank: RehearsedRank) -> None:
        slot = self._slot_of(rank)
        assert slot.link is not None
        slot.link.close(killed=rank.killed)
        self._died(rank)
        in_order = rank.exit is not None and not rank.killed
        self._post(slot, supervise.Exited(0 if in_order else SIGKILL, ""))

    def _on_loop(self, action: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(action)

    def _slot_of(self, rank: RehearsedRank) -> _Slot:
        return self._slots[rank.me.local]

    def _arm(self, slot: _Slot) -> None:
        if slot.timer is not None:
            slot.timer.cancel()
            slot.timer = None
        if slot.place.wake_at_ns is not None and slot.place.phase is not supervise.Phase.ENDED:
            delay_s = max(0, slot.place.wake_at_ns - now_ns()) / NS_PER_S
            slot.timer = self._loop.call_later(delay_s, self._post, slot, supervise.Tick())

    def _hello(self) -> AgentHello:
        places = [slot.place for slot in self._slots]
        return AgentHello(
            self.slot,
            self.attempt,
            "rehearsal",
            "",
            living=tuple(place.member for place in places if place.alive),
            dead=tuple(member for place in places for member in place.dead),
            released=next((place.released for place in places if place.released), None),
        )
