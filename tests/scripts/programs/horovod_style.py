"""A Horovod script after its names were replaced by those of torch.distributed.

What `hvd.broadcast_parameters`, `hvd.DistributedOptimizer` and `hvd.allreduce` did is written out:
a broadcast of weights and optimizer, DDP, and a mean of each metric.
"""

import argparse

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def broadcast_parameters(model, root_rank=0):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=root_rank)


def broadcast_optimizer_state(optimizer, root_rank=0):
    state = [optimizer.state_dict()]
    dist.broadcast_object_list(state, src=root_rank)
    optimizer.load_state_dict(state[0])


def metric_average(value):
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--base-lr", type=float, default=0.01)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42 + rank)  # weights differ until the broadcast
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(56, 5, generator=generator)
    y = (x[:, 0] > x[:, 1]).long()
    train_set, test_set = TensorDataset(x[:40], y[:40]), TensorDataset(x[40:], y[40:])
    train_sampler = DistributedSampler(train_set, num_replicas=size, rank=rank)
    test_sampler = DistributedSampler(test_set, num_replicas=size, rank=rank)
    train_loader = DataLoader(train_set, batch_size=5, sampler=train_sampler)
    test_loader = DataLoader(test_set, batch_size=5, sampler=test_sampler)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr * size, momentum=0.5)
    broadcast_parameters(model)
    broadcast_optimizer_state(optimizer)
    model = DistributedDataParallel(model)
    for epoch in range(1, args.epochs + 1):
        model.train()
        train_sampler.set_epoch(epoch)
        for batch, (data, target) in enumerate(train_loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            if batch % 2 == 0:
                print(f"rank {rank} epoch {epoch} [{batch * len(data)}] loss {exact(loss)}")
        model.eval()
        test_loss = right = 0.0
        with torch.no_grad():
            for data, target in test_loader:
                output = model(data)
                test_loss += nn.functional.cross_entropy(output, target, reduction="sum").item()
                right += (output.argmax(1) == target).sum().item()
        test_loss = metric_average(test_loss / len(test_sampler))
        right = metric_average(right / len(test_sampler))
        if rank == 0:
            print(f"test {exact(test_loss)} accuracy {right:.4f}")
            torch.save(model.module.state_dict(), f"{args.out}/checkpoint-{epoch}.pt")
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
