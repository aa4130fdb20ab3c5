"""The training script of a history: every sample leaves a trace in the weights.

The gradient of sample i is one-hot in `seen[i]`, and the optimizer adds the reduced sum itself, not
its mean; so `seen[i]` ends as the number of times that sample i was applied, whichever ranks did it
and however the job changed meanwhile. `ballast` makes a reduction as long as one wants, and in so
many segments that rounds are streamed; each of its elements ends as the number of samples of all
epochs. `smooth`, the optimizer's state, depends on the order of all rounds.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import paceline as pl
import torch
from paceline.core.protocol.ids import parse_member
from paceline.worker.comm_thread import CommThread

from testing.processes import two_levels
from testing.processes.at_call import at_call

CONFIG = json.loads(os.environ["HISTORY"])
MEMBER = parse_member(os.environ["PACELINE_MEMBER"])
BRAKE = Path("brake")
"""As long as it exists, ranks take their time."""


class DiscardedError(Exception):
    """Raised inside backward(): the script does not want this batch."""


class Inside:
    """What happens inside backward(): a pause, and once what the history says of this rank."""

    def __init__(self, what: str, step: int, segment: int) -> None:
        self._what, self._due = what, (step, segment)
        self._step, self._pause_s = 0, 0.0

    def begin(self, pause_s: float) -> None:
        """The next batch."""
        self._step += 1
        self._pause_s = pause_s / CONFIG["pieces"]

    def happens(self, segment: int, grad: torch.Tensor) -> torch.Tensor:
        if (self._step, segment) == self._due:
            if self._what == "discard":
                raise DiscardedError
            if self._what == "nan":
                return grad * torch.nan
            time.sleep(float(self._what))
        elif self._pause_s:
            time.sleep(self._pause_s)
        return grad


class InBackward(torch.autograd.Function):
    """Between two segments: what `Inside` has in mind for the batch in hand."""

    inside: Inside

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, segment: int) -> torch.Tensor:
        ctx.segment = segment
        return numbers.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return InBackward.inside.happens(ctx.segment, grad), None


class Trace(torch.nn.Module):
    """backward() is at the last piece of ballast first, and at `seen` in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.nn.Parameter(torch.zeros(CONFIG["samples"]))
        pieces = [torch.zeros(CONFIG["ballast"]) for _ in range(CONFIG["pieces"])]
        self.ballast = torch.nn.ParameterList(pieces)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        seen = self.seen[numbers]
        for index, piece in enumerate(self.ballast):
            if CONFIG["pieces"] > 1:
                seen = InBackward.apply(seen, index)
            seen = seen + piece.sum()
        return seen


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


def without_compiler() -> None:
    """torch.optim keeps torch.compile away from its methods, and for that the first call imports
    all of it: 2 s of a processor in each pod."""
    for name, method in list(vars(torch.optim.Optimizer).items()):
        if inspect.isfunction(method) and hasattr(method, "__wrapped__"):
            setattr(torch.optim.Optimizer, name, method.__wrapped__)


def spy_on_weighing() -> None:
    update = CommThread._update

    def and_tell(thread: CommThread, weighing: Any) -> None:
        Tally.total = weighing.divisor * weighing.unit
        update(thread, weighing)

    setattr(CommThread, "_update", and_tell)  # noqa: B010


def die_inside(method: str, call: int, delay_ms: float) -> None:
    """kill -9 of this process by another thread of it, while call number `call` of `method` of the
    data channel is under way."""

    def kill() -> None:
        time.sleep(delay_ms / 1000)
        os.kill(os.getpid(), signal.SIGKILL)

    at_call(method, call, lambda: threading.Thread(target=kill, daemon=True).start())


def hang_inside(call: int) -> None:
    """The thread that sums does not come back from reduction number `call`, as from a library that
    waits for something without an end; all other threads go on."""
    at_call("allreduce", call, lambda: threading.Event().wait())


def pause(draw: random.Random, epoch: int, step: int) -> None:
    """In front of forward, and as long inside backward() if the gradients are in several segments.
    `step`: of this rank in this epoch."""
    pause_ms = 0.0
    slow = CONFIG["slow_ms"].get(str(MEMBER.slot), 0.0)
    if BRAKE.exists():
        harder = 1.0
        if epoch == CONFIG["epochs"] - 1:  # it must not end too early
            harder = 4.0 if step < CONFIG["rounds"] // 2 else 20.0
        pause_ms = CONFIG["step_ms"] * harder * draw.uniform(0.5, 1.5) + slow
    elif slow:
        pause_ms = slow / 4
    if CONFIG["pieces"] > 1:
        pause_ms /= 2
        InBackward.inside.begin(pause_ms / 1000)
    time.sleep(pause_ms / 1000)


def main() -> None:
    draw = random.Random(f"{CONFIG['seed']} {MEMBER}")
    torch.set_num_threads(1)
    without_compiler()
    spy_on_weighing()
    dies = CONFIG["dies"].get(str(MEMBER.slot))
    if dies and MEMBER.attempt == 0:
        die_inside(*dies)
    hangs = CONFIG["hangs"].get(str(MEMBER.slot))
    if hangs and MEMBER.attempt == 0:
        hang_inside(hangs)
    inside = CONFIG["inside"].get(str(MEMBER.slot)) if MEMBER.attempt == 0 else None
    InBackward.inside = Inside(*(inside or ("", 0, 0)))
    if CONFIG["two_levels"]:
        two_levels.play(MEMBER.slot)
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
            try:
                model(batch).mean().backward()
            except DiscardedError:
                optimizer.zero_grad()
                continue
            optimizer.step()
    result = {
        "member": str(MEMBER),
        "hash": optimizer.committed.strong_hash(),
        # At the end a publisher may be killed before it says so.
        "seen": model.seen.int().tolist() if pl.is_publisher() or CONFIG["linger_ms"] else None,
        "ballast": [
            min(int(piece.min()) for piece in model.ballast),
            max(int(piece.max()) for piece in model.ballast),
        ],
    }
    sys.stdout.write(f"RESULT {json.dumps(result)}\n")
    sys.stdout.flush()
    time.sleep(CONFIG["linger_ms"] / 1000)


main()
