"""A first job: a small network learns which points of a square lie inside a circle.

paceline run examples/first/job.yaml       as a job of three workers
python examples/first/train.py             alone, as rank 0 of 1
"""

import os

import paceline as pl
import torch
from torch import nn
from torch.utils.data import TensorDataset

EPOCHS = int(os.environ.get("EPOCHS", "40"))

torch.manual_seed(0)  # every rank must build the same data set and the same model
torch.set_num_threads(1)  # the ranks of one machine share its cores
pl.init()

points = torch.rand(4096, 2) * 2 - 1
inside = (points.norm(dim=1) < 0.8).long()
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
loader = pl.DataLoader(TensorDataset(points, inside), batch_size=32, seed=0)

for _ in loader.epochs(EPOCHS):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        pl.log("loss", loss.detach(), weight=len(x))

if pl.is_publisher():  # the model now holds the final weights, the same on every rank
    right = (model(points).argmax(1) == inside).float().mean()
    print(f"accuracy {right:.3f} after {EPOCHS} epochs", flush=True)
