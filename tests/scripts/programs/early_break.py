"""Passes that the script leaves by `break`, with a total number of steps instead of epochs."""

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
    parser.add_argument("--max-steps", type=int, default=11)
    parser.add_argument("--steps-per-epoch", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(29)
    data = TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, 4, sampler=sampler)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    global_step, epoch = 0, 0
    while global_step < args.max_steps:
        sampler.set_epoch(epoch)
        seen = 0.0
        for i, (x, y) in enumerate(loader):
            if i == args.steps_per_epoch:
                break
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            seen += x.sum().item()
            global_step += 1
            if global_step == args.max_steps:
                break
        print(f"rank {dist.get_rank()} epoch {epoch}: {global_step} {exact(loss)} {exact(seen)}")
        epoch += 1
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), f"{args.out}/model.pt")
    print(f"rank {dist.get_rank()} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
