"""Steps of a transformer on a GPU: with Paceline inside a job, with torch's DDP outside of one.

Each rank writes `<rank>.json`: the seconds of one step, averaged from the first to the last
measured step, with the device idle at both ends. DDP tries each of its settings and measures the
fastest.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.even import CONFIG, DEVICE, ddp_settings, make, make_optimizer

WARM: Final = 5
"""Steps that are not measured: the first load kernels, DDP builds its buckets, and Paceline learns
when to stream."""
TUNE: Final = 5


def main() -> None:
    """Run with Paceline inside a job, else with DDP, and write the results."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    facts, rank = with_paceline() if "PACELINE_RUN_DIR" in os.environ else with_ddp()
    Path(CONFIG["results"], f"{rank}.json").write_text(json.dumps(facts))


def with_ddp() -> tuple[dict[str, Any], int]:
    """Find the fastest setting of DDP, measure it, and return the figures and the rank."""
    dist.init_process_group(CONFIG["backend"])
    settings = ddp_settings(5, 25, 100)
    tuned = torch.tensor([ddp_step_s(setting, TUNE) for setting in settings], dtype=torch.float64)
    tuned = tuned.to(DEVICE)
    dist.all_reduce(tuned, dist.ReduceOp.MAX)
    best = settings[int(tuned.argmin())]
    facts = {"step_s": ddp_step_s(best, CONFIG["steps"]), "setting": best}
    dist.barrier()
    return facts, dist.get_rank()


def ddp_step_s(setting: dict[str, Any], steps: int) -> float:
    """Return the seconds of a DDP step with one setting."""
    model, loss_of = make(dist.get_rank())
    optimizer = make_optimizer(model)
    replicated = DistributedDataParallel(model, **setting)
    return step_s(replicated, loss_of, optimizer, range(WARM + steps), steps)


def with_paceline() -> tuple[dict[str, Any], int]:
    """Measure Paceline's steps and return the figures and the rank."""
    import paceline as pl

    pl.init()
    model, loss_of = make(pl.rank())
    optimizer = pl.DistributedOptimizer(make_optimizer(model), model)
    seconds = step_s(model, loss_of, optimizer, pl.steps(WARM + CONFIG["steps"]), CONFIG["steps"])
    facts = {"step_s": seconds, "hash": optimizer.committed.strong_hash()}
    return facts, pl.rank()


def step_s(
    model: torch.nn.Module, loss_of: Any, optimizer: Any, numbers: Iterable[int], measured: int
) -> float:
    """Return the mean seconds of a measured step.

    A rank that was restarted may begin after the first steps; it measures the rest.

    Returns:
        Seconds per step.
    """
    begun = ended = 0.0
    first = WARM
    for step in numbers:
        if not begun and step >= WARM:
            settle()
            begun, first = time.perf_counter(), step
        time.sleep(CONFIG.get("pause_ms", 0) / 1000)
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == WARM + measured - 1:
            settle()
            ended = time.perf_counter()
    return (ended - begun) / (WARM + measured - first)


def settle() -> None:
    """Wait until the device is idle."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


main()
