"""B1: the hyperplane example with steps of a given length, for a given time.

Data, model and loss are those of examples/hyperplane/train.py. The script keeps the weights that
this rank has after `seconds` of training and judges them after the end, so that judging costs no
mode anything.
"""

from __future__ import annotations

import time
from pathlib import Path

import paceline as pl
import torch
from paceline.clock import now_ns

from benchmarks.jobs import example
from benchmarks.probe import CONFIG, Probe


def main() -> None:
    """Train until the job stops, judge the kept weights, and write the probe."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train = example("hyperplane")
    probe = Probe()
    pl.init()
    points, validation = train.open_points(
        Path(CONFIG["folder"]), CONFIG["points"], CONFIG["dimensions"]
    )
    model = torch.nn.Linear(CONFIG["dimensions"], 1)
    optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=CONFIG["lr"]), model)
    loader = pl.DataLoader(points, CONFIG["batch"], seed=0, collate_fn=lambda batch: batch)
    began_ns = until_ns = 0
    kept: dict[str, torch.Tensor] = {}
    for _ in loader.epochs(1_000_000):
        began_ns = began_ns or now_ns()
        until_ns = until_ns or began_ns + round(CONFIG["seconds"] * 1e9)
        begun = time.perf_counter()
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x).squeeze(1), y)
            loss.backward()
            time.sleep(max(0.0, CONFIG["work_ms"] / 1000 - (time.perf_counter() - begun)))
            if not kept and now_ns() > until_ns:
                kept = {name: value.clone() for name, value in model.state_dict().items()}
            probe.step(optimizer)
            begun = time.perf_counter()
    model.load_state_dict(kept or model.state_dict())
    loss_then = train.validate(model, validation) if pl.rank() == 0 else 0.0
    probe.write(
        rank=pl.rank(),
        hash=optimizer.committed.strong_hash(),
        loss=loss_then,
        began=began_ns,
        until=until_ns,
        kept=bool(kept),
    )


main()
