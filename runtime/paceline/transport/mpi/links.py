"""Links of MPI between pairs of ranks, made without a launcher and kept across generations.

A link is an intercommunicator made by Open_port, Accept and Connect. Measured with MPICH 5.0.2
(ofi netmod, tcp provider): Accept and Connect hold the lock of the library while they wait, so
they are called only when the pair has met (`rendezvous`), one at a time, in a throw-away thread,
with the bounds that MPICH honours: the info key `timeout` (whole seconds) ends an Accept that
nobody answers; a bound on tries (`patience`) ends a Connect to a dead port, which ignores
`timeout`.

A fresh link is trusted after both sides have said the same serial over it. Each rendezvous agrees
on a new range of tags for its generation, so that nothing left over from an older one can match
(I13).
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from paceline.clock import NS_PER_S, now_ns, pause
from paceline.core.demand import SPARE_LINKS_MAX
from paceline.scratch import note_shared_memory
from paceline.transport.base import Group, TransportError
from paceline.transport.mpi.patience import Patience
from paceline.transport.mpi.process_manager import shared_memory_name
from paceline.transport.mpi.provider import check_provider
from paceline.transport.rendezvous import (
    POLL_S,
    Deadline,
    PeerClosedError,
    PeerConnection,
    Rendezvous,
)
from paceline.transport.variables import set_variable

LANES: Final = 4
"""Messages of one reduction run in this many independent lanes; each has its own tag."""
GENERATIONS_PER_LINK: Final = (1 << 30) // LANES - 1
SERIAL_TAG: Final = 0
WIRING_S: Final = 1
"""Bound of one Accept or Connect: the library's lock is held meanwhile, so it is short."""


def mpi_environment(local: bool) -> dict[str, str]:
    """What the environment of a rank must hold before MPI starts. Pure; for the agent."""
    environment = {
        "MPIR_CVAR_CH4_NETMOD": "ofi",  # ucx over tcp crashed
        "FI_PROVIDER": "tcp",
    }
    if local:
        environment["FI_TCP_IFACE"] = "lo"  # else it listens on outside addresses (D13)
    return environment


def start_mpi(local: bool, scratch: Path | None = None) -> Any:
    """Initialise MPI once, thread-multiple, never to be finalised (D6); returns mpi4py's module.

    Args:
        local: All ranks are on this machine.
        scratch: The rank's own folder. Whoever removes it removes the shared memory, too, that MPI
            leaves if the rank is killed in here.
    """
    try:
        import mpi4py
    except ImportError as error:
        raise TransportError(
            "spec.collective.backend: mpi needs mpi4py and mpich; hint: pip install mpi4py mpich"
        ) from error
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    if not MPI.Is_initialized():
        if "PMI_RANK" not in os.environ:
            raise TransportError(
                "mpi needs every rank to be started by its own `mpiexec -n 1`: measured, processes "
                "that start without it cannot accept a connection"
            )
        for key, value in mpi_environment(local).items():
            if key not in os.environ:  # what a fabric profile or the user says wins
                set_variable(key, value)
        check_provider(os.environ)
        if scratch is not None and (name := shared_memory_name(os.environ)):
            note_shared_memory(scratch, name)
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        _unlink_own_shared_memory()
    if os.environ.get("MPIR_CVAR_CH4_NETMOD") != "ofi":
        # Measured: with ucx, the default, a rank aborts when a peer dies inside a transfer.
        raise TransportError(
            "MPI in this process does not use MPICH's ofi network module; hint: leave "
            "MPIR_CVAR_CH4_NETMOD unset and do not initialise MPI before paceline"
        )
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise TransportError(
            "MPI was started by the script without thread support, so it spins without yielding; "
            "hint: let paceline start it, or set mpi4py.rc.thread_level = 'multiple'"
        )
    library = str(MPI.Get_library_version()).split("\n", 1)[0]
    if "MPICH" not in library:
        raise TransportError(
            f"mpi needs MPICH, found {library}: others cannot link processes that started alone; "
            "hint: pip install mpich"
        )
    # Errors must come back as exceptions: the default ends the process.
    MPI.COMM_SELF.Set_errhandler(MPI.ERRORS_RETURN)
    MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
    return MPI


def _unlink_own_shared_memory() -> None:
    """Remove the name of the file that MPICH maps for the ranks of this world: there is only us.

    MPICH removes it in Finalize, which we never call, so each rank would leave 1 MiB in /dev/shm.
    The mapping stays valid.
    """
    for connection in Path("/proc/self/maps").read_text().splitlines():
        path = connection.rpartition(" ")[2]
        if path.startswith("/dev/shm/mpich_shm_"):
            Path(path).unlink(missing_ok=True)


@dataclass(slots=True)
class Link:
    """One intercommunicator to one process."""

    peer: str
    serial: str
    comm: Any
    generations: int = 0
    """How many groups have used this link; the same number on both sides."""

    def tag(self, lane: int) -> int:
        return self.generations % GENERATIONS_PER_LINK * LANES + lane + 1


class Offer(msgspec.Struct, frozen=True):
    """The lower rank's message at a rendezvous."""

    serial: str
    """Of the link that it has to the other one; empty if it has none."""


class Agreed(msgspec.Struct, frozen=True):
    """The higher rank's answer to an `Offer`."""

    serial: str
    """Of the link that both will use."""
    generations: int
    """How many groups have used that link, this one included."""
    port: str = ""
    """Of MPI, where a new link is made; empty if both have this one already."""


class _Call(threading.Thread):
    """A library call that cannot be interrupted; the caller may stop waiting for it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(name="paceline-mpi-wiring", daemon=True)
        self._work = work
        self.done = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.result = self._work()
        except Exception as error:
            self.error = error
        finally:
            self.done.set()


class LinkTable:
    """All links of this process, by the peer's name, and the making of new ones."""

    def __init__(self, host: str, scratch: Path | None = None) -> None:
        self.mpi = start_mpi(local=host.startswith("127."), scratch=scratch)
        self._patience = Patience()
        self.rendezvous = Rendezvous(host)
        self.wired = 0
        self.wiring_failed = 0
        self._links: dict[str, Link] = {}
        self._running: _Call | None = None
        self._bound = self.mpi.Info.Create()
        self._bound.Set("timeout", str(WIRING_S))

    def settle(self, deadline: Deadline) -> None:
        """Wait until a call that an earlier group abandoned has returned."""
        if self._running is None:
            return
        while not self._running.done.wait(POLL_S):
            if deadline.left_s() <= 0:
                raise TransportError(
                    "a call of MPI never returned, so MPI in this process is unusable; "
                    "hint: restart this rank"
                )
            deadline.check("waiting for an abandoned call of MPI to return")
        late, self._running = self._running.result, None
        if late is not None:
            late.Free()

    def dial(self, group: Group, rank: int, deadline: Deadline) -> tuple[Link, PeerConnection]:
        """The lower rank's side of a rendezvous: offers the link it has, else connects."""
        name = group.peers[rank].name
        while True:
            known = self._links.get(name)
            offer = Offer(known.serial if known else "")
            agreed, connection = self.rendezvous.dial(group, rank, offer, Agreed, deadline)
            try:
                if known is not None and known.serial == agreed.serial:
                    known.generations = agreed.generations
                    return known, connection
                port, serial = agreed.port, agreed.serial
                connect = lambda port=port: self.mpi.COMM_SELF.Connect(port, self._bound)  # noqa: E731
                link = self._wire(name, serial, connect, deadline)
            except BaseException:
                connection.close()
                raise
            if link is not None:
                link.generations = agreed.generations
                return link, connection
            connection.close()

    def answer(self, group: Group, rank: int, deadline: Deadline) -> tuple[Link, PeerConnection]:
        """The higher rank's side of a rendezvous: agrees to the link both have, else accepts."""
        name = group.peers[rank].name
        while True:
            offer, connection = self.rendezvous.answer(group, rank, Offer, deadline)
            try:
                link = self._answer(name, offer, connection, deadline)
            except BaseException:
                connection.close()
                raise
            if link is not None:
                return link, connection
            connection.close()

    def _answer(
        self, name: str, offer: Offer, connection: PeerConnection, deadline: Deadline
    ) -> Link | None:
        known = self._links.get(name)
        if known is not None and known.serial == offer.serial:
            agreed = Agreed(known.serial, known.generations + 1)
        else:
            agreed = Agreed(uuid.uuid4().hex, 1, self.mpi.Open_port())
        try:
            connection.send(agreed)
        except PeerClosedError:
            return None
        port, serial = agreed.port, agreed.serial
        if not port:
            assert known is not None
            known.generations += 1
            return known
        accept = lambda: self.mpi.COMM_SELF.Accept(port, self._bound)  # noqa: E731
        link = self._wire(name, serial, accept, deadline)
        if link is not None:
            link.generations = 1
            # After a failure the port stays open: its tag must not be given to another rendezvous.
            self.mpi.Close_port(port)
        return link

    def _wire(
        self, name: str, serial: str, call: Callable[[], Any], deadline: Deadline
    ) -> Link | None:
        """Run Accept or Connect and check who is at the other end; None: it failed, try again."""

        def work() -> Any:
            with self._patience.raised():
                comm = call()
                comm.Set_errhandler(self.mpi.ERRORS_RETURN)
                self._say_serial(comm, serial)
            return comm

        self._running = running = _Call(work)
        running.start()
        while not running.done.wait(POLL_S):
            deadline.check(f"making a link to {name}")
        self._running = None
        if running.error is not None:
            self.wiring_failed += 1
            if not isinstance(running.error, (self.mpi.Exception, TransportError)):
                raise running.error
            deadline.check(f"making a link to {name} ({running.error})")
            return None
        self.wired += 1
        replaced = self._links.pop(name, None)
        if replaced is not None:
            replaced.comm.Free()
        link = self._links[name] = Link(name, serial, running.result)
        return link

    def _say_serial(self, comm: Any, serial: str) -> None:
        """Both sides send the serial they agreed on: a stale caller on a reused port differs."""
        mine = np.frombuffer(serial.encode(), dtype=np.uint8)
        theirs = np.zeros_like(mine)
        byte = self.mpi.BYTE
        requests = [
            comm.Irecv([theirs, byte], 0, SERIAL_TAG),
            comm.Isend([mine, byte], 0, SERIAL_TAG),
        ]
        end_ns = now_ns() + WIRING_S * NS_PER_S
        while not self.mpi.Request.Testall(requests):
            if now_ns() > end_ns:
                # The buffers must outlive the requests, which now nobody will wait for.
                _never_freed.append((mine, theirs, requests))
                raise TransportError("the other end of a fresh link says nothing")
            pause(0.0001)
        if not np.array_equal(mine, theirs):
            raise TransportError("the other end of a fresh link is somebody else")

    def forget_spares(self, in_use: set[str]) -> None:
        """Free the oldest links to processes outside the group, beyond a bound."""
        spare = [name for name in self._links if name not in in_use]
        for name in spare[: max(0, len(spare) - SPARE_LINKS_MAX)]:
            self._links.pop(name).comm.Free()


_never_freed: list[Any] = []
