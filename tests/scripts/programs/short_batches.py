"""Last batches that are shorter, on all ranks alike or on one of them.

DDP takes the mean of the ranks' means, whatever the sizes of their batches.
"""

import argparse

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--uneven", action="store_true", help="rank 0 has longer batches")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(67)
    data = TensorDataset(torch.randn(72, 4), torch.randn(72, 1))
    if args.uneven:
        # All ranks have equally many batches, of 6 samples on rank 0 and of 4 elsewhere.
        size = 6 if rank == 0 else 4
        mine = Subset(data, range(rank * 6, rank * 6 + 3 * size))
        loader = DataLoader(mine, size)
    else:
        sampler = DistributedSampler(data, shuffle=False)
        loader = DataLoader(data, 72 // world_size // 3 * 2, sampler=sampler)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sizes = []
        for x, y in loader:
            sizes.append(len(x))
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        print(f"rank {rank} epoch {epoch}: batches of {sizes}, loss {exact(loss)}")
    if rank == 0:
        torch.save(model.module.state_dict(), f"{args.out}/model.pt")
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
