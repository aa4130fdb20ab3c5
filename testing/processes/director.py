"""Apply the faults of a history to a running job, and release the brake when all are done.

Steps follow one another. Each waits until the job has come far enough past the step before, and a
random moment longer, so it hits any point of a round. While steps are outstanding the ranks run
slowly (the brake is a file), so the job never ends before its faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from paceline.clock import now_ns
from paceline.core.protocol.records import Trigger
from paceline.local.runner import Runner
from paceline.local.timeline import Timeline
from paceline_api.status import RankPhase, RankStatus, Status, place_of
from paceline_api.times import NS_PER_S

ROUNDS_BETWEEN = 6
WAIT_S = 90.0
READ_BYTES = 16_384
SLOW_S, FAST_S = 0.04, 0.002
"""Time between two reads of the data that is written to the slow disk."""


class Director:
    """Task in the loop of a history's runner that applies the steps of the history.

    `look` must be called with each status. A step is [action, number, milliseconds, moment_ms]. A
    step with a negative moment does not wait until the job has recovered from the step before.
    """

    runner: Runner

    def __init__(
        self, steps: list[list[Any]], at_the_end: list[list[Any]], folder: Path, slow_log: str
    ) -> None:
        self.actions: list[str] = []
        self.transports: set[str] = set()
        """Transports that moved gradients, as the statuses reported them."""
        self.undone = [list(step) for step in steps]
        self._at_the_end = at_the_end
        self._folder = folder
        self._brake = folder / "brake"
        self._brake.touch()
        self._status: Status | None = None
        self._news = asyncio.Event()
        self._base = 0
        self._disk_s = FAST_S
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._play())
        self._disk = loop.create_task(self._be_disk(slow_log)) if slow_log else None

    def look(self, status: Status, _timeline: Timeline) -> None:
        """Receive a status of the job."""
        self._status = status
        self.transports.add(status.transport)
        self._news.set()

    def close(self) -> None:
        """Stop playing; an error of the task goes into `said`."""
        self._task.cancel()
        if self._disk is not None:
            self._disk.cancel()
        if self._task.done() and not self._task.cancelled() and self._task.exception():
            self.actions.append(repr(self._task.exception()))

    async def _play(self) -> None:
        while self.undone:
            action, number, milliseconds, moment_ms = self.undone[0]
            if moment_ms >= 0:
                await self._await_status(self._goes_well)
            await asyncio.sleep(abs(moment_ms) / 1000)
            at_s = now_ns() / NS_PER_S
            await getattr(self, f"_{action}")(number, milliseconds)
            version = self._status.version if self._status else 0
            self.actions.append(
                f"{action} {number} {milliseconds} at round {version}, {at_s:.4f} s"
            )
            self._base = version + ROUNDS_BETWEEN
            self.undone.pop(0)
        await self._await_status(self._goes_well)
        self._brake.unlink()
        if self._at_the_end:
            await self._await_status(lambda status: status.stopping)
        for action, number, milliseconds, moment_ms in self._at_the_end:
            await asyncio.sleep(moment_ms / 1000)
            await getattr(self, f"_late_{action}")(number, milliseconds)
            assert self._status is not None
            released = any(h.reason == "Released" for h in self._status.history)
            self.actions.append(f"{action} {number} {milliseconds} at the end, {released=}")

    def _goes_well(self, status: Status) -> bool:
        """Return True if enough rounds were made and all wanted ranks are active."""
        active = [r for r in status.ranks if r.state is RankPhase.ACTIVE]
        return status.version >= self._base and len(active) == status.replicas * status.procs

    async def _await_status(self, want: Any) -> Status:
        async with asyncio.timeout(WAIT_S):
            while self._status is None or not want(self._status):
                self._news.clear()
                await self._news.wait()
            return self._status

    # ---- actions --------------------------------------------------------------------------

    async def _kill(self, place: int, _: int) -> None:
        os.kill((await self._living(place)).pid, signal.SIGKILL)

    async def _stop(self, place: int, milliseconds: int) -> None:
        """Send SIGSTOP, and SIGCONT after `milliseconds` unless that is 0."""
        pid = (await self._living(place)).pid
        os.kill(pid, signal.SIGSTOP)
        if milliseconds:
            asyncio.get_running_loop().call_later(milliseconds / 1000, _go_on, pid)

    async def _sigterm(self, slot: int, _: int) -> None:
        assert self._cluster.terminate(slot)

    async def _kill_agent(self, slot: int, _: int) -> None:
        next(a for a in self._cluster.agents if a.name.startswith(f"agent-{slot}-")).signal(
            signal.SIGKILL
        )

    async def _scale(self, replicas: int, _: int) -> None:
        self._cluster.scale(replicas)
        await self._await_status(lambda s: s.replicas == replicas)

    async def _coordinator_kill(self, _: int, __: int) -> None:
        self._cluster.kill_coordinator()

    async def _coordinator_stop(self, _: int, milliseconds: int) -> None:
        coordinator = self._cluster._coordinator
        assert coordinator is not None
        os.kill(coordinator.pid, signal.SIGSTOP)
        await asyncio.sleep(milliseconds / 1000)
        _go_on(coordinator.pid)

    # These run at the end of the job, so the target may be gone already.

    async def _late_kill(self, place: int, _: int) -> None:
        ranks = self._status.ranks if self._status else ()
        procs = self._status.procs if self._status else 1
        for rank in ranks:
            alive = rank.state is not RankPhase.DEAD and rank.pid
            if alive and place_of(rank.member, procs) == place:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)

    async def _late_agent(self, slot: int, number: int) -> None:
        """Send signal `number` to the agents of a slot, a replacement included."""
        for agent in self._cluster.agents:
            if agent.name.startswith(f"agent-{slot}-"):
                agent.signal(signal.Signals(number))

    async def _late_scale(self, replicas: int, _: int) -> None:
        self._cluster.scale(replicas)

    async def _late_coordinator(self, _: int, milliseconds: int) -> None:
        """Stop the coordinator for `milliseconds`, or kill it if that is 0."""
        if milliseconds:
            await self._coordinator_stop(0, milliseconds)
        else:
            self._cluster.kill_coordinator()

    async def _self(self, place: int, _: int) -> None:
        """Wait until a rank has killed itself at a place in the code (see the script)."""
        await self._await_status(
            lambda s: any(
                r.state is RankPhase.DEAD and place_of(r.member, s.procs) == place for r in s.ranks
            )
        )

    async def _cut(self, place: int, milliseconds: int) -> None:
        """Make the agent cut its pod's connection to the coordinator."""
        slot = (await self._living(place)).member.slot
        agent = next(x for x in self._cluster.agents if x.name.startswith(f"agent-{slot}-"))
        (self._folder / f"cut-{agent.pid}").write_text(str(milliseconds))
        agent.signal(signal.SIGUSR1)
        await asyncio.sleep(milliseconds / 1000)

    async def _slow_disk(self, _: int, milliseconds: int) -> None:
        self._disk_s = SLOW_S
        await asyncio.sleep(milliseconds / 1000)
        self._disk_s = FAST_S

    async def _fill_disk(self, _: int, milliseconds: int) -> None:
        """Fill the checkpoints' disk for a while, so nothing can be written."""
        rest = self._folder / "checkpoints" / "rest"
        with contextlib.suppress(OSError), rest.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(READ_BYTES))
        await asyncio.sleep(milliseconds / 1000)
        rest.unlink()

    async def _be_disk(self, log: str) -> None:
        """Read a log at the speed of the disk, which bounds how fast it is written."""
        fd = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while True:
                await asyncio.sleep(self._disk_s)
                with contextlib.suppress(BlockingIOError):
                    os.read(fd, READ_BYTES)
        finally:
            os.close(fd)

    # ---- helpers --------------------------------------------------------------------------

    @property
    def _cluster(self) -> Any:
        assert self.runner._cluster is not None
        return self.runner._cluster

    async def _living(self, place: int) -> RankStatus:
        def find(status: Status) -> RankStatus | None:
            for rank in status.ranks:
                ended = rank.state in (RankPhase.DEAD, RankPhase.FINISHED)
                if not ended and rank.pid and place_of(rank.member, status.procs) == place:
                    return rank
            return None

        rank = find(await self._await_status(find))
        assert rank is not None
        return rank

    @staticmethod
    def figures(status: Status | None) -> dict[str, Any]:
        """Return the figures of the last status that `history.check` compares."""
        if status is None:
            return {}
        log = status.log
        return {
            "version": status.version,
            "applied": log.samples_applied,
            "late": log.samples_late,
            "dropped": log.samples_dropped,
            "redealt": log.samples_redealt,
            "exact": log.epochs_exact,
            "short": log.epochs_short,
            "streamed": log.streamed,
            "void": log.rounds.get(Trigger.VOID, 0),
            "changes": [[c.reason, c.agree_s, c.start_s, c.gap_s] for c in status.changes],
        }


def _go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
        os.kill(pid, signal.SIGCONT)
