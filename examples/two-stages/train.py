"""A pipeline of two stages inside a pod, data parallelism between pods.

paceline run examples/two-stages/job.yaml      two groups of two ranks

The first rank of a group has the front of a network and the second its end. A batch passes through
in four parts, so that both ranks compute at the same time.
"""

import os

import paceline as pl
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.data import TensorDataset

EPOCHS = int(os.environ.get("EPOCHS", "20"))

torch.manual_seed(0)  # every rank must build the same data set and the same model
torch.set_num_threads(1)  # the ranks of one machine share its cores
pl.init()

points = torch.rand(4096, 2) * 2 - 1
inside = (points.norm(dim=1) < 0.8).long()
layers = [nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)]

group = pl.group()
stage_index, is_last = group.get_local_rank(), group.get_local_rank() == 1
model = nn.Sequential(*(layers[3:] if is_last else layers[:3]))
stage = PipelineStage(model, stage_index, 2, torch.device("cpu"), group=group.get_group())
pipeline = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.cross_entropy)

optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
loader = pl.DataLoader(TensorDataset(points, inside), batch_size=32, seed=0, drop_last=True)

for _ in loader.epochs(EPOCHS):
    for x, y in loader:
        if is_last:
            losses: list[torch.Tensor] = []
            pipeline.step(target=y, losses=losses)
            pl.log("loss", torch.stack(losses).mean().detach(), weight=len(x))
        else:
            pipeline.step(x)
        optimizer.step()

if pl.is_publisher():
    print(f"trained {EPOCHS} epochs", flush=True)
