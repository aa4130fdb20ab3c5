"""One launched process of a place: its launcher, its pipes, and its death.

It begins with the launcher (mpiexec, or the shim itself). It becomes a rank when the shim
introduces itself with the key of this launch. It ends with exactly one of two events: `Exited`,
from `waitpid` on the rank (D6), or `NeverStarted`, from `waitpid` on the launcher or from a launch
that failed. If the chain breaks meanwhile (mpiexec or its proxy is killed), the rank is killed: it
could make no new MPI link, and nobody would supervise it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from paceline_api.errors import printable_lines
from paceline_api.ids import MemberId

from paceline import scratch
from paceline.agent.launch import LaunchPlan
from paceline.agent.logs import LogOutput, Pump
from paceline.agent.rank_lines import RankLines
from paceline.agent.rank_pipe import PipeMessage, RankPipe
from paceline.agent.system import Reaper
from paceline.control import packets
from paceline.core.agent import supervise
from paceline.core.agent.exits import RankOutcome, how_it_ended

log = logging.getLogger("paceline.agent")

CHAIN_S: Final = 2.0
"""Seconds in which the launcher has to end by itself after its rank. Measured: 6 ms."""
OWN_END_S: Final = 0.1
"""Seconds to wait before a broken chain kills the rank. MPI's proxy notices the death of a rank
some milliseconds before waitpid does."""


class RankProcess:
    """One process of a rank, from its launch to its end. Used on the event loop only."""

    def __init__(
        self,
        member: MemberId,
        *,
        loop: asyncio.AbstractEventLoop,
        reaper: Reaper,
        output: LogOutput,
        lines: RankLines | None,
        record_fd: int,
        shard: int = 0,
        group: Sequence[socket.socket] = (),
        post: Callable[[RankProcess, supervise.Event], None],
    ) -> None:
        """Prepare a process. Nothing starts before `launch`.

        Args:
            member: Member id of the process.
            loop: Event loop of the agent.
            reaper: Reports the deaths.
            output: Takes the output of the process.
            lines: Lines to the coordinator. None for a rank that does not speak with it.
            record_fd: Memory of the rank's metrics. The caller owns it.
            shard: Which shard of the model the rank holds.
            group: The rank's sockets within its group. They are closed here once the rank has them.
            post: Receives the events of the process.
        """
        self.member, self.shard = member, shard
        self._group = list(group)
        self.key = secrets.token_hex(16)
        self._loop, self._reaper, self._output, self._lines = loop, reaper, output, lines
        self._record_fd = record_fd
        self._post = post
        self._launcher: int | None = None
        self._chain_ended = asyncio.Event()
        self._rank: int | None = None
        self._pipe: RankPipe | None = None
        self._guard: RankPipe | None = None
        self._over = False
        self._pumps: dict[str, Pump] = {}
        self._order = b""
        self._guarded = False
        self._folders: tuple[Path, ...] = ()

    @property
    def log_name(self) -> str:
        """Name of the file for the output of this process."""
        return f"rank-{self._place}-{self.member.attempt}.log"

    @property
    def _place(self) -> str:
        """Name of the place.

        The first rank of a group has the group's name, since its metrics stand for the group.
        """
        shard = f".{self.shard}" if self.shard else ""
        return f"{self.member.slot}.{self.member.local}{shard}"

    @property
    def pid(self) -> int | None:
        """Pid of the rank. None before its shim has connected and after its end."""
        return self._rank

    def launch(self, plan: LaunchPlan) -> None:
        """Make the folders and start the launcher. Failures are posted as `NeverStarted`."""
        self._order = msgspec.json.encode(plan.order)
        self._guarded = plan.guarded
        self._folders = plan.folders
        try:
            for folder in plan.folders:
                folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            why = f"no temporary folder {error.filename}: {error.strerror}"
            self._loop.call_soon(self._end, supervise.NeverStarted(why))
            return
        read_end, write_end = os.pipe()
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, write_end, 1),
            (os.POSIX_SPAWN_DUP2, write_end, 2),
        ]
        ignored = (signal.SIGPIPE, signal.SIGXFSZ)
        self._pumps["launcher"] = self._pump(read_end, shown=False)
        try:
            self._launcher = os.posix_spawn(
                plan.argv[0],
                plan.argv,
                plan.env,
                file_actions=actions,
                setsid=True,
                setsigmask=(),
                setsigdef=ignored,
            )
        except OSError as error:
            why = f"{plan.argv[0]}: {error.strerror}"
            self._loop.call_soon(self._end, supervise.NeverStarted(why))
            return
        finally:
            os.close(write_end)
        self._reaper.watch(self._launcher, self._launcher_ended)

    def connected(self, pipe: RankPipe, role: str, *, wanted: bool) -> None:
        """Take the connection of a shim, and send the rank its order and descriptors."""
        if self._over or not wanted:
            pipe.close()
            return
        pipe.on_message = self._from_guard if role == "guard" else self._from_rank
        if role == "guard":
            self._guard = pipe
            return
        pid = pipe.peer_pid
        self._rank, self._pipe = pid, pipe
        if self._guarded:
            self._reaper.watch(pid, self._rank_ended)
        out_r, out_w = os.pipe()
        err_r, err_w = os.pipe()
        order = os.memfd_create("paceline-order")
        os.write(order, self._order)
        os.lseek(order, 0, os.SEEK_SET)
        self._pumps["stdout"] = self._pump(out_r, shown=True)
        self._pumps["stderr"] = self._pump(err_r, shown=True)
        line = packets.pair()[1] if self._lines is None else self._lines.open(self.member)
        within = [one.fileno() for one in self._group]
        passed = (out_w, err_w, self._record_fd, line.fileno(), order, *within)
        sent = pipe.send({"kind": "go"}, passed)
        for fd in (out_w, err_w, order):
            os.close(fd)
        line.close()
        self._leave_group()
        if sent:
            self._post(self, supervise.Up(pid))

    def command(self, kind: str, why: str) -> None:
        """Ask the rank to drain or shut down. Log it if the rank does not take it."""
        if self._pipe is None or not self._pipe.send({"kind": kind, "why": why}):
            # A rank that does not read is killed at its deadline.
            log.warning("rank %s does not take the request to %s", self.member, kind)

    def kill(self) -> None:
        """Send SIGKILL to the rank, or to its launcher if there is no rank yet."""
        # The launcher ends by itself after its rank, and removes its files then.
        pid = self._rank if self._rank is not None else self._launcher
        if pid is not None:
            self._reaper.kill(pid)

    async def chain_ended(self) -> None:
        """Wait until no launcher is left. It is killed CHAIN_S after its rank."""
        if self._launcher is not None:
            await self._chain_ended.wait()

    def close(self) -> None:
        """Close pumps, pipes and sockets when the agent ends or the next process starts."""
        for pump in self._pumps.values():
            pump.close()
        for pipe in (self._pipe, self._guard):
            if pipe is not None:
                pipe.close()
        self._leave_group()

    def _leave_group(self) -> None:
        """Close the rank's sockets within its group: the others notice the rank's end by them."""
        for line in self._group:
            line.close()
        self._group.clear()

    def _pump(self, fd: int, *, shown: bool) -> Pump:
        prefix = f"[rank {self._place}#{self.member.attempt}] "
        return Pump(self._loop, self._output, fd, prefix=prefix, name=self.log_name, shown=shown)

    def _from_guard(self, _line: RankPipe, message: PipeMessage | None) -> None:
        if message is None and not self._over:
            # The guard ended after its rank, or because the chain above it broke.
            self._reaper.collect()
            self._chain_broke("its guard or MPI proxy ended")

    def _from_rank(self, _line: RankPipe, message: PipeMessage | None) -> None:
        if message is None:
            return  # the script may have closed it; only waitpid proves a death
        try:
            outcome = RankOutcome(message.kind)
        except ValueError:
            log.warning("rank %s said %r", self.member, message)
            return
        text = printable_lines(message.message)
        error = message.error.printable() if message.error is not None else None
        report = supervise.ReportedOutcome(outcome, text, message.released, error)
        self._post(self, report)

    def _launcher_ended(self, code: int) -> None:
        pid, self._launcher = self._launcher, None
        self._chain_ended.set()
        if self._over:
            self._sweep()
            return
        if self._rank is not None and self._rank == pid:
            self._rank_ended(code)
        elif self._rank is None:
            self._pumps["launcher"].drain()
            output = self._pumps["launcher"].tail
            why = f"its launcher ended with {how_it_ended(code)}"
            self._end(supervise.NeverStarted(f"{why}: {output}" if output else why))
        else:
            self._reaper.collect()
            self._chain_broke("its MPI launcher ended")

    def _chain_broke(self, what: str) -> None:
        # Usually the rank itself is ending. Then its own exit status counts (D6).
        self._loop.call_later(OWN_END_S, self._kill_for, what)

    def _kill_for(self, what: str) -> None:
        if not self._over and self._rank is not None:
            self._post(self, supervise.Kill(f"{what}, so it could not be supervised"))

    def _rank_ended(self, code: int) -> None:
        if self._pipe is not None:
            self._pipe.drain()  # handle its last messages before its exit status
            self._pipe.close()
        if self._lines is not None:
            self._lines.end(self.member)
        for pump in self._pumps.values():
            pump.drain()
        tail = self._pumps["stderr"].tail
        if self._launcher is not None:
            self._loop.call_later(CHAIN_S, self._end_chain)
        self._end(supervise.Exited(code, tail))

    def _end_chain(self) -> None:
        if self._launcher is not None:
            self._reaper.kill(self._launcher)

    def _end(self, event: supervise.Exited | supervise.NeverStarted) -> None:
        self._over = True
        self._rank = None
        if self._launcher is None:
            self._sweep()
        self._post(self, event)

    def _sweep(self) -> None:
        """Remove what the rank and its launcher have left.

        A thread does it, since scripts may have put much there. What it does not finish is removed
        with the agent's own folder.
        """
        self._loop.run_in_executor(None, scratch.remove, self._folders)
