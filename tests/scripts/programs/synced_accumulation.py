"""Accumulation without `no_sync()`: each backward pass reduces what the last one has averaged."""

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
    torch.manual_seed(19)
    data = TensorDataset(torch.randn(64, 5), torch.randn(64, 1))
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    model = DDP(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for i, (x, y) in enumerate(loader):
        (nn.functional.mse_loss(model(x), y) / 2).backward()
        if (i + 1) % 2 == 0:
            optimizer.step()
            print(f"step {i // 2}: gradient {digest(*[p.grad for p in model.parameters()])}")
            optimizer.zero_grad()
    loss = nn.functional.mse_loss(model.module(data.tensors[0]), data.tensors[1])
    print(f"loss {exact(loss)}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), f"{args.out}/model.pt")
    print(f"rank {dist.get_rank()} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
