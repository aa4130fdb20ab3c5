"""One rank of a rival: receive orders, run the loop that all rivals share, answer with times.

`python -m benchmarks.rivals.rank SYSTEM` runs in the rival's own environment. It needs numpy and
what the system itself imports. The benchmark listens on the socket of `RIVALS_SOCKET`; each message
is one line of JSON. Times are monotonic nanoseconds, comparable between the processes of one
machine.

    -> {"rank", "address", "facts"}                     once, when the process has started
    <- {"addresses": [...]}                             of all ranks, by rank
    -> {}                                               the system is open
    <- {"do": "bulk", "elements", "calls"}              sums of one buffer
    -> {"begun": [...], "ended": [...], "first", "last"}
    <- {"do": "train", "tensors": [...], "compute_ms", "steps"}
    -> {"begun", "ended", "applied"}                    gradients applied in this time
    -> {}                                               from a process that only serves the others
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
"""Pause between two sums of a buffer, in which a process that waits for an order frees its core."""


class Device:
    """Emulated accelerator: time passes without a core, a third of it in forward.

    Backward is spread evenly over the tensors. Waits below a millisecond are added up, since a
    sleep is too long by a tenth of that. If one sleep was too long, the next one is shorter.
    """

    LEAST_S: Final = 1e-3

    def __init__(self, compute_ms: float, tensors: int) -> None:
        self.step_s = compute_ms / 1000
        self._forward_s = compute_ms / 3000
        self._tensor_s = 2 * compute_ms / 3000 / tensors
        self._owed_s = 0.0

    def forward(self) -> None:
        """Spend the time of a forward pass."""
        self._pass(self._forward_s)

    def backward(self) -> None:
        """Spend the time of one tensor's backward."""
        self._pass(self._tensor_s)

    def end(self) -> None:
        """Spend the time that is still owed after the last tensor."""
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
    """Weights and gradients of a model; by default, one sum of everything after backward."""

    def __init__(self, system: System, tensors: Sequence[int]) -> None:
        self.system = system
        self.flat = system.zeros(sum(tensors))
        self.weights = np.zeros_like(self.flat)
        self.parts = list(split(self.flat, tensors))

    def step(self, device: Device) -> None:
        """Run one step on a device."""
        device.forward()
        for index in reversed(range(len(self.parts))):
            device.backward()
            if index == 0:
                device.end()
            self.parts[index].fill(1.0)
            self.ready(index)
        self.finish()

    def ready(self, index: int) -> None:
        """Handle the gradient of a tensor that has become ready.

        The last tensor of the model comes first.
        """

    def finish(self) -> None:
        """Handle the end of backward: compute the weights of the next step."""
        self.system.allreduce(self.flat)
        self.update()

    def update(self) -> None:
        """Apply plain SGD with the mean of a sum."""
        np.multiply(self.flat, RATE / self.system.ranks, out=self.flat)
        np.subtract(self.weights, self.flat, out=self.weights)

    def train(self, device: Device, steps: int) -> None:
        """Run steps on a device."""
        for _ in range(steps):
            self.step(device)

    def corners(self) -> tuple[float, float]:
        """Return the first and the last weight."""
        return float(self.weights[0]), float(self.weights[-1])


class System:
    """A rival as the loop sees it; each process makes one."""

    rank: int
    ranks: int
    address = ""
    """Address for the other processes, if they need one."""
    serves = False
    """True for a process that only serves the ranks: it answers orders without times."""

    def facts(self) -> dict[str, str]:
        """Return versions and settings that a reader needs."""
        return {}

    def open(self, addresses: list[str]) -> None:
        """Connect to the other processes; all of them have started."""

    def zeros(self, elements: int) -> Array:
        """Return a buffer of zeros, in the memory that suits the system best."""
        return np.zeros(elements, np.float32)

    def allreduce(self, buffer: Array) -> None:
        """Sum a buffer over the ranks, in place.

        Raises:
            NotImplementedError: The system only trains.
        """
        raise NotImplementedError

    def barrier(self) -> None:
        """Wait for all ranks; by default with a sum of one element."""
        self.allreduce(self.zeros(1))

    def trainer(self, tensors: Sequence[int]) -> Any:
        """Return an object with the methods `train` and `corners` of `Trainer`."""
        return Trainer(self, tensors)

    def close(self) -> None:
        """Clean up before the process ends."""


def split(flat: Array, tensors: Sequence[int]) -> Iterator[Array]:
    """Yield consecutive views of `flat` with these lengths."""
    at = 0
    for elements in tensors:
        yield flat[at : at + elements]
        at += elements


class Line:
    """Connection to the benchmark."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ["RIVALS_SOCKET"])
        self._file = self._socket.makefile("rw")

    def say(self, **facts: Any) -> None:
        """Send a message."""
        self._file.write(json.dumps(facts) + "\n")
        self._file.flush()

    def hear(self) -> Any:
        """Receive a message; None at the end."""
        return json.loads(self._file.readline() or "null")


def bulk(system: System, elements: int, calls: int) -> dict[str, Any]:
    """Sum a buffer `calls` times and return the times; one more call warms up first."""
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
    """Run training steps and return their times and the number of applied gradients."""
    before = trainer.corners()
    begun = time.monotonic_ns()
    trainer.train(device, steps)
    ended = time.monotonic_ns()
    after = trainer.corners()
    applied = [(b - a) * system.ranks / RATE for b, a in zip(before, after, strict=True)]
    return {"begun": begun, "ended": ended, "applied": applied}


def serve(system: System, line: Line) -> None:
    """Execute the benchmark's orders until it sends null."""
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
    """Run a process of the system that the command line names."""
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
    os._exit(0)  # threads of a rival may still be running


if __name__ == "__main__":
    main()
