"""Hyperplane regression, experiment E1 of eager-SGD (Li et al., PPoPP 2020).

    paceline run examples/hyperplane/job.yaml --inject slow:rank=random,ms=200

There are 32,768 points in 8,192 dimensions, a global batch of 2,048, and ranks that are late at
random. The points are 1 GiB of float32. They are drawn once per machine into a file in the run's
folder, which all ranks map, so eight ranks fit into the memory of one. The publisher writes the
validation loss and the time to $PACELINE_RUN_DIR/result.json.
"""

import argparse
import fcntl
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import paceline as pl
import torch
from torch import nn
from torch.utils.data import Dataset

SEED = 1908
VALIDATION = 1024
NOISE = 1.0
"""Standard deviation of the targets' error."""
BLOCK = 1024
"""Number of points drawn at a time."""

Batch = tuple[torch.Tensor, torch.Tensor]


class Points(Dataset[Batch]):
    """Points and targets in memory-mapped files; a batch is one read, not one per point."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitems__(self, numbers: list[int]) -> Batch:
        return torch.from_numpy(self.x[numbers]), torch.from_numpy(self.y[numbers])


def main() -> None:
    """Train the model and write the result file."""
    arguments = argparse.ArgumentParser(description="Regression to a hyperplane (eager-SGD, E1).")
    arguments.add_argument("--points", type=int, default=32_768)
    arguments.add_argument("--dimensions", type=int, default=8_192)
    arguments.add_argument("--batch-size", type=int, default=256, help="8 ranks make 2,048")
    arguments.add_argument("--epochs", type=int, default=48)
    arguments.add_argument("--lr", type=float, default=0.02)
    arguments.add_argument("--work-ms", type=float, default=0.0, help="least time of one step")
    options = arguments.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    pl.init()

    folder = Path(os.environ.get("PACELINE_RUN_DIR") or tempfile.gettempdir())
    training, validation = open_points(folder, options.points, options.dimensions)
    model = nn.Linear(options.dimensions, 1)
    optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=options.lr), model)
    # `__getitems__` returns a complete batch, so there is nothing left to collate.
    loader = pl.DataLoader(training, options.batch_size, seed=0, collate_fn=lambda batch: batch)

    started, steps = time.perf_counter(), 0
    for epoch in loader.epochs(options.epochs):
        began = time.perf_counter()
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x).squeeze(1), y)
            loss.backward()
            # The original computes on a GPU; a least time makes the steps comparable.
            time.sleep(max(0.0, options.work_ms / 1000 - (time.perf_counter() - began)))
            optimizer.step()
            began, steps = time.perf_counter(), steps + 1
            pl.log("loss", loss.detach(), weight=len(y))
        if pl.is_publisher() and epoch % 8 == 0:
            with pl.evaluating():
                print(f"epoch {epoch}: loss {validate(model, validation):.4f}", flush=True)

    if pl.is_publisher():
        result = {
            "loss": validate(model, validation),
            "seconds": time.perf_counter() - started,
            "steps": steps,
        }
        (folder / "result.json").write_text(json.dumps(result) + "\n")
        print(f"final loss {result['loss']:.4f} after {result['seconds']:.1f} s", flush=True)


def validate(model: nn.Module, points: Points) -> float:
    """Return the loss on these points."""
    x, y = points.__getitems__(list(range(len(points))))
    with torch.no_grad():
        return float(nn.functional.mse_loss(model(x).squeeze(1), y))


def open_points(folder: Path, points: int, dimensions: int) -> tuple[Points, Points]:
    """Return training and validation points.

    The first rank of a machine that calls this draws them.

    Args:
        folder: Folder of the file with the points.
        points: Number of training points.
        dimensions: Dimensions of a point.

    Returns:
        Training and validation points.
    """
    total = points + VALIDATION
    path = folder / f"hyperplane-{points}x{dimensions}.f32"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the rank ends, however that happens
        if not path.exists():
            draw_points(path, total, dimensions)
    rows = np.memmap(path, dtype=np.float32, mode="r", shape=(total, dimensions + 1))
    x, y = rows[:, :-1], rows[:, -1]
    return Points(x[:points], y[:points]), Points(x[points:], y[points:])


def draw_points(path: Path, total: int, dimensions: int) -> None:
    """Draw rows of a point and its target; the numbers are the same on every machine."""
    hyperplane = np.random.default_rng(SEED).standard_normal(dimensions, dtype=np.float32)
    draft = path.with_suffix(".draft")
    rows = np.memmap(draft, dtype=np.float32, mode="w+", shape=(total, dimensions + 1))
    for start in range(0, total, BLOCK):
        stop = min(start + BLOCK, total)
        dice = np.random.default_rng([SEED, start])
        x = dice.standard_normal((stop - start, dimensions), dtype=np.float32)
        noise = dice.standard_normal(stop - start, dtype=np.float32)
        rows[start:stop, :-1] = x
        rows[start:stop, -1] = x @ hyperplane / np.sqrt(np.float32(dimensions)) + NOISE * noise
    rows.flush()
    draft.rename(path)


if __name__ == "__main__":
    main()
