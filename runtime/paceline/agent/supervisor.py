"""The driver of `core.agent.supervise`: starts the ranks of a pod and carries out the effects.

It takes no decision of its own. Events reach a place from the kernel (deaths), from the ranks (what
they report), from the coordinator (kill, drain, shutdown), from signals and timers. The effects go
to processes and to the coordinator. `run` returns when all places have ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, assert_never

from paceline_api.ids import GenerationId, MemberId
from paceline_api.times import NS_PER_S

from paceline.agent.group import GroupProcess
from paceline.agent.launch import LaunchPlan
from paceline.agent.logs import LogOutput
from paceline.agent.process import CHAIN_S
from paceline.agent.rank_lines import RankLines
from paceline.agent.rank_pipe import PipeMessage, RankPipe, RankPipeListener
from paceline.agent.system import Reaper
from paceline.clock import now_ns
from paceline.core.agent import supervise
from paceline.core.agent.exits import PlaceEnd
from paceline.core.messages import (
    Closing,
    DrainPod,
    KillRank,
    RankDead,
    RankStarted,
    Shutdown,
    ToAgent,
)
from paceline.environment import AgentSettings
from paceline.telemetry.collector import PodRecords

log = logging.getLogger("paceline.agent")

Send = Callable[[supervise.Report], None]
MakePlan = Callable[[MemberId, int, str, str], LaunchPlan]
"""Function that returns how to start a process, from (member, shard, name of the agent's socket,
key of the launch)."""


@dataclass(slots=True)
class _Slot:
    place: supervise.Place
    process: GroupProcess | None = None
    timer: asyncio.TimerHandle | None = None


class Supervisor:
    """Supervises the ranks of one pod on one event loop. No other thread may call it."""

    def __init__(
        self,
        settings: AgentSettings,
        limits: supervise.RankLimits,
        make_plan: MakePlan,
        *,
        model: int,
        records: PodRecords,
        output: LogOutput,
        reaper: Reaper,
        lines: RankLines,
        send: Send,
    ) -> None:
        """Prepare one place for each rank, or group of ranks. Nothing starts before `run`.

        Args:
            settings: Settings of the agent.
            limits: Limits on restarts, drains and runtimes of scripts.
            make_plan: Returns how to start a process.
            model: Ranks of a group. 1: each rank holds the whole model.
            records: Metrics of the pod's ranks.
            output: Takes the output of the ranks.
            reaper: Reports deaths.
            lines: Lines between ranks and coordinator.
            send: Sends a report to the coordinator.
        """
        self._loop = asyncio.get_running_loop()
        self._make_plan, self._model = make_plan, model
        self._records, self._output, self._reaper, self._send = records, output, reaper, send
        self._lines = lines
        self._listener = RankPipeListener(self._loop, self._introduced)
        self._slots = [
            _Slot(supervise.Place(settings.slot, local, settings.attempt, limits))
            for local in range(settings.procs)
        ]
        self._done: asyncio.Future[PlaceEnd] = self._loop.create_future()
        self._leaving = False

    @property
    def places(self) -> list[supervise.Place]:
        """State machines of all places, in their order."""
        return [slot.place for slot in self._slots]

    def living(self) -> tuple[MemberId, ...]:
        """Return the members whose processes live, for the greeting to a coordinator."""
        return tuple(place.member for place in self.places if place.alive)

    def pids(self) -> dict[MemberId, int]:
        """Return the pids of the ranks whose processes run."""
        processes = (slot.process for slot in self._slots if slot.process is not None)
        return {p.member: p.pid for p in processes if p.pid is not None}

    def dead(self) -> tuple[MemberId, ...]:
        """Return all members of this pod that were reaped, for the greeting to a coordinator."""
        return tuple(member for place in self.places for member in place.dead)

    def failures(self) -> tuple[RankDead, ...]:
        """Return the last failures of scripts, for a coordinator that has not received them."""
        return tuple(dead for place in self.places for dead in place.failures)

    def released(self) -> tuple[GenerationId, int] | None:
        """Return evidence of success that outlives the ranks and a coordinator, or None (R17)."""
        return next((place.released for place in self.places if place.released), None)

    async def run(self) -> PlaceEnd:
        """Start all ranks, and wait until all places have ended.

        Returns:
            How the pod ended.
        """
        for slot in self._slots:
            self._post(slot, supervise.Tick())
        try:
            ended = await self._done
            chains = asyncio.gather(*(s.process.chain_ended() for s in self._slots if s.process))
            await asyncio.wait([chains], timeout=2 * CHAIN_S)
            return ended
        finally:
            self._listener.close()
            for slot in self._slots:
                if slot.timer is not None:
                    slot.timer.cancel()
                if slot.process is not None:
                    slot.process.close()

    def drain(self, why: str) -> None:
        """Ask all ranks to leave, after SIGTERM, DrainPod or when one rank is given up (R16)."""
        self._leaving = True
        for slot in self._slots:
            self._post(slot, supervise.ProcessDrain(why))

    def obey(self, message: ToAgent) -> None:
        """Carry out an order of the coordinator."""
        match message:
            case KillRank():
                self._kill(message)
            case DrainPod():
                log.info("draining: %s", message.why)
                self.drain(message.why)
            case Closing():
                self._leaving = True
                for slot in self._slots:
                    self._post(slot, supervise.JobClosing())
            case Shutdown():
                log.info("the job is over: %s", message.why)
                self._leaving = True
                for slot in self._slots:
                    self._post(slot, supervise.JobShutdown(message.why))
            case _:
                assert_never(message)

    def _kill(self, message: KillRank) -> None:
        for slot in self._slots:
            if slot.place.member == message.member:
                self._post(slot, supervise.Kill(message.why))
        # Ignore the rest: dead members are in every greeting, unknown ones belong to other pods.

    def _introduced(self, pipe: RankPipe, message: PipeMessage | None) -> None:
        """Give a new pipe to the process whose launch key its first message holds."""
        for slot in self._slots:
            if slot.process is None or message is None:
                continue
            wanted = slot.place.phase is supervise.PlacePhase.STARTING
            if slot.process.connected(message.key, pipe, message.kind, wanted=wanted):
                return
        pipe.close()

    def _post(self, slot: _Slot, event: supervise.Event) -> None:
        for effect in slot.place.handle(now_ns(), event):
            self._do(slot, effect)
        self._arm(slot)
        reason = supervise.reason_to_leave(self.places)
        if reason and not self._leaving:
            self.drain(f"the pod is given up: {reason}")
        end = supervise.pod_end(self.places)
        if end is not None and not self._done.done():
            self._done.set_result(end)

    def _do(self, slot: _Slot, effect: supervise.Effect) -> None:
        match effect:
            case supervise.Launch():
                self._launch(slot, effect.member)
            case supervise.Command():
                assert slot.process is not None, effect
                slot.process.command(effect.kind, effect.why)
            case supervise.SendKill():
                log.warning("killing rank %s: %s", effect.member, effect.why)
                assert slot.process is not None, effect
                slot.process.kill()
            case supervise.Report():
                _log(effect)
                if isinstance(effect.message, RankDead):
                    self._records.retire(effect.message.member)
                self._send(effect)
            case _:
                assert_never(effect)

    def _launch(self, slot: _Slot, member: MemberId) -> None:
        if slot.process is not None:
            slot.process.close()
            for name in slot.process.log_names:
                self._output.close_file(name)

        def post(process: GroupProcess, event: supervise.Event) -> None:
            if slot.process is process:  # ignore late events of an earlier process
                if isinstance(event, supervise.Exited):
                    batch, version = self._records.last_work(member)
                    event = replace(event, batch=batch, version=version)
                self._post(slot, event)

        process = slot.process = GroupProcess(
            member,
            self._model,
            loop=self._loop,
            reaper=self._reaper,
            output=self._output,
            lines=self._lines,
            record_fd=self._records.begin(member),
            post=post,
        )
        process.launch(partial(self._make_plan, member), self._listener.name)

    def _arm(self, slot: _Slot) -> None:
        if slot.timer is not None:
            slot.timer.cancel()
            slot.timer = None
        if slot.place.wake_at_ns is not None and slot.place.phase is not supervise.PlacePhase.ENDED:
            delay_s = max(0, slot.place.wake_at_ns - now_ns()) / NS_PER_S
            slot.timer = self._loop.call_later(delay_s, self._post, slot, supervise.Tick())


_RESTARTS: Final = {True: "it starts again", False: "it does not start again"}


def _log(report: supervise.Report) -> None:
    message = report.message
    if isinstance(message, RankStarted):
        log.info("rank %s started with pid %d", message.member, message.pid)
    else:
        then = _RESTARTS[message.restarts]
        log.info("rank %s ended: %s; %s", message.member, message.why or "done", then)
