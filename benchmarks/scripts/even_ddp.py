"""B10 with torch DDP on gloo: a plain script, timed as the one with Paceline is.

Task "reduce" measures one reduction. Task "tune" measures what a step takes alone, what one
reduction takes, and each setting of DDP. Task "block" runs steps with one setting.
"""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.even import CONFIG, ddp_settings, make, make_optimizer

WARM = 3
"""Steps that are not measured; DDP rebuilds its buckets after the first."""


def main() -> None:
    """Run the configured task and write its results to `rank-<number>.json`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    facts: dict[str, Any]
    match CONFIG["task"]:
        case "reduce":
            facts = {"reduce_ms": reduce_ms()}
        case "tune":
            facts = {**alone(rank), "reduce_ms": reduce_ms(), "settings": settings_ms(rank)}
        case _:
            facts = {"ends": train(rank, CONFIG["setting"], CONFIG["steps"])}
    Path(f"rank-{rank}.json").write_text(json.dumps(facts))
    dist.barrier()  # no rank leaves while another one still communicates


def train(rank: int, setting: dict[str, Any], steps: int) -> list[int]:
    """Run steps with one setting of DDP and return when each ended, in ns."""
    model, loss_of = make(rank)
    optimizer = make_optimizer(model)
    replicated = DistributedDataParallel(model, **setting)
    ends = []
    for step in range(WARM + steps):
        optimizer.zero_grad()
        loss_of(replicated, step).backward()
        optimizer.step()
        ends.append(time.monotonic_ns())
    return ends[WARM - 1 :]


def settings_ms(rank: int) -> list[tuple[dict[str, Any], float]]:
    """Return the median step time of each setting of DDP."""
    tried = []
    for setting in ddp_settings(1, 5, 25):
        ends = train(rank, setting, CONFIG["steps"])
        steps = [(b - a) / 1e6 for a, b in pairwise(ends)]
        tried.append((setting, median(steps)))
    return tried


def alone(rank: int) -> dict[str, float]:
    """Return the times of a step without communication, with all ranks busy as in a job."""
    model, loss_of = make(rank)
    optimizer = make_optimizer(model)
    parts: dict[str, list[float]] = {"compute_ms": [], "optimizer_ms": []}
    for step in range(WARM + CONFIG["steps"]):
        optimizer.zero_grad()
        dist.barrier()
        begun = time.monotonic_ns()
        loss_of(model, step).backward()
        computed = time.monotonic_ns()
        optimizer.step()
        parts["compute_ms"].append((computed - begun) / 1e6)
        parts["optimizer_ms"].append((time.monotonic_ns() - computed) / 1e6)
    return {name: median(values[WARM:]) for name, values in parts.items()}


def reduce_ms() -> float:
    """Return the time of one reduction of all the model's gradients in one piece."""
    numel = sum(parameter.numel() for parameter in make(0)[0].parameters())
    flat = torch.ones(numel)
    times_ms = []
    for _ in range(1 + CONFIG["reductions"]):
        dist.barrier()
        begun = time.monotonic_ns()
        dist.all_reduce(flat)
        times_ms.append((time.monotonic_ns() - begun) / 1e6)
    return median(times_ms[1:])


main()
