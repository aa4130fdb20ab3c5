"""The training script of a job whose ranks hold shards of a model, as a user would write it.

The model has two layers with a ReLU between them. In a tensor-parallel group, each rank has some
columns of the first layer and rows of the second; in a pipeline, each rank has one layer. Every
shard prints its final weights.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import paceline as pl
import torch
from paceline_api.ids import parse_member
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import TensorDataset

from testing.processes.at_call import at_call

CONFIG: dict[str, Any] = json.loads(os.environ.get("CONFIG", "{}"))
SHARD = int(os.environ.get("PACELINE_SHARD", "0"))
MEMBER = parse_member(os.environ.get("PACELINE_MEMBER", "0.0#0"))
BRAKE = Path("brake")
IN, HIDDEN, OUT = 6, 16, 4
SAMPLES = 64


def whole_model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(IN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUT))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(SAMPLES, IN, generator=generator)
    return TensorDataset(x, x[:, :OUT].sin() * 2)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def full(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def misbehave(step: int) -> None:
    """Do once what the configuration orders for this shard and step."""
    what = CONFIG.get("at", {}).get(f"{MEMBER}/{SHARD}/{step}")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "exit":
        sys.exit(3)


def misbehave_in_a_reduction(call: int) -> None:
    """Kill this process with SIGKILL when it starts its `call`th reduction.

    Its peers have started theirs by then, and the other shards theirs with their own peers.
    """
    at_call("allreduce", call, lambda: os.kill(os.getpid(), signal.SIGKILL))


def main() -> None:
    if (call := CONFIG.get("in_reduction", {}).get(f"{MEMBER}/{SHARD}")) is not None:
        misbehave_in_a_reduction(call)
    torch.set_num_threads(1)
    pl.init()
    model: Any = whole_model()
    kind = CONFIG["kind"]
    loss_of = nn.functional.mse_loss
    if kind == "tensor":
        model = parallelize_module(
            model, pl.group(), {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
    elif kind == "pipeline":
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe  # imports much

        model = nn.Sequential(*(list(model)[:2] if SHARD == 0 else list(model)[2:]))
        stage = PipelineStage(model, SHARD, 2, torch.device("cpu"), group=pl.group().get_group())
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss_of)
    optimizer = pl.DistributedOptimizer(
        optimizer_of(model), model, clip_norm=CONFIG.get("clip_norm")
    )
    loader = pl.DataLoader(data(), batch_size=CONFIG.get("batch", 8), seed=3)
    step = 0
    for _ in loader.epochs(CONFIG["epochs"]):
        for x, y in loader:
            step += 1
            misbehave(step)
            if BRAKE.exists():
                time.sleep(0.03)
            time.sleep(CONFIG.get("slow_s", {}).get(str(MEMBER.slot), 0.0))
            if kind == "pipeline":
                schedule.step(x) if SHARD == 0 else schedule.step(target=y)
            else:
                loss_of(model(x), y).backward()
            if CONFIG.get("skips") == f"{MEMBER.slot}/{SHARD}/{step}":
                optimizer.zero_grad()
                continue
            optimizer.step()
    state = {name: full(p.detach()).tolist() for name, p in model.named_parameters()}
    sys.stdout.write(f"WEIGHTS {SHARD} {json.dumps(state)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
