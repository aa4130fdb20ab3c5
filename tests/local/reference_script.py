"""The training script of a job that is compared with `reference`, as a user would write it."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import paceline as pl
import torch
from paceline.transport.mpi.transport import MpiTransport

from tests.local.reference import MEMBERS
from tests.local.reference_job import (
    digest_of,
    loss_of,
    make_data,
    make_model,
    make_optimizer,
    make_scheduler,
)

CONFIG = json.loads(os.environ["CONFIG"])


def pause_in_backward(model: Any) -> None:
    """Pause after the gradients of the last layer, so that communication can overlap."""

    def pause(_: object) -> None:
        time.sleep(CONFIG["pause_s"])

    model[1].register_forward_hook(lambda _, __, output: output.register_hook(pause) and None)


def evaluate() -> None:
    """Evaluate for a different time on each rank, which changes no bit in Full."""
    if CONFIG["evaluates"]:
        with pl.evaluating():
            time.sleep(0.02 * pl.rank())


def main() -> None:
    torch.set_num_threads(1)
    if CONFIG["algorithm"] and CONFIG["algorithm"] != MEMBERS:
        # Otherwise the size of a segment decides, and the reference would have to know it, too.
        MpiTransport.algorithms = (CONFIG["algorithm"],)
    pl.init()
    model = make_model(CONFIG["hidden"], CONFIG["dtype"])
    if CONFIG["pause_s"]:
        pause_in_backward(model)
    optimizer = pl.DistributedOptimizer(
        make_optimizer(CONFIG["optimizer"], model.parameters()),
        model,
        scheduler=make_scheduler(CONFIG["scheduler"]),
        clip_norm=CONFIG["clip_norm"],
    )
    loader = pl.DataLoader(
        make_data(CONFIG["samples"]),
        batch_size=CONFIG["batch"],
        accumulate=CONFIG["accumulate"],
        seed=3,
    )
    for _ in loader.epochs(CONFIG["epochs"]):
        for number, batch in enumerate(loader, 1):
            loss_of(model, batch).backward()
            optimizer.step()
            if number == 2 * CONFIG["accumulate"] and not CONFIG["pipeline"]:
                evaluate()
        evaluate()
    sys.stdout.write(f"WEIGHTS {digest_of(model)}\n")
    sys.stdout.flush()


main()
