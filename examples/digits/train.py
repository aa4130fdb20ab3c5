"""Recognize handwritten digits: a small network on the 1,797 real images of scikit-learn.

    paceline run examples/digits/job.yaml       four workers
    python examples/digits/train.py             alone, as rank 0 of 1

One rank, the publisher, writes the accuracy on held-out images to $PACELINE_RUN_DIR/result.json, or
to the current folder outside of a job.
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np
import paceline as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

TRAINED = 1437
"""Number of images to train on; the other 360 are the test set."""


def main() -> None:
    """Train the network and publish its accuracy."""
    arguments = argparse.ArgumentParser(description="Train a classifier of handwritten digits.")
    arguments.add_argument("--epochs", type=int, default=30)
    arguments.add_argument("--batch-size", type=int, default=32, help="samples per rank and step")
    arguments.add_argument("--lr", type=float, default=0.05)
    options = arguments.parse_args()

    torch.set_num_threads(1)  # the ranks of one machine share its cores
    torch.manual_seed(0)
    pl.init()

    training, images, labels = load_data()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )
    optimizer = pl.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9), model
    )
    loader = pl.DataLoader(training, batch_size=options.batch_size, seed=0)

    for epoch in loader.epochs(options.epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            pl.log("loss", loss.detach(), weight=len(x))
        if pl.is_publisher() and epoch % 10 == 0:
            with pl.evaluating():
                print(f"epoch {epoch}: accuracy {accuracy(model, images, labels):.4f}", flush=True)

    # From here on the model holds the final weights, the same on every rank.
    if pl.is_publisher():
        publish({"accuracy": accuracy(model, images, labels), "epochs": options.epochs})


def load_data() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """Return the training set, test images and test labels, the same on every rank."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))  # neighbors share a writer
    images = torch.from_numpy(digits.images[order]).float()[:, None] / 16.0
    labels = torch.from_numpy(digits.target[order])
    training = TensorDataset(images[:TRAINED], labels[:TRAINED])
    return training, images[TRAINED:], labels[TRAINED:]


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of images that the model classifies correctly."""
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def publish(result: dict[str, float]) -> None:
    """Write the result file and print the accuracy."""
    folder = Path(os.environ.get("PACELINE_RUN_DIR", "."))
    (folder / "result.json").write_text(json.dumps(result) + "\n")
    print(f"final accuracy {result['accuracy']:.4f}", flush=True)


if __name__ == "__main__":
    main()
