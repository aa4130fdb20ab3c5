"""Runs a reduction over MPI with the native loop: one call without the interpreter lock.

docs/design/data-channel.md says why it is needed.

All that the loop needs is laid out here as plain memory: the steps of each algorithm and the links
once per group, the buffers once per call. If the loop ends early, its open requests are returned as
requests of mpi4py, to be kept like those of the loop in Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from paceline.core.collectives.schedules import Schedule, ScheduleStep
from paceline.transport.base import Abort, NativeStage, PeerLost, TransportAborted
from paceline.transport.mpi.lanes import CUT_OFF, PIECE_BYTES, Cells, LaneScratch, failed_call
from paceline.transport.mpi.links import LANES, Link
from paceline.transport.native import REDUCE, UnavailableError, load
from paceline.transport.native.layout import KINDS, Fields
from paceline.transport.rendezvous import LAST_WORDS_NS, PeerConnections

ABORTED, LOST, FAILED, CUT = 1, 2, 3, 4


class _Mpi(ctypes.Structure):
    _fields_: ClassVar[Fields] = [
        ("irecv", ctypes.c_void_p),
        ("isend", ctypes.c_void_p),
        ("testsome", ctypes.c_void_p),
        ("get_count", ctypes.c_void_p),
        ("byte", ctypes.c_int),
        ("request_null", ctypes.c_int),
    ]


class _Step(ctypes.Structure):
    _fields_: ClassVar[Fields] = [
        (name, ctypes.c_int32)
        for name in [
            "send_to",
            "send_chunk",
            "recv_from",
            "recv_chunk",
            "width",
            "reduce",
            "sent",
            "made",
        ]
    ]


class _Link(ctypes.Structure):
    _fields_: ClassVar[Fields] = [("comm", ctypes.c_int), ("tag", ctypes.c_int32)]


class _Buffer(ctypes.Structure):
    _fields_: ClassVar[Fields] = [
        ("data", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("itemsize", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("residual", ctypes.c_void_p),
    ]


class _PollFd(ctypes.Structure):
    _fields_: ClassVar[Fields] = [
        ("fd", ctypes.c_int),
        ("events", ctypes.c_short),
        ("revents", ctypes.c_short),
    ]


class _Stage(ctypes.Structure):
    _fields_: ClassVar[Fields] = [
        ("make", ctypes.c_void_p),
        ("take", ctypes.c_void_p),
        ("owner", ctypes.c_void_p),
    ]


class _Call(ctypes.Structure):
    _fields_: ClassVar[Fields] = [
        ("mpi", ctypes.POINTER(_Mpi)),
        ("links", ctypes.POINTER(_Link)),
        ("steps", ctypes.POINTER(_Step)),
        ("step_count", ctypes.c_int32),
        ("chunks", ctypes.c_int32),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("buffer_count", ctypes.c_int32),
        ("lane_count", ctypes.c_int32),
        ("scratch", ctypes.POINTER(ctypes.c_void_p)),
        ("leaving", ctypes.POINTER(ctypes.c_void_p)),
        ("piece_bytes", ctypes.c_int64),
        ("requests", ctypes.POINTER(ctypes.c_int)),
        ("abort", ctypes.POINTER(ctypes.c_int32)),
        ("connections", ctypes.POINTER(_PollFd)),
        ("connection_count", ctypes.c_int32),
        ("lost", ctypes.c_int32),
        ("last_words_ns", ctypes.c_int64),
        ("stage", _Stage),
    ]


class MpiNativeLoop:
    """The C library with MPI's functions, and the data that it needs about the present group."""

    def __init__(self, mpi: Any) -> None:
        """Load the library and look up MPI's functions.

        Args:
            mpi: The module `mpi4py.MPI`.

        Raises:
            UnavailableError: There is no library for this build of MPI.
        """
        if mpi._sizeof(mpi.COMM_WORLD) != ctypes.sizeof(ctypes.c_int):  # noqa: SLF001
            raise UnavailableError("this build of mpi4py does not use MPICH's ABI")
        self._run = load(REDUCE).paceline_reduce
        self._run.argtypes = [ctypes.POINTER(_Call), ctypes.POINTER(ctypes.c_int)]
        library = ctypes.CDLL("libmpi.so.12")  # the one that mpi4py has loaded
        self._library = mpi
        self._mpi = _Mpi(
            *(
                ctypes.cast(getattr(library, f"MPI_{name}"), ctypes.c_void_p)
                for name in ("Irecv", "Isend", "Testsome", "Get_count")
            ),
            mpi.BYTE.handle,
            mpi.REQUEST_NULL.handle,
        )
        self._steps: dict[str, Any] = {}
        self._links: Any = None
        self._fds: Any = None
        self._rank_of: list[int] = []
        self._rank_of_link: list[int] = []

    def enter(
        self,
        schedules: Mapping[str, Schedule],
        link_to: Mapping[int, Link],
        connections: PeerConnections,
    ) -> None:
        """Lay out the steps of each algorithm and the links of a new group."""
        self._rank_of_link = list(link_to)
        place = {rank: index for index, rank in enumerate(link_to)}
        self._links = (_Link * len(link_to))(
            *(_Link(link.comm.handle, link.tag(0)) for link in link_to.values())
        )
        watched = connections.watched()
        self._rank_of = [rank for _, rank, _ in watched]
        self._fds = (_PollFd * len(watched))(*(_PollFd(fd, e, 0) for fd, _, e in watched))
        self._steps = {
            name: (_Step * len(plan.steps))(*(_step(step, place) for step in plan.steps))
            for name, plan in schedules.items()
        }

    def reduce(
        self,
        algorithm: str,
        plan: Schedule,
        cells: Sequence[Cells],
        scratch: LaneScratch,
        abort: Abort,
        requests: list[Any],
        stage: NativeStage | None = None,
    ) -> None:
        """Sum the buffers of `cells` in place, like the loop in Python.

        Args:
            algorithm: Name of the algorithm.
            plan: Its schedule for this rank.
            cells: The buffers. All their types are in `layout.KINDS`.
            scratch: Memory for messages. The call may leave requests that still use it.
            abort: Ends the call when it is raised.
            requests: After an error the open requests are appended here: receive and send of each
                lane in turn.
            stage: Fills the buffers while the loop runs. None if they are complete.

        Raises:
            TransportAborted: The abort flag was raised.
            PeerLost: A peer has gone, or a call of MPI failed.
        """
        buffers = (_Buffer * len(cells))(
            *(
                _Buffer(
                    c.tensor.data_ptr(),
                    len(c.tensor),
                    c.itemsize,
                    KINDS[c.tensor.dtype],
                    c.residual.data_ptr() if c.residual is not None else None,
                )
                for c in cells
            )
        )
        pieces = sum(-(-len(c.tensor) * c.itemsize // PIECE_BYTES) for c in cells)
        lanes = min(LANES, pieces)
        null = self._mpi.request_null
        handles = (ctypes.c_int * (2 * lanes))(*[null] * (2 * lanes))
        call = _Call(
            ctypes.pointer(self._mpi),
            self._links,
            self._steps[algorithm],
            len(plan.steps),
            plan.chunks,
            buffers,
            len(cells),
            lanes,
            (ctypes.c_void_p * LANES)(*(part.ctypes.data for part in scratch.arriving)),
            (ctypes.c_void_p * LANES)(*(part.ctypes.data for part in scratch.leaving)),
            PIECE_BYTES,
            handles,
            ctypes.pointer(abort.flag),
            self._fds,
            len(self._fds),
            0,
            LAST_WORDS_NS,
            _Stage(stage.make, stage.take, stage.owner) if stage else _Stage(),
        )
        error = ctypes.c_int()
        result = self._run(ctypes.byref(call), ctypes.byref(error))
        if result == 0:
            return
        # mpi4py represents a handle as an unsigned number.
        requests += [self._library.Request.fromhandle(h & 0xFFFFFFFF) for h in handles]
        if result == ABORTED:
            raise TransportAborted("abandoned in a reduction")
        if result == LOST:
            rank = self._rank_of[call.lost]
            raise PeerLost(f"rank {rank} has gone", rank)
        if result == CUT:
            rank = self._rank_of_link[call.lost]
            raise PeerLost(CUT_OFF.format(rank), rank)
        assert result == FAILED, result
        raise PeerLost(failed_call(self._library.Get_error_string(error.value)))


def _step(step: ScheduleStep, place: Mapping[int, int]) -> _Step:
    """Return a step in C, with indices of links instead of ranks."""
    to = -1 if step.send_to is None else place[step.send_to]
    source = -1 if step.recv_from is None else place[step.recv_from]
    return _Step(
        to,
        step.send_chunk,
        source,
        step.recv_chunk,
        step.width,
        step.reduce,
        step.sent,
        step.made,
    )
