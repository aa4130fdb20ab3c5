"""Links of MPI between pairs of ranks, made without a launcher and kept across generations.

A link is an intercommunicator made by Open_port, Accept and Connect. Measured with MPICH 5.0.2 (ofi
netmod, tcp provider): Accept and Connect hold the lock of the library while they wait. So they are
called only when the pair has met (`rendezvous`), one at a time, in a throw-away thread, with the
bounds that MPICH honors: the info key `timeout` (whole seconds) ends an Accept that nobody answers;
a bound on tries (`patience`) ends a Connect to a dead port, which ignores `timeout`.

A new link is trusted after both sides have sent the same serial over it. Each rendezvous agrees on
a new range of tags for its generation, so no message left over from an older one can match (I13).
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
from paceline_api.times import NS_PER_S

from paceline.clock import now_ns, pause
from paceline.core.demand import SPARE_LINKS_MAX
from paceline.scratch import note_shared_memory
from paceline.transport.base import Group, TransportError
from paceline.transport.mpi.patience import RetrySetting
from paceline.transport.mpi.peer_errors import peer_errors
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
"""Number of independent lanes in which the messages of one reduction run. Each lane has its own
tag."""
GENERATIONS_PER_LINK: Final = (1 << 30) // LANES - 1
SERIAL_TAG: Final = 0
WIRING_S: Final = 1
"""Bound of one Accept or Connect in seconds. It is short, since the library's lock is held
meanwhile."""


def mpi_environment(local: bool) -> dict[str, str]:
    """Return the variables that MPI needs before it starts. `start_mpi` sets those missing."""
    environment = {
        "MPIR_CVAR_CH4_NETMOD": "ofi",  # ucx over tcp crashed
        "FI_PROVIDER": "tcp",
    }
    if local:
        environment["FI_TCP_IFACE"] = "lo"  # otherwise it listens on external addresses (D13)
    return environment


def start_mpi(local: bool, scratch: Path | None = None) -> Any:
    """Initialize MPI once, with MPI_THREAD_MULTIPLE. It is never finalized (D6).

    Args:
        local: True if all ranks are on this machine.
        scratch: The rank's own folder. Shared memory that MPI leaves if the rank is killed during
            the start is recorded there and removed together with the folder.

    Returns:
        The module `mpi4py.MPI`.

    Raises:
        TransportError: MPI is missing, is no MPICH, or was started in a way that cannot work.
    """
    try:
        import mpi4py
    except ImportError as error:
        raise TransportError(
            "spec.collective.backend: mpi needs mpi4py and mpich; hint: pip install mpi4py mpich"
        ) from error
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    peer_errors.watch()
    from mpi4py import MPI

    if not MPI.Is_initialized():
        if "PMI_RANK" not in os.environ:
            raise TransportError(
                "mpi needs every rank to be started by its own `mpiexec -n 1`: measured, processes "
                "that start without it cannot accept a connection"
            )
        for key, value in mpi_environment(local).items():
            if key not in os.environ:  # a fabric profile or the user has precedence
                set_variable(key, value)
        check_provider(os.environ)
        if scratch is not None and (name := shared_memory_name(os.environ)):
            note_shared_memory(scratch, name)
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        _unlink_own_shared_memory()
    peer_errors.check()
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
    # Errors must become exceptions: MPI's default ends the process.
    MPI.COMM_SELF.Set_errhandler(MPI.ERRORS_RETURN)
    MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
    return MPI


def _unlink_own_shared_memory() -> None:
    """Remove the name of the file that MPICH maps for the ranks of this world: this rank alone.

    MPICH removes it in MPI_Finalize, which is never called, so each rank would leave 1 MiB in
    /dev/shm. The mapping stays valid.
    """
    for connection in Path("/proc/self/maps").read_text().splitlines():
        path = connection.rpartition(" ")[2]
        if path.startswith("/dev/shm/mpich_shm_"):
            Path(path).unlink(missing_ok=True)


@dataclass(slots=True)
class Link:
    """An intercommunicator to one process."""

    peer: str
    serial: str
    comm: Any
    generations: int = 0
    """Number of groups that have used this link. The same on both sides."""

    def tag(self, lane: int) -> int:
        """Return the tag of a lane in the present generation."""
        return self.generations % GENERATIONS_PER_LINK * LANES + lane + 1


class Offer(msgspec.Struct, frozen=True):
    """Message of the lower rank at a rendezvous."""

    serial: str
    """Serial of the sender's link to the other rank. Empty if it has none."""


class Agreed(msgspec.Struct, frozen=True):
    """The higher rank's answer to an `Offer`."""

    serial: str
    """Serial of the link that both will use."""
    generations: int
    """Number of groups that have used that link, including this one."""
    port: str = ""
    """Port of MPI at which a new link is made. Empty if both already have this one."""


class _Call(threading.Thread):
    """Thread for a library call that cannot be interrupted. The caller may stop waiting for it."""

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
    """The links of this process by the peer's name. It makes new ones."""

    def __init__(self, host: str, scratch: Path | None = None) -> None:
        self.mpi = start_mpi(local=host.startswith("127."), scratch=scratch)
        self._patience = RetrySetting()
        self.rendezvous = Rendezvous(host)
        self.wired = 0
        self.wiring_failed = 0
        self._links: dict[str, Link] = {}
        self._running: _Call | None = None
        self._bound = self.mpi.Info.Create()
        self._bound.Set("timeout", str(WIRING_S))

    def settle(self, deadline: Deadline) -> None:
        """Wait until a call that an earlier group abandoned has returned.

        Args:
            deadline: When to give up.

        Raises:
            TransportError: The call never returned, so MPI in this process is unusable.
        """
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
        """Meet a higher rank as the dialing side: offer the link that exists, else connect."""
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
        """Meet a lower rank as the answering side: agree to the common link, else accept."""
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
            # After a failure the port stays open, so that no other rendezvous reuses its tag.
            self.mpi.Close_port(port)
        return link

    def _wire(
        self, name: str, serial: str, call: Callable[[], Any], deadline: Deadline
    ) -> Link | None:
        """Run Accept or Connect and check who is at the other end.

        An unexpected error of the call is raised again here. It raises TransportError if the
        deadline passes or the abort flag is raised.

        Args:
            name: Name of the peer.
            serial: Serial of the new link.
            call: Accept or Connect.
            deadline: When to give up.

        Returns:
            The link, or None if the call failed and should be tried again.
        """

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
        """Exchange the agreed serial with the other end.

        A stale caller on a reused port has another one.

        Args:
            comm: The new intercommunicator.
            serial: The agreed serial.

        Raises:
            TransportError: The other end sends nothing, or another serial.
        """
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
                # The buffers must outlive the requests, which nobody waits for any more.
                _never_freed.append((mine, theirs, requests))
                raise TransportError("the other end of a new link sends nothing")
            pause(0.0001)
        if not np.array_equal(mine, theirs):
            raise TransportError("the other end of a new link is somebody else")

    def forget_spares(self, in_use: set[str]) -> None:
        """Free the oldest links to processes outside the group, beyond SPARE_LINKS_MAX."""
        spare = [name for name in self._links if name not in in_use]
        for name in spare[: max(0, len(spare) - SPARE_LINKS_MAX)]:
            self._links.pop(name).comm.Free()


_never_freed: list[Any] = []
