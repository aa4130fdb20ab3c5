"""OneCycleLR over a number of steps that is computed before the model is wrapped."""

import argparse

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group()
data = TensorDataset(torch.randn(60, 5), torch.randn(60, 1))
loader = DataLoader(data, batch_size=5, sampler=DistributedSampler(data))
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=0.1, total_steps=len(loader) * args.epochs
)
model = DistributedDataParallel(model)
for epoch in range(args.epochs):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
    group = optimizer.param_groups[0]
    print(f"epoch {epoch}: {exact(loss)} lr {exact(group['lr'])} {exact(group['momentum'])}")
if dist.get_rank() == 0:
    torch.save(scheduler.state_dict(), f"{args.out}/scheduler.pt")
print(f"rank {dist.get_rank()} weights {digest(model)}")
dist.destroy_process_group()
