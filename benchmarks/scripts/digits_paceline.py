"""Train the digits in a job: each image once per epoch, in whatever mode the job has."""

from __future__ import annotations

import paceline as pl
import torch

from benchmarks.digits import BATCH, CONFIG, MOMENTUM, RATE, Curve, backward, make_model
from benchmarks.jobs import example
from benchmarks.probe import Probe


def main() -> None:
    """Train all epochs and write the probe."""
    torch.set_num_threads(1)
    probe = Probe(rounds=False)
    pl.init()
    training, _, _ = example("digits").load_data()
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    optimizer = pl.DistributedOptimizer(sgd, model)
    loader = pl.DataLoader(training, batch_size=BATCH, seed=CONFIG["seed"])
    curve = Curve(model)
    for _ in loader.epochs(CONFIG["epochs"]):
        for x, y in loader:
            backward(model, x, y)
            probe.step(optimizer)
            curve.look()
    probe.write(rank=pl.rank(), hash=optimizer.committed.strong_hash(), **curve.judge())


main()
