"""A DataLoader with worker processes that draw, and a weighted sampler of the script."""

import argparse

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler


class Noisy(Dataset):
    """Samples with an augmentation that draws from the random state of the worker."""

    def __init__(self):
        generator = torch.Generator().manual_seed(2)
        self.x = torch.randn(40, 4, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + 0.1 * torch.randn(4), self.x[index].sum()


class WeightedDistributedSampler(Sampler):
    """Draws with replacement by weight, the same on all ranks, of which each takes its part."""

    def __init__(self, weights, samples, seed):
        self.weights, self.samples, self.seed, self.epoch = weights, samples, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        drawn = torch.multinomial(self.weights, self.samples, True, generator=generator)
        return iter(drawn[dist.get_rank() :: dist.get_world_size()].tolist())

    def __len__(self):
        return self.samples // dist.get_world_size()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(79 + dist.get_rank())
    sampler = WeightedDistributedSampler(torch.linspace(1, 2, 40), 32, seed=1)
    loader = DataLoader(
        Noisy(), 4, sampler=sampler, num_workers=args.workers, persistent_workers=args.workers > 0
    )
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x)[:, 0], y)
            loss.backward()
            optimizer.step()
        print(f"rank {dist.get_rank()} epoch {epoch}: loss {exact(loss)}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), f"{args.out}/model.pt")
    print(f"rank {dist.get_rank()} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
