"""The training script of a history: every sample leaves a trace in the weights.

The gradient of sample i is one-hot in `seen[i]`, and the optimizer adds the reduced sum itself, not
its mean. So `seen[i]` ends as the number of times that sample i was applied, no matter which ranks
did it and how the job changed meanwhile. `ballast` makes a reduction as long as needed, in so many
segments that rounds are streamed; each of its elements ends as the number of samples of all epochs.
`smooth`, the optimizer's state, depends on the order of all rounds.
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
from paceline.worker.comm_thread import CommThread
from paceline_api.ids import parse_member

from testing.processes import two_levels
from testing.processes.at_call import at_call

CONFIG = json.loads(os.environ["HISTORY"])
MEMBER = parse_member(os.environ["PACELINE_MEMBER"])
BRAKE = Path("brake")
"""While this file exists, ranks are slow."""


class DiscardedError(Exception):
    """Raised inside backward() when the script drops the batch."""


class Inside:
    """Events inside backward(): a pause, and once the fault that the history has for this rank."""

    def __init__(self, what: str, step: int, segment: int) -> None:
        self._what, self._due = what, (step, segment)
        self._step, self._pause_s = 0, 0.0

    def begin(self, pause_s: float) -> None:
        """Begin the next batch, whose backward() shall pause for `pause_s` in total."""
        self._step += 1
        self._pause_s = pause_s / CONFIG["pieces"]

    def happens(self, segment: int, grad: torch.Tensor) -> torch.Tensor:
        """Pause or inject the fault at a segment, and return its gradient."""
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
    """Identity whose backward() calls `Inside` between two segments."""

    inside: Inside

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, segment: int) -> torch.Tensor:
        """Return a copy and remember the segment."""
        ctx.segment = segment
        return numbers.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient after `Inside` has acted."""
        return InBackward.inside.happens(ctx.segment, grad), None


class Trace(torch.nn.Module):
    """Model whose backward() reaches the last piece of ballast first and `seen` last."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.nn.Parameter(torch.zeros(CONFIG["samples"]))
        pieces = [torch.zeros(CONFIG["ballast"]) for _ in range(CONFIG["pieces"])]
        self.ballast = torch.nn.ParameterList(pieces)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return one value per sample whose gradient marks that sample."""
        seen = self.seen[numbers]
        for index, piece in enumerate(self.ballast):
            if CONFIG["pieces"] > 1:
                seen = InBackward.apply(seen, index)
            seen = seen + piece.sum()
        return seen


class Tally(torch.optim.Optimizer):
    """Optimizer that adds sums instead of means; `total` is the divisor of the round's mean."""

    total = 0.0

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self, _: Any = None) -> None:  # type: ignore[override]
        """Add the sums and update `smooth`; a part of a gradient fails the assertion."""
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
    """Remove torch.compile's wrappers from the methods of optimizers.

    The first call of a wrapper imports all of torch.compile: 2 s of CPU time in each pod.
    """
    for name, method in list(vars(torch.optim.Optimizer).items()):
        if inspect.isfunction(method) and hasattr(method, "__wrapped__"):
            setattr(torch.optim.Optimizer, name, method.__wrapped__)


def spy_on_weighing() -> None:
    """Record the divisor of each round for `Tally`."""
    update = CommThread._update

    def and_tell(thread: CommThread, weighing: Any) -> None:
        Tally.total = weighing.divisor * weighing.unit
        update(thread, weighing)

    setattr(CommThread, "_update", and_tell)  # noqa: B010


def die_inside(method: str, call: int, delay_ms: float) -> None:
    """Kill this process while a call of the data channel is in progress.

    Another thread sends SIGKILL.

    Args:
        method: method of the data channel.
        call: number of the call, from 1.
        delay_ms: time from the beginning of the call.
    """

    def kill() -> None:
        time.sleep(delay_ms / 1000)
        os.kill(os.getpid(), signal.SIGKILL)

    at_call(method, call, lambda: threading.Thread(target=kill, daemon=True).start())


def hang_inside(call: int) -> None:
    """Block the data thread forever in reduction `call`, as a library may; other threads go on."""
    at_call("allreduce", call, lambda: threading.Event().wait())


def pause(draw: random.Random, epoch: int, step: int) -> None:
    """Sleep before forward, and as long inside backward() if there are several segments.

    Args:
        draw: source of the random length.
        epoch: present epoch.
        step: step of this rank in this epoch.
    """
    pause_ms = 0.0
    slow = CONFIG["slow_ms"].get(str(MEMBER.slot), 0.0)
    if BRAKE.exists():
        harder = 1.0
        if epoch == CONFIG["epochs"] - 1:  # the job must not end too early
            harder = 4.0 if step < CONFIG["rounds"] // 2 else 30.0
        pause_ms = CONFIG["step_ms"] * harder * draw.uniform(0.5, 1.5) + slow
    elif slow:
        pause_ms = slow / 4
    if CONFIG["pieces"] > 1:
        pause_ms /= 2
        InBackward.inside.begin(pause_ms / 1000)
    time.sleep(pause_ms / 1000)


def main() -> None:
    """Train as the history prescribes and print the result."""
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
        # A publisher may be killed at the end before it prints this, so then all ranks print it.
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
