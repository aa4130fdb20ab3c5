"""Synchronous data-parallel training by hand in one process; mode Full must give its exact bits.

Batches are dealt round-robin to the ranks. Each rank's gradients are summed, the ranks' sums are
added in the order of the data channel, the mean over their samples is clipped, and the optimizer
steps. For a bfloat16 model it steps float32 masters, as in plain torch. Where sums are sent as
bfloat16, each rank adds the rounding residual of the round before.

Only the order of the samples, the places of the parameters in the buffer and the order of additions
of its own MPI algorithms come from Paceline; gloo's allreduce is torch's own.
"""

from __future__ import annotations

from datetime import timedelta
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from paceline.core.collectives import shared
from paceline.core.collectives.schedules import bounds, fold, schedule
from paceline.core.protocol.records import DataPlan
from paceline.core.protocol.sampling import batches_of, leases_per_epoch, total_leases
from paceline.worker.state.flat import FlatLayout

from tests.local.reference_job import (
    digest_of,
    loss_of,
    make_data,
    make_model,
    make_optimizer,
    make_scheduler,
)

MEMBERS = "members"
"""The algorithm that adds in member order."""


def train(config: dict[str, Any], folder: Path) -> str:
    """Train and return a digest of the final weights."""
    torch.set_num_threads(1)
    ranks, step_samples = config["ranks"], config["batch"] * config["accumulate"]
    nominal = ranks * step_samples
    plan = DataPlan(
        samples=config["samples"],
        batch=config["batch"],
        accumulate=config["accumulate"],
        epochs=config["epochs"],
        seed=3,
    )
    data, model = make_data(plan.samples), make_model(config["hidden"], config["dtype"])
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = make_optimizer(config["optimizer"], masters)
    factory = make_scheduler(config["scheduler"])
    scheduler = factory(optimizer) if factory else None
    layout = FlatLayout(list(model.named_parameters()), config["segment_bytes"])
    add_up = _AllReduce(config["algorithm"], ranks, folder)
    progress, last_unit = Fraction(0), 1
    residuals = [layout.zeros() for _ in range(ranks)] if config["wire"] == "BFloat16" else []
    leases = list(range(total_leases(plan)))
    before = _weights(model)
    for first in range(0, len(leases), ranks):
        now = _weights(model)
        # With a pipeline a gradient lacks the last update, except in the first round of an epoch.
        lags = config["pipeline"] and first % leases_per_epoch(plan)
        _set(model, before if lags else now)
        parts = [_gradient(model, layout, data, plan, x) for x in leases[first : first + ranks]]
        _set(model, now)
        before = now
        units = {unit for _, unit, _ in parts}
        samples = sum(count for _, _, count in parts)
        if len(units) == 1:  # the mean of the means
            unit = units.pop()
            sums, divisor = [flats for flats, _, _ in parts], samples / unit
        else:
            unit = 1
            sums = [[flat * float(unit) for flat in flats] for flats, unit, _ in parts]
            divisor = float(samples)
        while len(sums) < ranks:
            sums.append(layout.zeros())
        for flats, residual in zip(sums, residuals, strict=False):
            for flat, left in zip(flats, residual, strict=True):
                flat.add_(left, alpha=last_unit / unit)
                left.zero_()
        last_unit = unit
        mean = [
            add_up([flats[segment] for flats in sums], [left[segment] for left in residuals])
            / divisor
            for segment in range(len(layout.segments))
        ]
        if config["clip_norm"] is not None:
            norm = float(torch.linalg.vector_norm(torch.cat(mean).double()))
            if norm + 1e-6 > config["clip_norm"]:
                for segment in mean:
                    segment.mul_(config["clip_norm"] / (norm + 1e-6))
        for master, view in zip(masters, layout.views(mean), strict=True):
            master.grad = view.clone()
        optimizer.step()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            parameter.detach().copy_(master)
        after = progress + Fraction(samples, nominal)
        for _ in range(int(after) - int(progress)):
            if scheduler is not None:
                scheduler.step()
        progress = after
    weights: str = digest_of(model)
    return weights


def _weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def _set(model: torch.nn.Module, weights: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)


def _gradient(
    model: torch.nn.Module, layout: FlatLayout, data: Any, plan: DataPlan, lease: int
) -> tuple[list[torch.Tensor], int, int]:
    """Return (sum of per-sample gradients / unit, unit, samples) of one step of one rank."""
    model.zero_grad()
    unit, samples = 0, 0
    for numbers in batches_of(plan, lease):
        if unit not in (0, len(numbers)):
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(unit / len(numbers))
        unit = len(numbers)
        samples += unit
        batch = torch.utils.data.default_collate([data[x] for x in numbers])
        torch.autograd.backward(loss_of(model, batch))
    flats = layout.zeros()
    for view, parameter in zip(layout.views(flats), model.parameters(), strict=True):
        assert parameter.grad is not None
        view.copy_(parameter.grad)
    return flats, unit, samples


class _AllReduce:
    """Adds one buffer per rank; with an empty `algorithm`, all ranks use gloo in this process."""

    def __init__(self, algorithm: str, ranks: int, folder: Path) -> None:
        self._algorithm = algorithm
        self._groups: list[Any] = []
        if not algorithm:
            self._groups = _gloo_groups(ranks, folder)

    def __call__(self, parts: list[torch.Tensor], residuals: list[torch.Tensor]) -> torch.Tensor:
        """Return the sum; with `residuals`, send bfloat16 and add the rounding error to them."""
        if self._groups:
            works = [g.allreduce([p]) for g, p in zip(self._groups, parts, strict=True)]
            for work in works:
                work.wait()
            assert all(torch.equal(part, parts[0]) for part in parts)
            return parts[0]
        if self._algorithm == MEMBERS:
            return shared.fold(parts, torch.add)
        edges = bounds(len(parts[0]), schedule(self._algorithm, len(parts), 0).chunks)
        chunks = []
        for number, (low, high) in enumerate(pairwise(edges)):

            def rounded(part: torch.Tensor, rank: int, low: int = low) -> torch.Tensor:
                if not residuals:
                    return part
                short = part.bfloat16().float()
                residuals[rank][low : low + len(part)] += part - short
                return short

            there = [p[low:high] for p in parts]
            chunks.append(fold(self._algorithm, there, number, torch.add, rounded))
        return torch.cat(chunks)


def _gloo_groups(ranks: int, folder: Path) -> list[Any]:
    from concurrent.futures import ThreadPoolExecutor

    from torch._C._distributed_c10d import FileStore
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    def join(rank: int) -> Any:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._threads = 1
        options._timeout = timedelta(seconds=30)
        store = FileStore(str(folder / "store"), ranks)
        return ProcessGroupGloo(store, rank, ranks, options)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(join, range(ranks)))
