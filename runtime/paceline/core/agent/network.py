"""What carries the bytes of the data channel from a pod to the others: a verdict for each rank.

Nothing is asked of a library, since none says what it really uses. A verdict follows from what the
agent reads beside the ranks: whether a process of the rank holds a device of the RDMA subsystem
open, without which no verbs and no EFA traffic can come from it; how much the RDMA ports and the
ordinary interfaces of the pod have sent; and how much its data channel has reduced meanwhile. A
rank whose channel reduces S bytes with other pods makes its pod send at least S (a ring, a doubling
or a tree sends more), so the ports or the interfaces must have sent half of S at least. If neither
has, the adapter has handed it to a pod of its own node: RDMA.

What can fool it, and what is done about it. A port that pods share counts the traffic of all of
them: one pod's TCP passes for RDMA if the rank has a device open all the same and somebody else's
RDMA sends half as much through the same port. Interfaces count whatever the pod sends, such as the
state for a joiner or a checkpoint to a file server, and where pods share an adapter the kernel
shows them no ports at all: TCP is believed only of two windows in a row. A pod on the host's
network reaches others of its node over loopback, which is not counted. Ranks of one pod need no
network: nothing is judged while there is no other pod in the membership. TCP over InfiniBand counts
in the ports too: gloo never uses RDMA, and neither does a rank without an open device. A reduction
in flight when a window begins may have been sent already: a window holds several.

GPUDirect is NCCL's own word, from its log (`nccl_connections`): all connections of the pod's ranks
over the network must have it, and the ports must agree that it is RDMA.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from paceline.core.messages import Network
from paceline.core.protocol.ids import MemberId

ENOUGH_BYTES: Final = 4 << 20
"""A window in which less was reduced says nothing."""
REDUCTIONS_MIN: Final = 3
"""Of a window, so that the one in flight at its beginning is less than half of it."""
RDMA_ABLE: Final = ("mpi", "hier:mpi", "nccl")
NO_NETWORK: Final = ("shm",)
"""What needs none, on whichever pods the ranks are."""
_CONNECTION: Final = re.compile(r"\[(?:send|receive)\] via NET/(.+)")
_DIRECT: Final = re.compile(r"/GDRDMA\b")


@dataclass(frozen=True, slots=True)
class Connections:
    """What a rank's NCCL has said of its connections over the network."""

    direct: int = 0
    """With GPUDirect RDMA."""
    other: int = 0

    def __add__(self, more: Connections) -> Connections:
        return Connections(self.direct + more.direct, self.other + more.other)


@dataclass(frozen=True, slots=True)
class RankReading:
    device_open: bool | None
    """A process of the rank holds /dev/infiniband/uverbs* open; None: it cannot be seen."""
    generation: tuple[float, ...]
    """In force: incarnation and number."""
    alone: bool
    """All members are in this pod, or there is no membership yet."""
    reduced: Mapping[str, float]
    """By transport: bytes of buffers since the start of the rank."""
    reductions: float
    connections: Connections = Connections()


@dataclass(frozen=True, slots=True)
class PodReading:
    ports: Mapping[str, int]
    """By port: octets sent. Empty: no counters can be seen."""
    interfaces: int | None
    """Octets sent by the pod's other interfaces but loopback; None: they cannot be seen."""
    ranks: Mapping[MemberId, RankReading]


@dataclass(slots=True)
class _Window:
    pod: PodReading
    rank: RankReading
    doubted: bool = False
    """The one before it, of the same generation, looked like TCP."""


class Judge:
    """Keeps the beginning of each rank's window and its last verdict."""

    def __init__(self) -> None:
        self._windows: dict[MemberId, _Window] = {}
        self.verdicts: dict[MemberId, Network] = {}
        """Of the ranks of the last reading."""

    def look(self, reading: PodReading) -> None:
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
                found = _judged(window, reading, rank) if could_be else Network.TCP
                # Something else may have gone out once: the state for a joiner, a checkpoint.
                doubts = could_be and found is Network.TCP
                if not doubts or window.doubted:
                    verdict = found
                window = _Window(reading, rank, doubted=doubts)
            self._windows[member], self.verdicts[member] = window, verdict
        connections = sum((r.connections for r in reading.ranks.values()), Connections())
        direct = connections.direct > 0 and connections.other == 0
        for member, verdict in self.verdicts.items():
            if verdict in (Network.RDMA, Network.GPUDIRECT):
                self.verdicts[member] = Network.GPUDIRECT if direct else Network.RDMA

    @property
    def is_settled(self) -> bool:
        """Nobody's verdict is missing."""
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
    """Of a rank that could use RDMA."""
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
    """Of a job, from those of its members: one on TCP is enough for TCP, one that is not known yet
    for anything else."""
    order = (Network.TCP, Network.UNKNOWN, Network.RDMA, Network.GPUDIRECT)
    return min(verdicts, key=order.index, default=Network.UNKNOWN)


def nccl_connections(lines: Iterable[str]) -> Connections:
    """What lines of NCCL's log say, written with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET:

    node-0:70:81 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
    """
    found = [match.group(1) for match in map(_CONNECTION.search, lines) if match]
    direct = sum(_DIRECT.search(text) is not None for text in found)
    return Connections(direct, len(found) - direct)
