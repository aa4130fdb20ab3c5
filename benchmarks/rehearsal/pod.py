"""One pod of a rehearsal: the agent's real decisions, over ranks that are threads.

As `paceline.agent.supervisor` does with processes, it starts, drains and ends the ranks of its pod,
and reports to the coordinator which have died. It lives on the event loop of its process.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, assert_never

import msgspec
from paceline.clock import now_ns
from paceline.control.voice import PACE, PodVoice
from paceline.core import wire
from paceline.core.agent import supervise
from paceline.core.agent.exits import PlaceEnd, RankOutcome
from paceline.core.agent.relay import Relay
from paceline.core.messages import (
    AgentDone,
    AgentHello,
    BeatEvery,
    Closing,
    Dismiss,
    DrainPod,
    Heartbeat,
    Introduce,
    KillRank,
    RankEnvelope,
    RankMessage,
    Register,
    Shutdown,
    ToAgent,
)
from paceline.core.rank import events as ev
from paceline.worker.coordinator_line import BEAT_NS
from paceline_api.ids import MemberId
from paceline_api.times import NS_PER_S

from benchmarks.rehearsal.rank import RehearsedRank, Surroundings

LIMITS: Final = supervise.RankLimits(restarts_max=6, drain_ns=600 * NS_PER_S)
"""Limits of the supervisor. A drain of many ranks takes long on two cores, and that must kill no
rank."""
PATIENCE_S: Final = 120.0
"""Timeout for the answer to a ping. Where hundreds of ranks share a core, a connection without an
answer is slow, not dead."""
SIGKILL: Final = -9


@dataclass(frozen=True)
class Job:
    """Settings that a pod gets from the operator's Secret and its environment."""

    coordinator: str
    token: str
    tls: ssl.SSLContext
    procs: int


class RankLine:
    """A rank's connection to the coordinator through its agent, on the loop of its process.

    The product gives it a thread in the rank, and a socket. Here it beats as often as its pod does;
    in the product a rank beats more often, on a core of its own.
    """

    def __init__(
        self, voice: PodVoice, rank: RehearsedRank, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._voice, self._rank, self._loop = voice, rank, loop
        self._connection = 0
        self._registered: Register | None = None
        self._interval_s = BEAT_NS / NS_PER_S
        self._timer: asyncio.TimerHandle | None = None

    def send(self, message: RankMessage) -> None:
        """Send a message to the coordinator; any thread may call this."""
        if self._connection:
            self._loop.call_soon_threadsafe(self._say, message)

    def tell(self, data: bytes) -> None:
        """Receive a message from the agent, on the loop."""
        match wire.message_to_rank(data):
            case Introduce(connection=number):
                self._connection, self._registered = number, None
                self._interval_s = BEAT_NS / NS_PER_S
                self._say(self._rank.machine.state.registration())
                self._rank.meter.registered_ns = self._rank.meter.registered_ns or now_ns()
                self._rank.post(ev.Connected())
                self._beat_later()
            case BeatEvery(ms=ms):
                self._interval_s = ms / 1000
            case order:
                self._rank.obey(order)

    def close(self) -> None:
        """Close the connection after the rank has ended; call it on the loop."""
        self._connection = 0
        if self._timer is not None:
            self._timer.cancel()
        self._voice.close(self._rank.me)

    def _say(self, message: RankMessage | Heartbeat) -> None:
        if not self._connection:
            return  # the rank was killed in the meantime
        if isinstance(message, Register):
            if message == self._registered:
                return
            self._registered = message
        data = msgspec.json.encode(RankEnvelope(self._connection, message))
        self._voice.receive(self._rank.me, data)

    def _beat_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._interval_s, self._beat)

    def _beat(self) -> None:
        self._say(self._rank.heartbeat())
        self._beat_later()


@dataclass
class _Slot:
    place: supervise.Place
    rank: RehearsedRank | None = None
    line: RankLine | None = None
    timer: asyncio.TimerHandle | None = None


class Pod:
    """One pod: the supervisor's places, their ranks, and the agent's connection."""

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
        """Prepare a pod; call this on the event loop.

        Args:
            slot: Slot of the pod.
            attempt: Attempt of the pod.
            job: The job's settings.
            around: What all ranks of the process share.
            born: Called with every rank that is started.
            died: Called with every rank that has ended.
        """
        self.slot, self.attempt = slot, attempt
        self._job, self._around, self._born, self._died = job, around, born, died
        self._loop = asyncio.get_running_loop()
        self._slots = [
            _Slot(supervise.Place(slot, local, attempt, LIMITS)) for local in range(job.procs)
        ]
        self._done: asyncio.Future[PlaceEnd] = self._loop.create_future()
        self._leaving = False
        self._lines: dict[MemberId, RankLine] = {}
        self._voice = PodVoice(
            (job.coordinator,),
            lambda: job.token,
            Relay(slot, attempt),
            hello=self._hello,
            carriers=lambda: (),
            obey=self._obey,
            tell=self._tell,
            tls=job.tls,
            pace=replace(PACE, ping_s=PATIENCE_S),
        )

    async def run(self) -> PlaceEnd:
        """Run the pod until all its ranks have ended and the coordinator has received the report.

        Returns:
            How the pod ended.
        """
        voice = asyncio.create_task(self._voice.run())
        for slot in self._slots:
            self._post(slot, supervise.Tick())
        ended = await self._done
        await self._voice.finish(AgentDone(self.slot, self.attempt, str(ended.end), ended.message))
        voice.cancel()
        await asyncio.wait([voice])
        return ended

    def _tell(self, member: MemberId, data: bytes) -> None:
        if (line := self._lines.get(member)) is not None:
            line.tell(data)

    # ---- orders to the pod ----------------------------------------------------------------

    def evict(self) -> None:
        """Drain all ranks, as SIGTERM does when a node is drained."""
        self._drain("SIGTERM")

    def kill(self, member: MemberId) -> None:
        """Kill one of its ranks from outside, as SIGKILL does."""
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
                    self._post(slot, supervise.JobClosing())
            case Shutdown(why=why):
                self._leaving = True
                for slot in self._slots:
                    self._post(slot, supervise.JobShutdown(why))
            case _:
                assert_never(order)

    def _drain(self, why: str) -> None:
        self._leaving = True
        for slot in self._slots:
            self._post(slot, supervise.ProcessDrain(why))

    # ---- places of the ranks --------------------------------------------------------------

    def _post(self, slot: _Slot, event: supervise.Event) -> None:
        """Pass an event to a place, carry out the effects, and check whether the pod has ended."""
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
                self._voice.send(message)
            case _:
                assert_never(effect)

    def _launch(self, slot: _Slot, member: MemberId) -> None:
        rank = slot.rank = RehearsedRank(
            member,
            self._around,
            on_exit=lambda *end: self._on_loop(partial(self._on_exit, *end)),
            ended=lambda rank: self._on_loop(partial(self._ended, rank)),
        )
        rank.link = slot.line = RankLine(self._voice, rank, self._loop)
        self._born(rank)
        rank.start()
        self._loop.call_soon(self._up, slot, rank)

    def _up(self, slot: _Slot, rank: RehearsedRank) -> None:
        """Report a rank as started, if it is still the one of its place."""
        if slot.rank is rank and slot.place.phase is supervise.PlacePhase.STARTING:
            assert slot.line is not None
            self._lines[rank.me] = slot.line
            self._voice.open(rank.me)
            self._post(slot, supervise.Up(os.getpid()))
            outcome = supervise.ReportedOutcome(RankOutcome.PRESENT, "")
            self._post(slot, outcome)

    def _on_exit(self, rank: RehearsedRank, end: ev.Exit) -> None:
        """Handle a rank's report of how it ends."""
        outcome = RankOutcome.FINISHED if end.finished else RankOutcome.DISMISSED
        released = rank.machine.state.released
        report = supervise.ReportedOutcome(outcome, "" if end.finished else end.why, released)
        self._post(self._slot_of(rank), report)

    def _ended(self, rank: RehearsedRank) -> None:
        """Handle the end of a rank's thread, as the agent handles the exit of a process."""
        slot = self._slot_of(rank)
        if (line := self._lines.pop(rank.me, None)) is not None:
            line.close()
        self._died(rank)
        in_order = rank.exit is not None and not rank.killed
        self._post(slot, supervise.Exited(0 if in_order else SIGKILL, ""))

    def _on_loop(self, action: Callable[[], None]) -> None:
        """Run an action on the pod's event loop; any thread may call this."""
        self._loop.call_soon_threadsafe(action)

    def _slot_of(self, rank: RehearsedRank) -> _Slot:
        return self._slots[rank.me.local]

    def _arm(self, slot: _Slot) -> None:
        """Set the timer of a place to its next wake-up."""
        if slot.timer is not None:
            slot.timer.cancel()
            slot.timer = None
        if slot.place.wake_at_ns is not None and slot.place.phase is not supervise.PlacePhase.ENDED:
            delay_s = max(0, slot.place.wake_at_ns - now_ns()) / NS_PER_S
            slot.timer = self._loop.call_later(delay_s, self._post, slot, supervise.Tick())

    def _hello(self, registers: tuple[Register, ...]) -> AgentHello:
        places = [slot.place for slot in self._slots]
        return AgentHello(
            self.slot,
            self.attempt,
            "rehearsal",
            "",
            living=tuple(place.member for place in places if place.alive),
            dead=tuple(member for place in places for member in place.dead),
            released=next((place.released for place in places if place.released), None),
            registers=registers,
        )
