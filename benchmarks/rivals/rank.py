"""One rank of a rival: hears orders, runs the loop that all rivals share, answers with times.

`python -m benchmarks.rivals.rank SYSTEM`, in the rival's own environment: needs numpy and what the
system itself imports. The benchmark listens on the socket of `RIVALS_SOCKET`; each message is one
line of JSON. Times are monotonic nanoseconds, comparable between the processes of one machine.

    -> {"rank", "address", "facts"}                     once, when the process is up
    <- {"addresses": [...]}                             of all ranks, by rank
    -> {}                                               the system is open
    <- {"do": "bulk", "elements", "calls"}              sums of one buffer
    -> {"begun": [...], "ended": [...], "first", "last"}
    <- {"do": "train", "tensors": [...], "compute_ms", "steps"}
    -> {"begun", "ended", "applied"}                    gradients that reached the weights meanwhile
    -> {}                                               of a process that only serves the others
    <- null                                             the end
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

RATE: Final = 2.0**-12
"""Learning rate. Every gradient is 1, so weights are exact and count what was applied."""
REST_S: Final = 0.002
"""Between two sums of a buffer; whoever waits for an order has its core back."""


class Device:
    """An accelerator that is not there: time passes without a core, forward a third of it.

    Backward is spread evenly over the tensors. Waits below a millisecond are saved up, since a
    sleep is too long by a tenth of that; what one was too long, the next is shorter.
    """

    LEAST_S: Final = 1e-3

    def __init__(self, compute_ms: float, tensors: int) -> None:
        self.step_s = compute_ms / 1000
        self._forward_s = compute_ms / 3000
        self._tensor_s = 2 * compute_ms / 3000 / tensors
        self._owed_s = 0.0

    def forward(self) -> None:
        self._pass(self._forward_s)

    def backward(self) -> None:
        """Of one tensor."""
        self._pass(self._tensor_s)

    def end(self) -> None:
        """What is still owed when the last tensor is there."""
        if self._owed_s > 0:
            self._sleep()

    def _pass(self, seconds: float) -> None:
        self._owed_s += seconds
        if self._owed_s >= self.LEAST_S:
            self._sleep()

    def _sleep(self) -> None:
        begun = time.monotonic()
        time.sleep(self._owed_s)
        self._owed_s -= time.monotonic() - begun


class Trainer:
    """Weights and gradients of a model; by default one sum of everything behind backward."""

    def __init__(self, system: System, tensors: Sequence[int]) -> None:
        self.system = system
        self.flat = system.zeros(sum(tensors))
        self.weights = np.zeros_like(self.flat)
        self.parts = list(split(self.flat, tensors))

    def step(self, device: Device) -> None:
        device.forward()
        for index in reversed(range(len(self.parts))):
            device.backward()
            if index == 0:
                device.end()
            self.parts[index].fill(1.0)
            self.ready(index)
        self.finish()

    def ready(self, index: int) -> None:
        """The gradient of this tensor is there; the last tensor of the model comes first."""

    def finish(self) -> None:
        """Backward is over: leave the weights of the next step behind."""
        self.system.allreduce(self.flat)
        self.update()

    def update(self) -> None:
        """Plain SGD with the mean of a sum."""
        np.multiply(self.flat, RATE / self.system.ranks, out=self.flat)
        np.subtract(self.weights, self.flat, out=self.weights)

    def train(self, device: Device, steps: int) -> None:
        for _ in range(steps):
            self.step(device)

    def corners(self) -> tuple[float, float]:
        """First and last weight."""
        return float(self.weights[0]), float(self.weights[-1])


class System:
    """A rival as the loop sees it. Made in each of its processes."""

    rank: int
    ranks: int
    address = ""
    """For the others, if they need one."""
    serves = False
    """A process that only serves the ranks: it hears the orders and has no times to tell."""

    def facts(self) -> dict[str, str]:
        """Versions and settings that a reader needs."""
        return {}

    def open(self, addresses: list[str]) -> None:
        """Every process is up."""

    def zeros(self, elements: int) -> Array:
        """A buffer as the system likes it best."""
        return np.zeros(elements, np.float32)

    def allreduce(self, buffer: Array) -> None:
        """Sum over the ranks, in place."""
        raise NotImplementedError

    def barrier(self) -> None:
        """By default a sum of one element."""
        self.allreduce(self.zeros(1))

    def trainer(self, tensors: Sequence[int]) -> Any:
        """What has `train` and `corners` of `Trainer`."""
        return Trainer(self, tensors)

    def close(self) -> None:
        """Before the process ends."""


def split(flat: Array, tensors: Sequence[int]) -> Iterator[Array]:
    at = 0
    for elements in tensors:
        yield flat[at : at + elements]
        at += elements


class Line:
    """The way to the benchmark."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ["RIVALS_SOCKET"])
        self._file = self._socket.makefile("rw")

    def say(self, **facts: Any) -> None:
        self._file.write(json.dumps(facts) + "\n")
        self._file.flush()

    def hear(self) -> Any:
        return json.loads(self._file.readline() or "null")


def bulk(system: System, elements: int, calls: int) -> dict[str, Any]:
    """The first call only warms up."""
    buffer = system.zeros(elements)
    begun, ended = [], []
    for _ in range(1 + calls):
        buffer.fill(1.0 + system.rank)
        time.sleep(REST_S)
        system.barrier()
        begun.append(time.monotonic_ns())
        system.allreduce(buffer)
        ended.append(time.monotonic_ns())
    return {
        "begun": begun[1:],
        "ended": ended[1:],
        "first": float(buffer[0]),
        "last": float(buffer[-1]),
    }


def train(system: System, trainer: Any, device: Device, steps: int) -> dict[str, Any]:
    before = trainer.corners()
    begun = time.monotonic_ns()
    trainer.train(device, steps)
    ended = time.monotonic_ns()
    after = trainer.corners()
    applied = [(b - a) * system.ranks / RATE for b, a in zip(before, after, strict=True)]
    return {"begun": begun, "ended": ended, "applied": applied}


def serve(system: System, line: Line) -> None:
    trainer, known = None, None
    while (order := line.hear()) is not None:
        if system.serves:
            line.say()
        elif order["do"] == "bulk":
            line.say(**bulk(system, order["elements"], order["calls"]))
        else:
            if order["tensors"] != known:
                trainer, known = system.trainer(order["tensors"]), order["tensors"]
            device = Device(order["compute_ms"], len(order["tensors"]))
            line.say(**train(system, trainer, device, order["steps"]))


def main() -> None:
    made = importlib.import_module(f"benchmarks.rivals.systems.{sys.argv[1]}")
    system: System = made.make(sys.argv[2:])
    line = Line()
    line.say(rank=system.rank, address=system.address, facts=system.facts())
    system.open(line.hear()["addresses"])
    line.say()
    serve(system, line)
    system.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of a rival may be anywhere


if __name__ == "__main__":
    main()
