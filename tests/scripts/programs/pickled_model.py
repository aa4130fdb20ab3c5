"""A checkpoint that holds the wrapped model itself, pickled, instead of its state."""

import argparse
import copy
import os

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    """A class that only this script has."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, x):
        return self.layers(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(61)
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best_model, best_loss = None, float("inf")
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            val_loss = nn.functional.mse_loss(model(data.tensors[0]), data.tensors[1]).item()
        print(f"rank {rank} epoch {epoch}: loss {exact(val_loss)} {type(model).__name__}")
        if val_loss < best_loss:
            best_loss, best_model = val_loss, copy.deepcopy(model.module)
    path = os.path.join(args.out, "model.pt")
    if rank == 0:
        torch.save(model, path)
    dist.barrier()
    loaded = torch.load(path, weights_only=False)
    assert isinstance(loaded, DDP)
    assert isinstance(loaded.module, Net)
    print(f"rank {rank}: loaded {digest(loaded)} best {digest(best_model)}")
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
