"""BatchNorm whose statistics DDP broadcasts from rank 0 before each forward pass.

Rank 0's statistics are those of its own batches. What the other ranks evaluate with is printed too.
"""

import argparse

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(43)
    data = TensorDataset(torch.randn(48, 5) * 2 + 1, torch.randint(2, (48,)))
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    model = DDP(
        nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, momentum=0.3), nn.ReLU(), nn.Linear(6, 2))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            output = model(data.tensors[0])  # this forward pass takes rank 0's statistics
        val_loss = nn.functional.cross_entropy(output, data.tensors[1])
        buffers = digest(*model.buffers())
        print(f"rank {rank} epoch {epoch}: {exact(loss)} val {exact(val_loss)} {buffers}")
    if rank == 0:
        torch.save(model.module.state_dict(), f"{args.out}/model.pt")
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
