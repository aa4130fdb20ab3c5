"""A trainer that counts its steps: batches by next(), a schedule of its own without a state."""

import argparse
import os

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Noam:
    """The learning rate of the transformer paper, which counts its own steps."""

    def __init__(self, optimizer, warmup):
        self.optimizer = optimizer
        self.warmup = warmup
        self._step = 0

    def step(self):
        self._step += 1
        rate = 0.2 * min(self._step**-0.5, self._step * self.warmup**-1.5)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()


def cycle(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


class Trainer:
    def __init__(self, args):
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(48, 4, generator=generator)
        dataset = TensorDataset(x, x.sum(1, keepdim=True))
        self.sampler = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, batch_size=4, sampler=self.sampler)
        self.model = DDP(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
        self.schedule = Noam(torch.optim.Adam(self.model.parameters(), lr=0.0), warmup=6)
        self.batches = cycle(self.loader, self.sampler) if args.cycle else iter(self.loader)
        self.steps, self.seen = args.steps, {"epochs": 0}
        self.step = 0

    def next_batch(self):
        try:
            return next(self.batches)
        except StopIteration:
            self.seen["epochs"] += 1
            self.sampler.set_epoch(self.seen["epochs"])
            self.batches = iter(self.loader)
            return next(self.batches)

    def train(self):
        while self.step < self.steps:
            x, y = self.next_batch()
            loss = nn.functional.mse_loss(self.model(x), y)
            self.schedule.optimizer.zero_grad()
            loss.backward()
            self.schedule.step()
            if self.step % 4 == 0:
                mean = loss.detach().clone()
                dist.all_reduce(mean, op=dist.ReduceOp.AVG)
                if dist.get_rank() == 0:
                    print(f"step {self.step} loss {exact(mean)}", flush=True)
            self.step += 1


def main(args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainer = Trainer(args)
    trainer.train()
    if dist.get_rank() == 0:
        torch.save(trainer.model.module.state_dict(), os.path.join(args.out, "weights.pt"))
    print(f"rank {dist.get_rank()} weights {digest(trainer.model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cycle", action="store_true")
    parser.add_argument("--out", required=True)
    main(parser.parse_args())
