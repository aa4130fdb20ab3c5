"""An evaluation by rank 0 alone, on the module without its wrapper, while the others wait."""

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
    torch.manual_seed(73)
    data = TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
    val_x, val_y = torch.randn(30, 4), torch.randn(30, 1)
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    model = DDP(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    best = float("inf")
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        if rank == 0:
            model.eval()
            with torch.no_grad():
                val_loss = nn.functional.mse_loss(model.module(val_x), val_y).item()
            model.train()
            print(f"epoch {epoch}: val {exact(val_loss)}")
            if val_loss < best:
                best = val_loss
                torch.save(model.module.state_dict(), f"{args.out}/best.pt")
        dist.barrier()
    model.module.load_state_dict(torch.load(f"{args.out}/best.pt", weights_only=True))
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
