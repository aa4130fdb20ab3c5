"""The rendezvous of ranks on one machine: a socket without a file, which passes descriptors.

Ranks find out from their published addresses whether they share a machine. An address names the
boot of the kernel and the network namespace, in which the name of an abstract socket is valid. Each
pod has its own namespace, so the ranks of a pod meet here, and all ranks of `paceline run`. The
name holds 128 random bits but is visible in /proc/net/unix, so callers of another user are closed
unread.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from paceline.limits import LISTEN_BACKLOG
from paceline.peer_credentials import credentials_of
from paceline.refusals import RefusalReason
from paceline.transport.base import Group, TransportError
from paceline.transport.rendezvous import (
    BOOT_ID,
    POLL_S,
    Deadline,
    PeerClosedError,
    PeerConnection,
    PeerRefusedError,
    Rendezvous,
    readable,
)

NETWORK: Final = Path("/proc/self/ns/net")
DESCRIPTORS: Final = 2
"""Number of descriptors that a rank passes: its memory and its eventfd."""


Place = Annotated[int, msgspec.Meta(ge=0)]


class MachineFacts(msgspec.Struct, frozen=True):
    """Message of one rank of a machine to another. The descriptors follow it."""

    memory: Place
    """Size of the rank's memory in bytes."""
    block: Place
    """Offset of the rank's block in its memory, in bytes."""
    mark: Place
    """Mark of the block in this generation."""


def machine_place() -> str:
    """Return a text that is equal in two processes if they can meet here.

    Returns:
        Boot id and network namespace.

    Raises:
        TransportError: The kernel does not provide them.
    """
    try:
        network = NETWORK.stat()
        return f"{BOOT_ID.read_text().strip()}.{network.st_dev}.{network.st_ino}"
    except OSError as error:
        raise TransportError(f"shm cannot tell which machine this is: {error}") from error


def place_of(address: str) -> str:
    """Return the machine's part of an address."""
    return address.rpartition("/")[0]


class LocalRendezvous(Rendezvous):
    """A rendezvous over an abstract Unix socket."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._name = f"paceline-{secrets.token_hex(16)}"
        super().__init__("this machine")

    def _listen(self, host: str) -> socket.socket:  # noqa: ARG002
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0{self._name}")
        listener.listen(LISTEN_BACKLOG)
        return listener

    def _target(self, address: str) -> tuple[socket.socket, Any]:
        return socket.socket(socket.AF_UNIX), "\0" + address.rpartition("/")[2]

    def _admit(self, sock: socket.socket) -> str:
        caller = credentials_of(sock)
        if caller.uid != os.geteuid():
            raise PeerRefusedError(RefusalReason.OTHER_USER, str(caller))
        return str(caller)

    @property
    def address(self) -> str:
        """The machine and the name of the socket."""
        return f"{self._place}/{self._name}"

    def swap(
        self,
        group: Group,
        rank: int,
        facts: MachineFacts,
        own: Sequence[int],
        deadline: Deadline,
    ) -> tuple[MachineFacts, list[int], PeerConnection]:
        """Meet a rank and exchange facts and descriptors with it.

        It raises TransportError if the deadline passes or the abort flag is raised.

        Args:
            group: The generation that is being wired.
            rank: Index of the peer in the group.
            facts: Message of this rank.
            own: Descriptors of this rank to pass. They stay open here.
            deadline: When to give up.

        Returns:
            The peer's facts, its descriptors, and the connection, which stays silent from then on.
            The caller owns both.
        """
        what = f"taking the memory of rank {rank} ({group.peers[rank].name})"
        while True:
            dials = rank > group.rank
            theirs, connection = (
                self.dial(group, rank, facts, MachineFacts, deadline)
                if dials
                else self.answer(group, rank, MachineFacts, deadline)
            )
            try:
                # Take turns: plain bytes ahead of the descriptors would make the kernel drop them.
                if dials:
                    _give(connection, own)
                    return theirs, _take(connection, deadline, what, rank), connection
                connection.send(facts)
                taken = _take(connection, deadline, what, rank)
                _give(connection, own)
            except PeerClosedError:
                connection.close()  # it has given up this call, and may call again
                deadline.pause(POLL_S, what, rank)
            except BaseException:
                connection.close()
                raise
            else:
                return theirs, taken, connection


def _give(connection: PeerConnection, descriptors: Sequence[int]) -> None:
    try:
        socket.send_fds(connection.sock, [b"."], list(descriptors))
    except OSError as error:
        raise PeerClosedError(str(error)) from error


def _take(connection: PeerConnection, deadline: Deadline, what: str, rank: int) -> list[int]:
    while True:
        try:
            data, descriptors, flags, _ = socket.recv_fds(
                connection.sock, 1, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            deadline.check(what, rank)
            readable(connection, min(POLL_S, deadline.left_s()))
            continue
        except OSError as error:
            raise PeerClosedError(str(error)) from error
        if len(descriptors) == DESCRIPTORS and not flags & socket.MSG_CTRUNC:
            return descriptors
        for fd in descriptors:
            os.close(fd)
        if data:
            raise TransportError("no room for the descriptors of a rank; hint: raise ulimit -n")
        raise PeerClosedError("connection closed")
