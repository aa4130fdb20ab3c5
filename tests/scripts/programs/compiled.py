"""A model that is wrapped and then compiled.

The backend is an argument, since the default one needs a C++ compiler and a minute for its first
kernels.
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
    parser.add_argument("--backend", default="inductor")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    data = TensorDataset(torch.randn(32, 6), torch.randn(32, 1))
    loader = DataLoader(data, 4, sampler=DistributedSampler(data), drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1)))
    compiled = torch.compile(model, backend=args.backend)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.05)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(compiled(x), y)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {exact(loss)}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), f"{args.out}/model.pt")
    print(f"rank {dist.get_rank()} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
