"""The processes of one member: a rank, or the group of ranks that hold one copy of the model (R50).

They start together and end together. To the supervisor of a place they are one process. It is up
when all of them are, and dead when all are reaped, for the reason of the first one that failed. If
one fails, or ends without having reported that it would, the others could only wait for it, so they
are killed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from paceline_api.ids import MemberId

from paceline.agent.launch import LaunchPlan
from paceline.agent.logs import LogOutput
from paceline.agent.process import RankProcess
from paceline.agent.rank_lines import RankLines
from paceline.agent.rank_pipe import RankPipe
from paceline.agent.system import Reaper
from paceline.control import packets
from paceline.core.agent import supervise
from paceline.core.agent.exits import RankOutcome
from paceline.telemetry.records import allocate_record

IN_ORDER: Final = (RankOutcome.FINISHED, RankOutcome.DISMISSED)


class GroupProcess:
    """The processes of one member, as one process. Used on the event loop only."""

    def __init__(
        self,
        member: MemberId,
        model: int,
        *,
        loop: asyncio.AbstractEventLoop,
        reaper: Reaper,
        output: LogOutput,
        lines: RankLines,
        record_fd: int,
        post: Callable[[GroupProcess, supervise.Event], None],
    ) -> None:
        """Prepare the processes and the sockets between them. Nothing starts before `launch`.

        The first rank leads: it alone speaks with the coordinator, and its metrics are those of the
        group.

        Args:
            member: Member id of the group.
            model: Number of ranks.
            loop: Event loop of the agent.
            reaper: Reports deaths.
            output: Takes the output of the ranks.
            lines: Lines to the coordinator.
            record_fd: Memory of the first rank's metrics. The caller owns it.
            post: Receives the events of the group.
        """
        self.member = member
        self._post = post
        pairs = [packets.pair() for _ in range(model - 1)]
        groups = [[ours for ours, _ in pairs], *([theirs] for _, theirs in pairs)]
        self._records = [allocate_record() for _ in pairs]
        self._ranks = [
            RankProcess(
                member,
                loop=loop,
                reaper=reaper,
                output=output,
                lines=None if shard else lines,
                record_fd=self._records[shard - 1] if shard else record_fd,
                shard=shard,
                group=group,
                post=self._on_event,
            )
            for shard, group in enumerate(groups)
        ]
        self._up: set[int] = set()
        self._outcomes: dict[int, supervise.ReportedOutcome] = {}
        self._ends: list[tuple[int, supervise.Exited | supervise.NeverStarted]] = []
        """Ends of the ranks with their shards, in the order in which they were reaped."""

    @property
    def log_names(self) -> list[str]:
        """Names of the files for the output of the ranks."""
        return [rank.log_name for rank in self._ranks]

    @property
    def pid(self) -> int | None:
        """Pid of the first rank. None before its shim has connected and after its end."""
        return self._ranks[0].pid

    def launch(self, plan: Callable[[int, str, str], LaunchPlan], socket_name: str) -> None:
        """Start all ranks.

        Args:
            plan: Returns how to start a rank, from (shard, name of the agent's socket, key of the
                launch).
            socket_name: Name of the agent's socket for shims.
        """
        for rank in self._ranks:
            rank.launch(plan(rank.shard, socket_name, rank.key))

    def connected(self, key: str, pipe: RankPipe, role: str, *, wanted: bool) -> bool:
        """Take a shim's connection. Return False if its key is of no rank of this group."""
        for rank in self._ranks:
            if rank.key == key:
                rank.connected(pipe, role, wanted=wanted)
                return True
        return False

    def command(self, kind: str, why: str) -> None:
        """Ask the first rank to drain or shut down.

        It tells the others, in the order of all events.
        """
        self._ranks[0].command(kind, why)

    def kill(self) -> None:
        """Kill all ranks."""
        for rank in self._ranks:
            rank.kill()

    async def chain_ended(self) -> None:
        """Wait until no launcher is left."""
        await asyncio.gather(*(rank.chain_ended() for rank in self._ranks))

    def close(self) -> None:
        """Close all files, when the agent ends or before the next process of the place starts."""
        for rank in self._ranks:
            rank.close()
        for record in self._records:
            os.close(record)
        self._records.clear()

    def _on_event(self, rank: RankProcess, event: supervise.Event) -> None:
        match event:
            case supervise.Up(pid=pid):
                self._up.add(rank.shard)
                if len(self._up) == len(self._ranks):
                    self._post(self, supervise.Up(self.pid or pid))
            case supervise.ReportedOutcome(outcome=outcome):
                self._outcomes[rank.shard] = event
                if rank.shard == 0 or outcome not in (*IN_ORDER, RankOutcome.PRESENT):
                    # The exception may be caused by another rank's death: report it with the end.
                    self._post(self, replace(event, error=None))
            case supervise.Exited() | supervise.NeverStarted():
                self._ended(rank, event)
            case _:
                self._post(self, event)

    def _ended(self, rank: RankProcess, event: supervise.Exited | supervise.NeverStarted) -> None:
        self._ends.append((rank.shard, event))
        if len(self._ends) == len(self._ranks):
            bad = (end for end in self._ends if not _is_good(end[1]))
            shard, end = next(bad, self._ends[0])
            outcome = self._outcomes.get(shard)
            if outcome is not None and outcome.error is not None:
                self._post(self, outcome)
            self._post(self, end)
            return
        outcome = self._outcomes.get(rank.shard)
        if not _is_good(event) or outcome is None or outcome.outcome not in IN_ORDER:
            for other in self._ranks:
                other.kill()


def _is_good(end: supervise.Exited | supervise.NeverStarted) -> bool:
    return isinstance(end, supervise.Exited) and end.code == 0
