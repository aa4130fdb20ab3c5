"""Logging of gradient norms, of the whole and of each parameter, and clipping that follows them."""

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
    torch.manual_seed(23)
    data = TensorDataset(torch.randn(48, 5), torch.randn(48, 1))
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    model = DDP(nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    lines, recent = [], []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            limit = 1.2 * sum(recent[-5:]) / len(recent[-5:]) if recent else float("inf")
            norm = nn.utils.clip_grad_norm_(model.parameters(), limit).item()
            recent.append(min(norm, limit))
            each = {name: exact(p.grad.norm()) for name, p in model.module.named_parameters()}
            lines.append(f"{len(lines)},{exact(norm)},{exact(limit)},{each['0.weight']}")
            optimizer.step()
        print(f"rank {rank} epoch {epoch}: norm {exact(norm)} {each}")
    if rank == 0:
        with open(f"{args.out}/norms.csv", "w") as file:
            file.write("\n".join(["step,norm,limit,first", *lines]) + "\n")
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
