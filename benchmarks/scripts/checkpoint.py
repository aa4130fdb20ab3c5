"""B9: one rank with steps bound by torch's computing, and another way to save in each window.

Paceline's own checkpoint comes from the job (`spec.checkpoint`), at the versions that open one of
its windows. The loop calls the other ways itself, as rank 0 of such a script does.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import paceline as pl
import torch
from torch.distributed.checkpoint import state_dict_saver as dcp

CONFIG = json.loads(os.environ["BENCHMARK"])
WAYS: list[str] = CONFIG["ways"]
WINDOW: int = CONFIG["window"]
OTHERS = Path("others")
WAIT_S = 120.0


def clear() -> Path:
    """Return the path of a new state folder; as for the job's checkpoints, it is new each time."""
    shutil.rmtree(OTHERS, ignore_errors=True)
    OTHERS.mkdir()
    return OTHERS / "state"


def keep(way: str, state: Callable[[], dict[str, Any]]) -> Future[Any] | None:
    """Save the state in one way, as a script's loop would; return the future of an async save."""
    if way == "torch.save":
        torch.save(state(), clear())
    elif way == "dcp.save":
        dcp.save(state(), checkpoint_id=clear(), no_dist=True)
    elif way == "dcp.async_save":
        pending = dcp.async_save(state(), checkpoint_id=clear(), no_dist=True)
        assert isinstance(pending, Future)
        return pending
    return None


def settle(version: int, way: str, pending: Future[Any] | None) -> None:
    """Wait until the save of a window is on the disk.

    This is outside the measured time: the next window must not pay for this one.
    """
    if pending is not None:
        pending.result(WAIT_S)
    until = time.monotonic() + WAIT_S
    mine = Path("saved") / f"v{version}"
    while way == "paceline" and not mine.exists() and time.monotonic() < until:
        time.sleep(0.02)
    os.sync()


def products_in(seconds: float, work: torch.Tensor) -> int:
    """Return the number of matrix products that take `seconds` seconds.

    A step is a fixed amount of work: one of fixed time would hide what slows it down.

    Returns:
        At least 1.
    """
    done, until = 0, time.monotonic() + 1.0
    while time.monotonic() < until:
        work @ work
        done += 1
    return max(1, int(done * seconds))


def main() -> None:
    """Train window after window and write their times to `result.json`."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pl.init()
    layers = [torch.nn.Linear(CONFIG["width"], CONFIG["width"]) for _ in range(CONFIG["layers"])]
    model = torch.nn.Sequential(*layers)
    optimizer = pl.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4), model)
    x = torch.randn(1, CONFIG["width"])
    work = torch.randn(CONFIG["work"], CONFIG["work"])

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    products = products_in(CONFIG["step_ms"] / 1000, work)

    def step() -> None:
        for _ in range(products):
            work @ work
        model(x).mean().backward()
        optimizer.step()

    # With one rank, the version is the number of steps. Paceline's window is the first of each
    # round, and its first step makes the version that the job saves.
    for _ in range(CONFIG["every"] - 1):
        step()
    windows: list[dict[str, Any]] = []
    for number in range(len(WAYS) * CONFIG["rounds"]):
        way = WAYS[number % len(WAYS)]
        begun = before = time.monotonic()
        pending, longest = None, 0.0
        for at in range(WINDOW):
            if at == 0 and way != "paceline":
                pending = keep(way, state)
            step()
            now = time.monotonic()
            longest, before = max(longest, now - before), now
        windows.append({"way": way, "seconds": before - begun, "longest": longest})
        settle(CONFIG["every"] * (number // len(WAYS) + 1), way, pending)
    Path("result.json").write_text(json.dumps({"windows": windows}))
    pl.finish()


if __name__ == "__main__":
    main()
