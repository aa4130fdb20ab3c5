"""The task of examples/two-stages, on replicas of one rank each or on groups of two stages.

The model is real and learns; its computing is emulated: each stage sleeps `forward_ms` and
`backward_ms` for a whole batch, without a core. A group passes its batch through in parts, so that
both of its ranks compute at the same time. The learning rate grows with the batch of an update.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import paceline as pl
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.data import TensorDataset

from benchmarks.probe import CONFIG, Probe

BATCH: int = CONFIG["batch"]
PARTS: int = CONFIG["parts"]


class _Pause(torch.autograd.Function):
    """Identity whose forward and backward sleep in proportion to the number of samples."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.share = len(x) / BATCH
        time.sleep(ctx.share * CONFIG["forward_ms"] / 1000)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(ctx.share * CONFIG["backward_ms"] / 1000)
        return gradient


class Stage(nn.Module):
    """Layers of one stage, behind the emulated computing."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the layers for inputs of shape (batch, features)."""
        # autograd runs the backward of a pause only if its input needs a gradient.
        made: torch.Tensor = _Pause.apply(self.layers(x))
        return made


def stages() -> list[Stage]:
    """Return the two stages of the model; the seed is fixed."""
    torch.manual_seed(0)
    return [
        Stage(nn.Linear(2, 64), nn.ReLU()),
        Stage(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)),
    ]


def replica() -> tuple[nn.Module, Callable[[torch.Tensor, torch.Tensor], float | None]]:
    """Return the whole model, and the function that computes the gradients of a batch."""
    model = nn.Sequential(*stages())

    def backward(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return float(loss.detach())

    return model, backward


def stage() -> tuple[nn.Module, Callable[[torch.Tensor, torch.Tensor], float | None]]:
    """Return this rank's stage, and the function that passes a batch through the group.

    The function returns the loss on the last stage and None on the first one.
    """
    group = pl.group()
    at = group.get_local_rank()
    model = stages()[at]
    made = PipelineStage(model, at, 2, torch.device("cpu"), group=group.get_group())
    schedule = ScheduleGPipe(made, n_microbatches=PARTS, loss_fn=nn.functional.cross_entropy)

    def backward(x: torch.Tensor, y: torch.Tensor) -> float | None:
        if at == 0:
            schedule.step(x)
            return None
        losses: list[torch.Tensor] = []
        schedule.step(target=y, losses=losses)
        return float(torch.stack(losses).mean().detach())

    return model, backward


def main() -> None:
    """Train for the given epochs; write when each step ended, and its loss."""
    torch.set_num_threads(1)
    probe = Probe(rounds=False)
    pl.init()
    torch.manual_seed(0)
    points = torch.rand(CONFIG["samples"], 2) * 2 - 1
    inside = (points.norm(dim=1) < 0.8).long()
    model, backward = stage() if CONFIG["model"] == 2 else replica()
    rate = CONFIG["rate"] * CONFIG["copies"]
    optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=rate), model)
    loader = pl.DataLoader(TensorDataset(points, inside), BATCH, seed=0, drop_last=True)
    losses: list[tuple[int, float | None]] = []
    for _ in loader.epochs(CONFIG["epochs"]):
        for x, y in loader:
            loss = backward(x, y)
            optimizer.step()
            losses.append((time.monotonic_ns(), loss))
    # The ranks of a group have the same number.
    shard = pl.group().get_local_rank() if CONFIG["model"] == 2 else 0
    digest = optimizer.committed.strong_hash()
    probe.write(rank=pl.rank(), shard=shard, hash=digest, losses=losses)


main()
