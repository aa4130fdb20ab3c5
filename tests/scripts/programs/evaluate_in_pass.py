"""A model with BatchNorm that is evaluated every few batches, within a pass.

Evaluation runs the wrapped model without gradients. The forward pass after it sends no buffers, by
DDP's own rule, so which calls a step makes depends on what the rank did before.
"""

import argparse

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    total = torch.zeros(2)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        total += torch.stack([loss, torch.tensor(float(len(x)))])
    dist.all_reduce(total)
    model.train()
    return total[0] / total[1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--every", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(61)
    data = TensorDataset(torch.randn(96, 5) * 2 + 1, torch.randint(2, (96,)))
    held_out = TensorDataset(torch.randn(24, 5) * 2 + 1, torch.randint(2, (24,)))
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    val_loader = DataLoader(held_out, 4, sampler=DistributedSampler(held_out, shuffle=False))
    model = DDP(
        nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, momentum=0.3), nn.ReLU(), nn.Linear(6, 2))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if (i + 1) % args.every == 0:
                print(f"rank {rank} epoch {epoch} batch {i}: {exact(evaluate(model, val_loader))}")
        print(f"rank {rank} epoch {epoch}: {exact(evaluate(model, val_loader))}")
    if rank == 0:
        torch.save(model.module.state_dict(), f"{args.out}/model.pt")
    # The statistics of a BatchNorm are each rank's own until they are sent.
    print(f"rank {rank} weights {digest(*model.parameters())}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
