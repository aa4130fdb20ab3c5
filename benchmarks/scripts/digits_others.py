"""The digits by other ways to train without a barrier, re-implemented on gloo.

A rank that waits does so asleep, without a core.

    server        an asynchronous parameter server, the last rank: it applies each gradient on
                  arrival and answers with the weights that it then has
    neighbours    decentralized averaging on a ring (D-PSGD): in each step, the weights become the
                  mean of a rank's own and those of its two neighbors, plus its own update
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.digits import (
    BATCH,
    CONFIG,
    MOMENTUM,
    RATE,
    Curve,
    Pace,
    backward,
    batches,
    make_model,
)
from benchmarks.jobs import example


def main() -> None:
    """Run the role of this rank and write its results to `rank-<number>.json`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    images = len(example("digits").load_data()[0])
    gradients = CONFIG["epochs"] * images // BATCH
    facts: dict[str, Any]
    if CONFIG["way"] == "neighbours":
        facts = neighbours(rank, CONFIG["workers"], gradients // CONFIG["workers"])
    elif rank == CONFIG["workers"]:
        facts = serve(gradients)
    else:
        facts = work(rank, gradients)
    Path(f"rank-{rank}.json").write_text(json.dumps(facts))
    dist.barrier()  # no rank leaves while another one still communicates


def flat_gradient(model: torch.nn.Module) -> torch.Tensor:
    """Return the gradients as one flat tensor and reset them."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    model.zero_grad()
    return flat


def serve(gradients: int) -> dict[str, Any]:
    """Apply gradients as the parameter server and return the curve."""
    model, workers = make_model(), CONFIG["workers"]
    weights = torch.nn.Parameter(parameters_to_vector(model.parameters()).detach())
    # A synchronous step is the mean of `workers` gradients; this one applies a single gradient.
    sgd = torch.optim.SGD([weights], lr=RATE / workers, momentum=MOMENTUM)
    curve, pushed = Curve(model), torch.empty_like(weights)
    facts: dict[str, Any] = {}
    applied, living = 0, workers
    while living:
        source = dist.recv(pushed)
        if applied < gradients:
            weights.grad = pushed
            sgd.step()
            applied += 1
            vector_to_parameters(weights.detach().clone(), model.parameters())
            curve.look()
            facts = curve.judge() if applied == gradients else {}
        over = torch.tensor([float(applied >= gradients)])
        dist.send(torch.cat([weights.detach(), over]), source)
        living -= int(over)
    return facts


def work(rank: int, most: int) -> dict[str, Any]:
    """Push gradients to the server until it has enough."""
    model, pace = make_model(), Pace(rank)
    answer = torch.empty(sum(p.numel() for p in model.parameters()) + 1)
    for x, y in batches(rank, CONFIG["workers"], most + 1):
        backward(model, x, y)
        pace.end()
        dist.send(flat_gradient(model), CONFIG["workers"])
        dist.recv(answer, CONFIG["workers"])
        pace.begin()
        if answer[-1]:
            break
        vector_to_parameters(answer[:-1].clone(), model.parameters())
    return {}


def neighbours(rank: int, ranks: int, steps: int) -> dict[str, Any]:
    """Train on the ring.

    Returns:
        `curve` of this rank's own weights, and `accuracy` of the mean of all ranks.
    """
    model, pace = make_model(), Pace(rank)
    sgd = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    beside = [(rank - 1) % ranks, (rank + 1) % ranks]
    curve = Curve(model)
    for x, y in batches(rank, ranks, steps):
        pace.begin()
        before = parameters_to_vector(model.parameters()).detach().clone()
        backward(model, x, y)
        pace.end()
        sgd.step()
        sgd.zero_grad()
        mine = parameters_to_vector(model.parameters()).detach() - before
        theirs = [torch.empty_like(before) for _ in beside]
        sent = [dist.isend(before, other) for other in beside]
        came = [dist.irecv(space, other) for space, other in zip(theirs, beside, strict=True)]
        for each in (*sent, *came):
            assert each is not None
            each.wait()
        vector_to_parameters((before + theirs[0] + theirs[1]) / 3 + mine, model.parameters())
        curve.look()
    mean = parameters_to_vector(model.parameters()).detach().clone()
    dist.all_reduce(mean)  # all ranks are done
    vector_to_parameters(mean / ranks, model.parameters())
    return curve.judge()


main()
