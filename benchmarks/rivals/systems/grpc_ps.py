"""A parameter server over plain gRPC: what the transport alone costs, without a framework.

The server is a process of its own. A worker pushes each tensor's gradient when it is ready. The
answer is the new weights, sent when all workers have pushed. So a step carries every byte twice for
each worker, through one process. A bulk sum is the same without an update.
"""

from __future__ import annotations

import asyncio
import os
import struct
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import grpc
import numpy as np

from benchmarks.rivals.rank import RATE, Array, System, Trainer

METHOD: Final = "/rivals.Server/Push"
KEY: Final = struct.Struct("<qq")
"""Key of a push: model (0: only sum), tensor."""
UNBOUNDED: Final = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
START_S: Final = 60.0


class Slot:
    """One tensor on the server: the gradients pushed in this step, and the weights."""

    def __init__(self, elements: int) -> None:
        self.sum = np.zeros(elements, np.float32)
        self.weights = np.zeros(elements, np.float32)
        self.pushed = 0
        self.news: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def next(self, *, update: bool, ranks: int) -> None:
        """Answer all workers after the last push, and begin the next step."""
        if update:
            self.weights -= self.sum * np.float32(RATE / ranks)
        self.news.set_result((self.weights if update else self.sum).tobytes())
        self.news = asyncio.get_running_loop().create_future()
        self.sum.fill(0.0)
        self.pushed = 0


class Server(System):
    """Parameter server; it has no gradients of its own."""

    serves = True

    def __init__(self, ranks: int) -> None:
        self.rank = self.ranks = ranks
        self._slots: dict[tuple[int, int, int], Slot] = {}
        up = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._run(up)), daemon=True).start()
        assert up.wait(START_S), "the server did not come up"

    async def _run(self, up: threading.Event) -> None:
        server = grpc.aio.server(options=UNBOUNDED)
        push = grpc.unary_unary_rpc_method_handler(self._push)
        handlers = grpc.method_handlers_generic_handler("rivals.Server", {"Push": push})
        server.add_generic_rpc_handlers((handlers,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self.address = f"127.0.0.1:{port}"
        up.set()
        await server.wait_for_termination()

    async def _push(self, request: bytes, _: Any) -> bytes:
        model, index = KEY.unpack_from(request)
        gradient = np.frombuffer(request, np.float32, offset=KEY.size)
        key = model, index, len(gradient)
        if key not in self._slots:
            self._slots[key] = Slot(len(gradient))
        slot = self._slots[key]
        news = slot.news
        slot.sum += gradient
        slot.pushed += 1
        if slot.pushed == self.ranks:
            slot.next(update=model > 0, ranks=self.ranks)
        return await news


class Worker(System):
    """Rank that trains."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._models = 0

    def facts(self) -> dict[str, str]:
        """Return versions and settings of the system."""
        return {"grpcio": grpc.__version__}

    def open(self, addresses: list[str]) -> None:
        """Connect to the server."""
        self._channel = grpc.insecure_channel(addresses[-1], options=UNBOUNDED)
        grpc.channel_ready_future(self._channel).result(START_S)
        self._push = self._channel.unary_unary(METHOD)

    def push(self, model: int, index: int, gradient: Array) -> Any:
        """Push a gradient and return a future of the answer."""
        return self._push.future(KEY.pack(model, index) + gradient.tobytes(), wait_for_ready=True)

    def allreduce(self, buffer: Array) -> None:
        """Sum a buffer on the server."""
        buffer[:] = np.frombuffer(self.push(0, 0, buffer).result(), np.float32)

    def trainer(self, tensors: Sequence[int]) -> Trainer:
        """Return a loop that pushes each tensor."""
        self._models += 1
        return Pushed(self, tensors, self._models)


class Pushed(Trainer):
    """Loop that pushes each tensor's gradient as soon as it is ready."""

    def __init__(self, system: Worker, tensors: Sequence[int], model: int) -> None:
        super().__init__(system, tensors)
        self._worker, self._model = system, model
        self._under_way: list[tuple[int, Any]] = []
        bounds = np.cumsum([0, *tensors])
        self._slices = [slice(a, b) for a, b in pairwise(bounds)]

    def ready(self, index: int) -> None:
        """Push this tensor."""
        push = self._worker.push(self._model, index, self.parts[index])
        self._under_way.append((index, push))

    def finish(self) -> None:
        """Wait for the new weights."""
        for index, push in self._under_way:
            self.weights[self._slices[index]] = np.frombuffer(push.result(), np.float32)
        self._under_way.clear()


def make(_: list[str]) -> System:
    """Return the server or a worker, by the rank of this process."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["RIVALS_RANKS"])
    return Server(ranks) if rank == ranks else Worker(rank, ranks)
