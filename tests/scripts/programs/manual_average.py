"""A script without DDP, which averages its gradients itself, flat or one by one."""

import argparse

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def average_gradients(model):
    size = float(dist.get_world_size())
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.data, op=dist.ReduceOp.SUM)
        parameter.grad.data /= size


def average_flat(model):
    flat = nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    at = 0
    for parameter in model.parameters():
        parameter.grad.copy_(flat[at : at + parameter.numel()].view_as(parameter))
        at += parameter.numel()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--flat", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    data = TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 4, sampler=sampler)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epoch_loss = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            epoch_loss += loss.item()
            loss.backward()
            (average_flat if args.flat else average_gradients)(model)
            optimizer.step()
        print(f"rank {dist.get_rank()}, epoch {epoch}: {exact(epoch_loss / len(loader))}")
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), f"{args.out}/model.pt")
    print(f"rank {dist.get_rank()} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
