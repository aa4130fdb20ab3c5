"""A classifier as timm trains it.

The scheduler is a class of the script and no torch scheduler, the loader wraps a DataLoader, losses
are averaged by `reduce_tensor`, and the buffers are averaged after each epoch.
"""

import argparse
import csv
import math
import os

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class CosineScheduler:
    """Rate by epoch and by update; the script calls it, and torch knows nothing of it."""

    def __init__(self, optimizer, updates, warmup, floor):
        self.optimizer, self.updates, self.warmup, self.floor = optimizer, updates, warmup, floor
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.step_update(0)

    def state_dict(self):
        return {name: value for name, value in vars(self).items() if name != "optimizer"}

    def step_update(self, num_updates):
        for group in self.optimizer.param_groups:
            base = group["initial_lr"]
            if num_updates < self.warmup:
                group["lr"] = base * (num_updates + 1) / self.warmup
            else:
                cosine = 0.5 * (1 + math.cos(math.pi * num_updates / self.updates))
                group["lr"] = self.floor + (base - self.floor) * cosine


class OrderedDistributedSampler(Sampler):
    """Every W-th sample in order, padded so that all ranks have the same number."""

    def __init__(self, dataset):
        self.dataset, self.rank, self.replicas = dataset, dist.get_rank(), dist.get_world_size()
        self.num_samples = math.ceil(len(dataset) / self.replicas)

    def __iter__(self):
        order = list(range(len(self.dataset)))
        order += order[: self.num_samples * self.replicas - len(order)]
        return iter(order[self.rank :: self.replicas])

    def __len__(self):
        return self.num_samples


class PrefetchLoader:
    """A loader that normalizes batches and is always one batch ahead of the loop."""

    def __init__(self, loader, mean, std):
        self.loader, self.mean, self.std = loader, mean, std

    def __iter__(self):
        ahead = None
        for image, target in self.loader:
            if ahead is not None:
                yield ahead
            ahead = (image - self.mean) / self.std, target
        yield ahead

    def __len__(self):
        return len(self.loader)

    @property
    def sampler(self):
        return self.loader.sampler


class ModelEma:
    """Average of the weights, as tensors of a state dict."""

    def __init__(self, model, decay):
        self.decay = decay
        self.state = {name: value.clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model):
        for name, value in model.module.state_dict().items():
            if value.dtype.is_floating_point:
                self.state[name].mul_(self.decay).add_(value, alpha=1 - self.decay)


def reduce_tensor(tensor, n):
    reduced = tensor.clone()
    dist.all_reduce(reduced, op=dist.ReduceOp.SUM)
    return reduced / n


def distribute_bn(model, world_size):
    for name, buffer in model.module.named_buffers():
        if "running" in name:
            dist.all_reduce(buffer, op=dist.ReduceOp.SUM)
            buffer /= float(world_size)


def validate(model, loader, world_size):
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for image, target in loader:
            loss = nn.functional.cross_entropy(model(image), target)
            total += reduce_tensor(loss.data, world_size).item() * len(target)
            count += len(target)
    return total / count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo", init_method="env://")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)  # the weights of rank 0 are broadcast by DDP
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(70, 10, generator=generator) * 3 + 1
    y = (x.sum(1) > 10).long()
    train_set, val_set = TensorDataset(x[:48], y[:48]), TensorDataset(x[48:], y[48:])
    sampler = DistributedSampler(train_set)
    train_loader = PrefetchLoader(DataLoader(train_set, 4, sampler=sampler), 1.0, 3.0)
    val_loader = PrefetchLoader(
        DataLoader(val_set, 4, sampler=OrderedDistributedSampler(val_set)), 1.0, 3.0
    )
    # timm has no bias before BatchNorm: its gradient is rounding, which RMSprop makes large.
    body = [nn.Linear(10, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2)]
    model = nn.Sequential(*body, nn.Linear(12, 2))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3, alpha=0.9, momentum=0.9)
    ema = ModelEma(model, 0.9)
    model = NativeDDP(model, broadcast_buffers=False)
    updates = args.epochs * len(train_loader)
    scheduler = CosineScheduler(optimizer, updates, warmup=3, floor=1e-5)
    num_updates, rows = 0, []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for image, target in train_loader:
            loss = nn.functional.cross_entropy(model(image), target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            ema.update(model)
            num_updates += 1
            mean = reduce_tensor(loss.data, world_size)
            scheduler.step_update(num_updates)
        distribute_bn(model, world_size)
        metric = validate(model, val_loader, world_size)
        rows.append({"epoch": epoch, "train_loss": exact(mean), "eval_loss": exact(metric)})
        if rank == 0:
            print(rows[-1])
            state = {"epoch": epoch, "state_dict": model.module.state_dict(), "ema": ema.state}
            state |= {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
            torch.save(state, os.path.join(args.out, "last.pt"))
    if rank == 0:
        with open(os.path.join(args.out, "summary.csv"), "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
