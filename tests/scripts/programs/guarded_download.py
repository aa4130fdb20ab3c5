"""Data that rank 0 fetches while the others wait at a barrier, and that all read then."""

import argparse
import os

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def download(path):
    """Write the file in the place of a download; a second call would be an error."""
    generator = torch.Generator().manual_seed(77)
    with open(path, "xb") as file:
        torch.save(torch.randn(32, 4, generator=generator), file)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    root = os.path.join(args.out, "data")
    path = os.path.join(root, "samples.pt")
    if local_rank != 0:
        dist.barrier()
    if not os.path.exists(path):
        os.makedirs(root)
        download(path)
    if local_rank == 0:
        dist.barrier()
    data = TensorDataset(torch.load(path, weights_only=True))
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 4)))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
        dist.barrier()
        print(f"rank {dist.get_rank()} epoch {epoch}: loss {exact(loss)}")
    print(f"rank {dist.get_rank()} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
