"""The data channel over MPI: algorithms of our own over point-to-point messages on pair links.

No collective of the library is used, so a survivor of a death needs no call of MPI to go on over
the links that it has. A reduction cuts its buffers into pieces. Every piece goes through the steps
of a schedule (`core.collectives.schedules`). Several pieces run at a time in independent lanes, so
one lane adds while another one transfers. All waits are calls of Testsome with a pause, an abort
flag and the connections of the group. Memory that an abandoned reduction may still write to is kept
until its requests have ended.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from paceline_api.times import NS_PER_MS

from paceline.clock import now_ns, pause
from paceline.core.collectives.conduct import Conduct
from paceline.core.collectives.schedules import (
    ALGORITHMS,
    Schedule,
    partners,
    schedule,
)
from paceline.transport.base import (
    Abort,
    Group,
    PeerLost,
    Stage,
    Transport,
    TransportAborted,
    TransportError,
)
from paceline.transport.mpi.abandoned import AbandonedRequests, MemoryRange
from paceline.transport.mpi.lanes import Cells, Lane, LaneScratch, Piece, RoundedCells, failed_call
from paceline.transport.mpi.links import LANES, Link, LinkTable
from paceline.transport.mpi.native_loop import MpiNativeLoop
from paceline.transport.mpi.peer_errors import peer_errors
from paceline.transport.native import UnavailableError
from paceline.transport.native.layout import KINDS
from paceline.transport.rendezvous import LAST_WORDS_NS, Deadline, PeerConnections

log = logging.getLogger("paceline.rank")

SPINS: Final = 20
"""Number of tests without a pause. A message between two running ranks takes less time."""
PAUSE_S: Final = 0.00005
LONG_PAUSE_S: Final = 0.001
ALL_THERE: Final = Stage()
LONG_WAIT_NS: Final = 20 * NS_PER_MS
"""Time without a message after which the pauses get longer, since the peers wait for something
slow."""


class MpiTransport(Transport):
    """Elastic MPI without a launcher, for host memory only."""

    name: ClassVar[str] = "mpi"
    algorithms: ClassVar[tuple[str, ...]] = ALGORITHMS
    rounds: ClassVar[bool] = True

    def __init__(self, *, host: str, native: bool = True, scratch: Path | None = None) -> None:
        self._links = LinkTable(host, scratch)
        self._mpi = self._links.mpi
        self._native: MpiNativeLoop | None = None
        self._why_python = "asked for"
        if native:
            try:
                self._native = MpiNativeLoop(self._mpi)
            except UnavailableError as error:
                self._why_python = str(error)
                log.warning("mpi runs in Python, which a busy script slows down: %s", error)
        self._connections = PeerConnections()
        self._group: Group | None = None
        self._link_to: dict[int, Link] = {}
        self._schedules: dict[str, Schedule] = {}
        self._scratch = LaneScratch()
        self._abandoned = AbandonedRequests(self._mpi)

    @property
    def address(self) -> str:
        """Address of this process's rendezvous."""
        return self._links.rendezvous.address

    def open(self, group: Group, abort: Abort, timeout_s: float) -> None:
        """Make the links to the partners of this rank that do not exist yet.

        It raises PeerLost or TransportAborted if a partner cannot be reached or the abort flag is
        raised.

        Args:
            group: The members.
            abort: Ends the call when it is raised.
            timeout_s: Seconds after which it fails.

        Raises:
            TransportError: MPI cannot make a link.
        """
        self.close()
        deadline = Deadline(abort, timeout_s)
        self._links.settle(deadline)
        try:
            mine = partners(ALGORITHMS, group.size, group.rank)
            # Higher ranks first: the highest one only answers, so ranks cannot wait in a cycle.
            for rank in sorted((r for r in mine if r > group.rank), reverse=True):
                self._connect_to(group, rank, deadline)
            for rank in sorted((r for r in mine if r < group.rank), reverse=True):
                self._connect_to(group, rank, deadline)
        except BaseException as error:
            self.close()
            if isinstance(error, self._mpi.Exception):
                raise TransportError(f"MPI cannot make a link: {error}") from error
            raise
        self._schedules = {a: schedule(a, group.size, group.rank) for a in ALGORITHMS}
        if self._native is not None:
            self._native.enter(self._schedules, self._link_to, self._connections)
        self._abandoned.clean()  # by now the peers have left the earlier groups
        self._links.forget_spares({peer.name for peer in group.peers})
        self._group = group

    def _connect_to(self, group: Group, rank: int, deadline: Deadline) -> None:
        meet = self._links.dial if rank > group.rank else self._links.answer
        link, connection = meet(group, rank, deadline)
        self._connections.add(rank, connection)
        self._link_to[rank] = link
        self._discard_old(link)

    def _discard_old(self, link: Link) -> None:
        """Receive and drop messages that an abandoned generation left on this link."""
        current = {link.tag(lane) for lane in range(LANES)}
        status = self._mpi.Status()
        while link.comm.Iprobe(0, self._mpi.ANY_TAG, status) and status.tag not in current:
            waste = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
            request = link.comm.Irecv([waste, self._mpi.BYTE], 0, status.tag)
            self._abandoned.keep(
                [request], [], [MemoryRange(waste.ctypes.data, waste.nbytes, waste)]
            )

    def allreduce(self, buffers: Sequence[torch.Tensor], abort: Abort, algorithm: str) -> None:
        """Sum the buffers with one of the algorithms of `core.collectives.schedules`."""
        self._sum([Cells(buffer) for buffer in buffers], abort, algorithm)

    def allreduce_rounded(
        self,
        buffers: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor],
        abort: Abort,
        algorithm: str,
    ) -> None:
        """Sum float32 buffers that travel as bfloat16, rounded at each hop."""
        pairs = zip(buffers, residuals, strict=True)
        self._sum([RoundedCells(*pair) for pair in pairs], abort, algorithm)

    def allreduce_staged(
        self,
        buffer: torch.Tensor,
        stage: Stage,
        abort: Abort,
        algorithm: str,
        residual: torch.Tensor | None = None,
    ) -> None:
        """Sum a buffer that the stage produces piece by piece, ahead of the native loop."""
        cells = Cells(buffer) if residual is None else RoundedCells(buffer, residual)
        self._sum([cells], abort, algorithm, stage)

    def _sum(
        self, cells: Sequence[Cells], abort: Abort, algorithm: str, stage: Stage = ALL_THERE
    ) -> None:
        assert self._group is not None, "allreduce outside a group"
        native = self._native if all(c.tensor.dtype in KINDS for c in cells) else None
        if native is None or self._group.size == 1:
            stage.make(0, sum(c.tensor.nbytes for c in cells))
        if self._group.size == 1:
            return
        requests: list[Any] = []
        try:
            if native is not None:
                plan = self._schedules[algorithm]
                native.reduce(algorithm, plan, cells, self._scratch, abort, requests, stage.native)
            else:
                self._reduce(algorithm, cells, abort, requests)
        except BaseException as error:
            self._abandon(requests, cells)
            if isinstance(error, self._mpi.Exception):
                raise PeerLost(failed_call(str(error))) from error
            raise

    def _reduce(
        self, algorithm: str, cells: Sequence[Cells], abort: Abort, requests: list[Any]
    ) -> None:
        plan = self._schedules[algorithm]
        pieces = [piece for c in cells for piece in Piece.cut(c, plan.chunks)]
        lanes = [
            Lane(k, pieces[k::LANES], plan.steps, self._link_to, self._scratch, self._mpi)
            for k in range(min(LANES, len(pieces)))
        ]
        requests += [self._mpi.REQUEST_NULL] * (2 * len(lanes))
        for lane in lanes:
            lane.post(requests)
        self._run(lanes, requests, abort)

    def _run(self, lanes: list[Lane], requests: list[Any], abort: Abort) -> None:
        testsome = self._mpi.Request.Testsome
        statuses = [self._mpi.Status() for _ in requests]
        idle = 0
        idle_since_ns = lost_since_ns = 0
        while (done := testsome(requests, statuses)) is not None:
            if done:
                idle = 0
                for index, status in zip(done, statuses, strict=False):
                    lane = lanes[index >> 1]
                    if index % 2 == 0:
                        lane.received(status)
                    lane.arrived(requests)
                continue
            idle += 1
            if idle <= SPINS:
                continue
            if abort.is_raised():
                raise TransportAborted("abandoned in a reduction")
            now = now_ns()
            if idle == SPINS + 1:
                idle_since_ns = now
                lost_since_ns = 0
            if idle % 16 == 0:
                lost = self._connections.lost()
                if lost is not None:
                    lost_since_ns = lost_since_ns or now
                    if now - lost_since_ns > LAST_WORDS_NS:
                        raise PeerLost(f"rank {lost} has gone", lost)
            pause(PAUSE_S if now - idle_since_ns < LONG_WAIT_NS else LONG_PAUSE_S)

    def _abandon(self, requests: list[Any], cells: Sequence[Cells]) -> None:
        """Give up requests, and keep the memory that they may touch until they have completed."""
        null = self._mpi.REQUEST_NULL
        for request in requests[0::2]:  # receives: a canceled one completes at once
            if request != null:
                request.Cancel()
        memory = [MemoryRange(c.tensor.data_ptr(), c.tensor.nbytes, c) for c in cells]
        parts = [*self._scratch.arriving, *self._scratch.leaving]
        memory += [MemoryRange(part.ctypes.data, part.nbytes, part) for part in parts]
        self._abandoned.keep(requests[0::2], requests[1::2], memory)
        self._scratch = LaneScratch()

    def peer_connections(self) -> Sequence[tuple[int, int]]:
        """Return the rendezvous connections of the group, which close with the peers."""
        return [(fd, rank) for fd, rank, _ in self._connections.watched()]

    def close(self) -> None:
        """Leave the group and keep the links for the next one."""
        self._group = None
        self._link_to = {}
        if self._abandoned.leave(self._connections):
            self._connections = PeerConnections()
        self._connections.close()
        self._abandoned.clean()

    def shutdown(self) -> None:
        """Leave the group and close the rendezvous. MPI is never finalized (D6)."""
        self.close()
        self._links.rendezvous.close()

    def conducts(self) -> tuple[Conduct, ...]:
        """Return one value, which says whether the loop runs in Python."""
        return (Conduct(self.name, in_python="" if self._native else self._why_python),)

    def describe(self) -> dict[str, str]:
        """Return the loop, the provider, and the numbers of links and abandoned calls."""
        return {
            "loop": "native" if self._native else f"python: {self._why_python}",
            "provider": f"ofi;{os.environ.get('FI_PROVIDER', 'default')}",
            "links.wired": str(self._links.wired),
            "links.failed": str(self._links.wiring_failed),
            "links.broken": str(peer_errors.count),
            "abandoned": str(len(self._abandoned)),
        }
