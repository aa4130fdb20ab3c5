"""gRPC+MPI, re-implemented: the parameter server's control uses gRPC, its tensors use MPI.

A worker announces a tensor by gRPC and sends it by MPI. The server receives it and, when all
workers have sent it, sends the new weights back by MPI. One thread of the server does all of its
MPI calls.
"""

from __future__ import annotations

import os
import queue
import struct
import threading
from collections.abc import Sequence
from concurrent import futures
from itertools import pairwise
from typing import Any, Final

import grpc
import mpi4py

mpi4py.rc.thread_level = "multiple"

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

from benchmarks.rivals.rank import RATE, Array, System, Trainer  # noqa: E402

METHOD: Final = "/rivals.Control/Coming"
WORD: Final = struct.Struct("<qqqq")
"""Announcement: rank; model (0: only sum), tensor, elements."""
START_S: Final = 60.0
REPLY_TAG: Final = 16384
"""Offset that is added to the tag of a reply."""


class Server(System):
    """Parameter server, the last rank of the MPI world."""

    serves = True

    def __init__(self, ranks: int) -> None:
        self.rank = self.ranks = ranks
        self._coming: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        server = grpc.server(futures.ThreadPoolExecutor(1))
        coming = grpc.unary_unary_rpc_method_handler(self._on_message)
        handlers = grpc.method_handlers_generic_handler("rivals.Control", {"Coming": coming})
        server.add_generic_rpc_handlers((handlers,))
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        self._server = server

    def _on_message(self, word: bytes, _: Any) -> bytes:
        self._coming.put(word)
        return b""

    def open(self, addresses: list[str]) -> None:  # noqa: ARG002
        """Start the thread that receives tensors."""
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        world = MPI.COMM_WORLD
        sums: dict[tuple[int, int, int], tuple[Array, Array, list[int]]] = {}
        received = np.empty(1, np.float32)
        while True:
            rank, model, index, elements = WORD.unpack(self._coming.get())
            if len(received) < elements:
                received = np.empty(elements, np.float32)
            key = model, index, elements
            if key not in sums:
                sums[key] = np.zeros(elements, np.float32), np.zeros(elements, np.float32), []
            total, weights, come = sums[key]
            world.Recv(received[:elements], rank, tag=index)
            total += received[:elements]
            come.append(rank)
            if len(come) == self.ranks:
                if model:
                    weights -= total * np.float32(RATE / self.ranks)
                back = weights if model else total
                MPI.Request.Waitall(
                    [world.Isend(back, to, tag=REPLY_TAG + index) for to in sorted(come)]
                )
                total.fill(0.0)
                come.clear()


class Worker(System):
    """Rank that trains."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._models = 0
        self._requests: list[MPI.Request] = []
        self._words: list[Any] = []

    def facts(self) -> dict[str, str]:
        """Return versions and settings of the system."""
        library = " ".join(MPI.Get_library_version().split("\n", 1)[0].split())
        return {"grpcio": grpc.__version__, "library": library}

    def open(self, addresses: list[str]) -> None:
        """Connect to the server."""
        self._channel = grpc.insecure_channel(addresses[-1])
        grpc.channel_ready_future(self._channel).result(START_S)
        self._coming = self._channel.unary_unary(METHOD)

    def exchange(self, model: int, index: int, gradient: Array, into: Array) -> None:
        """Begin to exchange a gradient for weights; `wait` completes all exchanges."""
        word = WORD.pack(self.rank, model, index, len(gradient))
        self._words.append(self._coming.future(word))  # gRPC cancels a call whose future is dropped
        world, server = MPI.COMM_WORLD, self.ranks
        self._requests.append(world.Isend(gradient, server, tag=index))
        self._requests.append(world.Irecv(into, server, tag=REPLY_TAG + index))

    def wait(self) -> None:
        """Wait for all exchanges that have begun."""
        MPI.Request.Waitall(self._requests)
        for word in self._words:
            word.result()
        self._requests.clear()
        self._words.clear()

    def allreduce(self, buffer: Array) -> None:
        """Sum a buffer on the server."""
        into = np.empty_like(buffer)
        self.exchange(0, 0, buffer, into)
        self.wait()
        buffer[:] = into

    def trainer(self, tensors: Sequence[int]) -> Trainer:
        """Return a loop that exchanges each tensor."""
        self._models += 1
        return Exchanged(self, tensors, self._models)


class Exchanged(Trainer):
    """Loop that exchanges each tensor's gradient for weights as soon as it is ready."""

    def __init__(self, system: Worker, tensors: Sequence[int], model: int) -> None:
        super().__init__(system, tensors)
        self._worker, self._model = system, model
        bounds = np.cumsum([0, *tensors])
        self._weights = [self.weights[a:b] for a, b in pairwise(bounds)]

    def ready(self, index: int) -> None:
        """Begin the exchange of this tensor."""
        self._worker.exchange(self._model, index, self.parts[index], self._weights[index])

    def finish(self) -> None:
        """Wait for the new weights."""
        self._worker.wait()


def make(_: list[str]) -> System:
    """Return the server or a worker, by the rank of this process."""
    rank, ranks = MPI.COMM_WORLD.Get_rank(), int(os.environ["RIVALS_RANKS"])
    return Server(ranks) if rank == ranks else Worker(rank, ranks)
