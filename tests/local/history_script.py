"""The training script of a history: every sample leaves a trace in the weights.

The gradient of sample i is one-hot in `seen[i]`, and the optimizer adds the reduced sum itself, not
its mean; so `seen[i]` ends as the number of times that sample i was applied, whichever ranks did it
and however the job changed meanwhile. `ballast` makes a reduction as long as one wants; each of its
elements ends as the number of samples of all epochs. `smooth`, the optimizer's state, depends on
the order of all rounds.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import paceline as pl
import torch
from paceline.control.client import ControlClient
from paceline.core.protocol.ids import parse_member
from paceline.transport.selected import SelectedTransport
from paceline.worker.comm_thread import CommThread

CONFIG = json.loads(os.environ["HISTORY"])
MEMBER = parse_member(os.environ["PACELINE_MEMBER"])
COORDINATORS = os.environ["PACELINE_COORDINATOR"].split(",")
BRAKE = Path("brake")
"""As long as it exists, ranks take their time."""


class Trace(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.nn.Parameter(torch.zeros(CONFIG["samples"]))
        self.ballast = torch.nn.Parameter(torch.zeros(CONFIG["ballast"]))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.seen[numbers] + self.ballast.sum()


class Tally(torch.optim.Optimizer):
    """Adds sums instead of means. `total`: what the mean of the present round was divided by."""

    total = 0.0

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self, _: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            exact = parameter.grad * Tally.total
            counts = exact.round()
            assert torch.allclose(exact, counts, atol=1e-2), "a part of a gradient was applied"
            parameter.add_(counts)
            state = self.state[parameter]
            if not state:
                state["smooth"] = torch.zeros_like(parameter)
            state["smooth"].mul_(0.9).add_(parameter.grad)


def spy_on_weighing() -> None:
    update = CommThread._update

    def and_tell(thread: CommThread, weighing: Any) -> None:
        Tally.total = weighing.divisor * weighing.unit
        update(thread, weighing)

    setattr(CommThread, "_update", and_tell)  # noqa: B010


def die_inside(method: str, call: int, delay_ms: float) -> None:
    """kill -9 of this process by another thread of it, while call number `call` of `method` of the
    data channel is under way."""
    real, calls = getattr(SelectedTransport, method), 0

    def kill() -> None:
        time.sleep(delay_ms / 1000)
        os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(*given: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            threading.Thread(target=kill, daemon=True).start()
        real(*given)

    setattr(SelectedTransport, method, wrapped)


def hang_inside(call: int) -> None:
    """The communication thread does not come back from reduction number `call`, as from a library
    that waits for something without an end; all other threads go on."""
    real, calls = SelectedTransport.allreduce, 0

    def wrapped(*given: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            threading.Event().wait()
        real(*given)

    setattr(SelectedTransport, "allreduce", wrapped)  # noqa: B010


def cut_when_asked() -> None:
    """SIGUSR1 cuts the connection to the coordinator, for as long as a file says."""
    real = ControlClient._connect
    until = [0.0]

    async def connect(client: ControlClient[Any], *given: Any) -> None:
        if time.monotonic() < until[0]:
            raise ConnectionError("the control channel is cut")
        await real(client, *given)

    def cut(*_: object) -> None:
        until[0] = time.monotonic() + float(Path(f"cut-{os.getpid()}").read_text()) / 1000
        ports = [url.rpartition(":")[2] for url in COORDINATORS]
        for entry in list(Path("/proc/self/fd").iterdir()):
            if not entry.is_socket():
                continue
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as one:
                if one.family == socket.AF_INET and str(one.getpeername()[1]) in ports:
                    one.shutdown(socket.SHUT_RDWR)

    setattr(ControlClient, "_connect", connect)  # noqa: B010
    signal.signal(signal.SIGUSR1, cut)


def pause(draw: random.Random, epoch: int, step: int) -> None:
    """`step`: of this rank in this epoch."""
    slow = CONFIG["slow_ms"].get(str(MEMBER.slot), 0.0)
    if BRAKE.exists():
        harder = 1.0
        if epoch == CONFIG["epochs"] - 1:  # it must not end too early
            harder = 4.0 if step < CONFIG["rounds"] // 2 else 20.0
        time.sleep((CONFIG["step_ms"] * harder * draw.uniform(0.5, 1.5) + slow) / 1000)
    elif slow:
        time.sleep(slow / 4000)


def main() -> None:
    draw = random.Random(f"{CONFIG['seed']} {MEMBER}")
    torch.set_num_threads(1)
    spy_on_weighing()
    cut_when_asked()
    dies = CONFIG["dies"].get(str(MEMBER.slot))
    if dies and MEMBER.attempt == 0:
        die_inside(*dies)
    hangs = CONFIG["hangs"].get(str(MEMBER.slot))
    if hangs and MEMBER.attempt == 0:
        hang_inside(hangs)
    pl.init()
    model = Trace()
    optimizer = pl.DistributedOptimizer(Tally(model.parameters()), model)
    numbers = torch.utils.data.TensorDataset(torch.arange(CONFIG["samples"]))
    loader = pl.DataLoader(
        numbers, batch_size=CONFIG["batch"], accumulate=CONFIG["accumulate"], seed=CONFIG["seed"]
    )
    for epoch in loader.epochs(CONFIG["epochs"]):
        for step, (batch,) in enumerate(loader):
            pause(draw, epoch, step)
            if CONFIG["writes_bytes"]:
                sys.stdout.write(f"filling the disk {'x' * CONFIG['writes_bytes']}\n")
                sys.stdout.flush()
            model(batch).mean().backward()
            optimizer.step()
    result = {
        "member": str(MEMBER),
        "hash": optimizer.committed.strong_hash(),
        # At the end a publisher may be killed before it says so.
        "seen": model.seen.int().tolist() if pl.is_publisher() or CONFIG["linger_ms"] else None,
        "ballast": [int(model.ballast.min()), int(model.ballast.max())],
    }
    sys.stdout.write(f"RESULT {json.dumps(result)}\n")
    sys.stdout.flush()
    time.sleep(CONFIG["linger_ms"] / 1000)


main()
