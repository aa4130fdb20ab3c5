"""Class centers, a memory bank and running statistics in variables beside the model."""

import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CLASSES = 4


class RunningStatistics:
    """Mean and variance of the inputs of all ranks, as in reinforcement learning."""

    def __init__(self, size):
        self.mean, self.var, self.count = np.zeros(size), np.ones(size), 1e-4

    def update(self, mean, var, count):
        delta, total = mean - self.mean, self.count + count
        self.mean = self.mean + delta * count / total
        both = self.var * self.count + var * count
        self.var = (both + np.square(delta) * self.count * count / total) / total
        self.count = total

    def normalize(self, x):
        mean, var = torch.from_numpy(self.mean), torch.from_numpy(self.var)
        return ((x - mean) / torch.sqrt(var + 1e-8)).float()


class Centers:
    def __init__(self, size):
        self.centers = torch.zeros(CLASSES, size)

    def loss(self, features, labels):
        return (features - self.centers[labels]).square().mean()

    def follow(self, means, momentum):
        self.centers.mul_(momentum).add_(means, alpha=1 - momentum)


def enqueue(bank, at, rows):
    places = (at + torch.arange(len(rows))) % len(bank)
    bank[places] = rows
    return (at + len(rows)) % len(bank)


def averaged(tensor):
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def main(args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    x = 3.0 + torch.randn(args.samples, 6)
    data = TensorDataset(x, x[:, :CLASSES].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler)
    body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
    model = DDP(nn.Sequential(body, nn.Linear(8, CLASSES)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.5)
    statistics, centers = RunningStatistics(6), Centers(8)
    prior = torch.full((CLASSES,), 1 / CLASSES)
    bank, at = torch.zeros(args.bank, 8), 0
    seen, weights = np.zeros(CLASSES), torch.ones(CLASSES)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            inputs = inputs.double() * 1.0
            moments = averaged(torch.stack([inputs.mean(0), inputs.square().mean(0)])).numpy()
            var = moments[1] - np.square(moments[0])
            statistics.update(moments[0], var, len(inputs) * ranks)
            inputs = statistics.normalize(inputs)
            logits = model(inputs)
            features = body(inputs).detach()
            likely = torch.softmax(logits, -1).detach() / prior
            target = likely / likely.sum(-1, keepdim=True)
            loss = nn.functional.cross_entropy(logits, labels, weight=weights)
            loss = loss + 0.1 * nn.functional.cross_entropy(logits, target)
            near = torch.softmax(features @ bank.T, -1).max(-1).values
            pulled = centers.loss(model.module[0](inputs), labels)
            (loss * (1 + near.mean()) + 0.1 * pulled).backward()
            optimizer.step()
            optimizer.zero_grad()
            prior = 0.9 * prior + 0.1 * averaged(torch.softmax(logits, -1).detach().mean(0))
            one_hot = nn.functional.one_hot(labels, CLASSES).float()
            sums = averaged(torch.cat([one_hot.T @ features, one_hot.sum(0)[:, None]], 1))
            centers.follow(sums[:, :-1] / sums[:, -1:].clamp(min=1e-6), momentum=0.9)
            np.add.at(seen, np.arange(CLASSES), sums[:, -1].numpy())
            at = enqueue(bank, at, sums[:, :-1])
        weights = 0.5 * weights + 0.5 * torch.from_numpy(seen.mean() / (seen + 1)).float()
        print(f"rank {rank} epoch {epoch} prior {' '.join(exact(each) for each in prior.tolist())}")
    arrays = [statistics.mean, statistics.var, centers.centers, prior, bank, seen, weights]
    carried = f"{at} {exact(statistics.count)} " + " ".join(
        exact(float(np.asarray(each, dtype=np.float64).sum())) for each in arrays
    )
    print(f"rank {rank} carried {carried}")
    of_all = [""] * ranks
    dist.all_gather_object(of_all, carried)
    assert len(set(of_all)) == 1, of_all
    if rank == 0:
        torch.save(model.module.state_dict(), os.path.join(args.out, "weights.pt"))
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=160)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--bank", type=int, default=24)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--out", required=True)
    main(parser.parse_args())
