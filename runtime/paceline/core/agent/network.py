"""Detection of the network that carries a rank's data channel to other pods.

No library is asked, since none reports what it really uses. A verdict follows from three things
that the agent reads beside the ranks:

- whether a process of the rank holds a device of the RDMA subsystem open, without which no
  verbs and no EFA traffic can come from it;
- how much the RDMA ports and the ordinary interfaces of the pod have sent;
- how much the rank's data channel has reduced meanwhile.

A rank whose channel reduces S bytes with other pods makes its pod send at least S; a ring, a
doubling or a tree sends more. So the ports or the interfaces must have sent at least half of S. If
neither has, the adapter has handed the data to a pod of its own node: RDMA.

Possible errors, and what is done about them:

- A port that pods share counts the traffic of all of them. The TCP of one pod passes for RDMA if
  the rank has a device open all the same, and the RDMA of another pod sends half as much through
  the same port.
- Interfaces count whatever the pod sends, such as the state for a joiner or a checkpoint to a file
  server. Where pods share an adapter, the kernel shows them no ports at all. So TCP is believed
  only after two windows in a row.
- A pod on the host's network reaches others of its node over loopback, which is not counted.
- Ranks of one pod need no network. Nothing is judged while the membership has no other pod.
- TCP over InfiniBand counts in the ports too. gloo never uses RDMA, and neither does a rank without
  an open device.
- A reduction in flight at the start of a window may have been sent before it. So a window holds
  several reductions.

GPUDirect is taken from NCCL's own log (`nccl_connections`). All connections of the pod's ranks over
the network must have it, and the ports must agree that it is RDMA.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from paceline_api.ids import MemberId
from paceline_api.types.enums import Network

ENOUGH_BYTES: Final = 4 << 20
"""Minimum number of reduced bytes in a window that is judged."""
REDUCTIONS_MIN: Final = 3
"""Minimum number of reductions in a window. One in flight at its start is then less than half of
it."""
RDMA_ABLE: Final = ("mpi", "hier:mpi", "nccl")
"""Transports that can use RDMA."""
NO_NETWORK: Final = ("shm",)
"""Transports that use no network, whichever pods the ranks are in."""
_CONNECTION: Final = re.compile(r"\[(?:send|receive)\] via NET/(.+)")
_DIRECT: Final = re.compile(r"/GDRDMA\b")


@dataclass(frozen=True, slots=True)
class Connections:
    """Counts of a rank's NCCL connections over the network, from NCCL's log."""

    direct: int = 0
    """Number of connections with GPUDirect RDMA."""
    other: int = 0
    """Number of all other connections."""

    def __add__(self, more: Connections) -> Connections:
        return Connections(self.direct + more.direct, self.other + more.other)


@dataclass(frozen=True, slots=True)
class RankReading:
    """Counters of one rank at one moment."""

    device_open: bool | None
    """True if a process of the rank holds /dev/infiniband/uverbs* open; None if unknown."""
    generation: tuple[float, ...]
    """Generation in force: incarnation and counter."""
    alone: bool
    """True if all members are in this pod, or if there is no membership yet."""
    reduced: Mapping[str, float]
    """Bytes of buffers since the start of the rank, by transport."""
    reductions: float
    """Number of reductions since the start of the rank."""
    connections: Connections = Connections()
    """NCCL connections of the rank over the network."""


@dataclass(frozen=True, slots=True)
class PodReading:
    """Counters of one pod and its ranks at one moment."""

    ports: Mapping[str, int]
    """Octets sent, by RDMA port; empty if no counters are visible."""
    interfaces: int | None
    """Octets sent by all other interfaces of the pod except loopback; None if unknown."""
    ranks: Mapping[MemberId, RankReading]
    """Readings of the living ranks, by member."""


@dataclass(slots=True)
class _Window:
    """Start of a period over which a rank is judged."""

    pod: PodReading
    rank: RankReading
    doubted: bool = False
    """True if the window before, of the same generation, looked like TCP."""


class Judge:
    """Judge of the networks that carry the data channels of one pod's ranks."""

    def __init__(self) -> None:
        self._windows: dict[MemberId, _Window] = {}
        self.verdicts: dict[MemberId, Network] = {}
        """Verdicts on the ranks of the last reading."""

    def look(self, reading: PodReading) -> None:
        """Take a reading; give a verdict on each rank whose window is full.

        The verdicts are in `verdicts`. A rank whose window is not full keeps its last one.

        Args:
            reading: Counters of the pod and its ranks now.
        """
        windows, self._windows = self._windows, {}
        before, self.verdicts = self.verdicts, {}
        for member, rank in reading.ranks.items():
            window = windows.get(member)
            verdict = before.get(member, Network.UNKNOWN)
            if rank.alone:
                self.verdicts[member] = Network.UNKNOWN
                continue
            if window is None or window.rank.generation != rank.generation:
                window = _Window(reading, rank)
            elif _is_full(window.rank, rank):
                could_be = _could_be_rdma(window.rank, rank)
                network = _judged(window, reading, rank) if could_be else Network.TCP
                # One window may hold other traffic, such as a joiner's state or a checkpoint.
                doubts = could_be and network is Network.TCP
                if not doubts or window.doubted:
                    verdict = network
                window = _Window(reading, rank, doubted=doubts)
            self._windows[member], self.verdicts[member] = window, verdict
        connections = sum((r.connections for r in reading.ranks.values()), Connections())
        direct = connections.direct > 0 and connections.other == 0
        for member, verdict in self.verdicts.items():
            if verdict in (Network.RDMA, Network.GPUDIRECT):
                self.verdicts[member] = Network.GPUDIRECT if direct else Network.RDMA

    @property
    def is_settled(self) -> bool:
        """Return True if every rank of the last reading has a verdict."""
        return all(self.verdicts.values())


def _is_full(first: RankReading, last: RankReading) -> bool:
    reductions = last.reductions - first.reductions
    return reductions >= REDUCTIONS_MIN and _reduced(first, last) >= ENOUGH_BYTES


def _reduced(first: RankReading, last: RankReading, names: Iterable[str] = ()) -> float:
    names = names or [name for name in last.reduced if name not in NO_NETWORK]
    return sum(last.reduced.get(name, 0.0) - first.reduced.get(name, 0.0) for name in names)


def _could_be_rdma(first: RankReading, last: RankReading) -> bool:
    able = _reduced(first, last, RDMA_ABLE)
    return last.device_open is not False and able >= _reduced(first, last) / 2


def _judged(window: _Window, pod: PodReading, rank: RankReading) -> Network:
    """Return the network of a rank that could use RDMA, from what its pod has sent."""
    able = _reduced(window.rank, rank, RDMA_ABLE)
    if rank.device_open is None:
        return Network.UNKNOWN
    before = window.pod.ports
    sent = sum(max(0, octets - before.get(port, octets)) for port, octets in pod.ports.items())
    if sent >= able / 2:
        return Network.RDMA
    if pod.interfaces is None or window.pod.interfaces is None:
        return Network.TCP if pod.ports else Network.UNKNOWN
    beside = pod.interfaces - window.pod.interfaces
    return Network.TCP if beside >= able / 2 else Network.RDMA


def worst(verdicts: Iterable[Network]) -> Network:
    """Return the network of a job, from those of its members.

    Args:
        verdicts: The verdicts on all members.

    Returns:
        TCP if one is on TCP; else UNKNOWN if one is unknown; else the slower of those left. UNKNOWN
        for no members.
    """
    order = (Network.TCP, Network.UNKNOWN, Network.RDMA, Network.GPUDIRECT)
    return min(verdicts, key=order.index, default=Network.UNKNOWN)


def nccl_connections(lines: Iterable[str]) -> Connections:
    """Return the connections over the network in lines of NCCL's log.

    The log is written with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET. Such a line is

        node-0:70:81 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA

    Args:
        lines: Lines of the log; others are ignored.

    Returns:
        The number of connections with and without GPUDirect RDMA.
    """
    connections = [match.group(1) for match in map(_CONNECTION.search, lines) if match]
    direct = sum(_DIRECT.search(text) is not None for text in connections)
    return Connections(direct, len(connections) - direct)
