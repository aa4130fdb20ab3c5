"""Averages of the weights that the script keeps in plain dicts and lists.

A class has a dict of tensors by name and counts its updates, another one has lists of tensors, and
the best weights stay in memory.
"""

import argparse
import copy
import os

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class EMA:
    """An average that is put in the place of the weights for an evaluation."""

    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.rank = dist.get_rank()
        self.num_updates = 0
        self.shadow, self.backup = {}, {}

    def register(self):
        for name, parameter in self.model.named_parameters():
            self.shadow[name] = parameter.data.clone()

    def update(self):
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        for name, parameter in self.model.named_parameters():
            average = (1.0 - decay) * parameter.data + decay * self.shadow[name]
            self.shadow[name] = average.clone()

    def apply_shadow(self):
        for name, parameter in self.model.named_parameters():
            self.backup[name] = parameter.data
            parameter.data = self.shadow[name]

    def restore(self):
        for name, parameter in self.model.named_parameters():
            parameter.data = self.backup[name]
        self.backup = {}


class Averages:
    """Averages with several rates, each a list of tensors."""

    def __init__(self, model, rates):
        self.params, self.rates = list(model.parameters()), rates
        self.ema_params = [copy.deepcopy(self.params) for _ in rates]

    def update(self):
        for rate, averages in zip(self.rates, self.ema_params, strict=True):
            for average, parameter in zip(averages, self.params, strict=True):
                average.detach().mul_(rate).add_(parameter, alpha=1 - rate)


def main(args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    ema = EMA(model, 0.99)
    ema.register()
    averages = Averages(model, [0.9, 0.99])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(72, 4, generator=generator)
    dataset = TensorDataset(inputs, torch.randn(72, 1, generator=generator))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    best, best_loss = None, float("inf")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = (model(x) - y).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update()
            averages.update()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if mean.item() < best_loss:
            best_loss = mean.item()
            best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        ema.apply_shadow()
        with torch.no_grad():
            error = (model.module(dataset.tensors[0]) - dataset.tensors[1]).pow(2).mean()
        ema.restore()
        if rank == 0:
            print(f"epoch {epoch} {exact(error)}")
            kept = {"ema": ema.shadow, "best": best, "updates": ema.num_updates}
            torch.save(kept, os.path.join(args.out, "averages.pt"))
    assert ema.rank == rank
    lists = [average for each in averages.ema_params for average in each]
    kept = [*ema.shadow.values(), *lists, *best.values(), torch.tensor(ema.num_updates)]
    print(f"rank {rank} weights {digest(model, *kept)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    main(parser.parse_args())
