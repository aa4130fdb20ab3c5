"""B13: a script for torchrun, which a conductor tells over a socket what to do.

The same file runs under torchrun and under `paceline run`. With `api: "paceline"` in its
configuration it is a script of the explicit API instead.

Orders, one JSON object a line: `use` makes the model with a setting of DDP; `steps` trains, with
`alone` without communication; `end` ends the script. Each answer is one line.
"""

from __future__ import annotations

import json
import re
import resource
import socket
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.even import CONFIG, make, make_optimizer


class Plain:
    """The script as it is for torchrun."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.step = 0
        self.use({})

    def use(self, setting: dict[str, Any]) -> None:
        """Begin anew with a setting of DDP."""
        model, self.loss_of = make(self.rank)
        self.optimizer = make_optimizer(model)
        self.model = DistributedDataParallel(model, **setting)

    def train(self, *, alone: bool) -> None:
        """Make one step; `alone` leaves out the communication."""
        self.optimizer.zero_grad()
        with self.model.no_sync() if alone else nullcontext():
            self.loss_of(self.model, self.step).backward()
        self.optimizer.step()
        self.step += 1

    def end(self) -> None:
        """Leave the job."""
        dist.destroy_process_group()


class Explicit:
    """The same loop with the explicit API."""

    def __init__(self) -> None:
        import paceline as pl

        self._pl = pl
        pl.init()
        self.rank = pl.rank()
        model, self.loss_of = make(self.rank)
        self.optimizer = pl.DistributedOptimizer(make_optimizer(model), model)
        self.model, self.step = model, 0

    def use(self, setting: dict[str, Any]) -> None:
        """Do nothing: there is no DDP."""

    def train(self, *, alone: bool) -> None:
        """Make one step."""
        assert not alone
        self.loss_of(self.model, self.step).backward()
        self.optimizer.step()
        self.step += 1

    def end(self) -> None:
        """Leave the job."""
        self._pl.stop()
        self._pl.finish()


def block(train: Callable[[], None], steps: int) -> dict[str, Any]:
    """Make some steps; return when each ended in ns, and what a step costs.

    Args:
        train: Makes one step.
        steps: Number of steps.

    Returns:
        The ends; the CPU time of a step in ms; and by name of a thread its CPU time in ms and how
        often it waited, in each step.
    """
    threads, before, ends = _threads(), _cpu_s(), [time.monotonic_ns()]
    for _ in range(steps):
        train()
        ends.append(time.monotonic_ns())
    cpu_ms = 1000 * (_cpu_s() - before) / steps
    costs: dict[str, list[float]] = {}
    for thread, (name, cpu_ns, waits) in _threads().items():
        _, cpu_before_ns, waits_before = threads.get(thread, (name, 0, 0))
        cost = costs.setdefault(name, [0.0, 0.0])
        cost[0] += (cpu_ns - cpu_before_ns) / 1e6 / steps
        cost[1] += (waits - waits_before) / steps
    return {"ends": ends, "cpu_ms": cpu_ms, "threads": costs}


def _threads() -> dict[str, tuple[str, int, int]]:
    """Return by thread id its name, its CPU time in ns and how often it has waited."""
    names = {str(t.native_id): t.name for t in threading.enumerate()}
    by_id = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            name = names.get(task.name) or (task / "comm").read_text().strip()
            cpu_ns = int((task / "schedstat").read_text().split()[0])
            [waits] = re.findall(
                r"\nvoluntary_ctxt_switches:\s*(\d+)", (task / "status").read_text()
            )
            by_id[task.name] = name, cpu_ns, int(waits)
    return by_id


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def obey(script: Plain | Explicit, line: IO[str]) -> None:
    """Carry out orders until the last one."""
    while (order := json.loads(line.readline()))["do"] != "end":
        answer: dict[str, Any] = {}
        if order["do"] == "use":
            script.use(order["setting"])
        else:
            alone = order.get("alone", False)
            answer = block(lambda: script.train(alone=alone), order["steps"])  # noqa: B023
        line.write(json.dumps(answer) + "\n")
        line.flush()


def main() -> None:
    """Connect, and train as told."""
    torch.set_num_threads(1)
    script = Explicit() if CONFIG["api"] == "paceline" else Plain()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(CONFIG["socket"])
        with connection.makefile("rw") as line:
            line.write(json.dumps({"side": CONFIG["side"], "rank": script.rank}) + "\n")
            line.flush()
            obey(script, line)
    script.end()


main()
