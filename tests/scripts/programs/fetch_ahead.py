"""Loops that take batches ahead, as prefetchers for devices do, and accumulate gradients."""

import argparse
import collections
import contextlib
import itertools

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Prefetcher:
    """Gives the batches of a loader, and holds the next ones meanwhile."""

    def __init__(self, loader, depth):
        self.loader, self.depth = loader, depth

    def __iter__(self):
        held = collections.deque()
        for batch in self.loader:
            held.append(batch)
            if len(held) > self.depth:
                yield held.popleft()
        while held:
            yield held.popleft()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(37)
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(96))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches, seen = iter(Prefetcher(loader, args.depth)), []
        while group := list(itertools.islice(batches, args.accumulate)):
            optimizer.zero_grad()
            for number, (batch, target, index) in enumerate(group):
                last = number == len(group) - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = nn.functional.mse_loss(model(batch), target) / len(group)
                    loss.backward()
                seen += index.tolist()
            optimizer.step()
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, seen)
        once = len({index for each in everywhere for index in each})
        print(f"rank {rank} epoch {epoch}: loss {exact(loss)}, {len(seen)} seen, {once} in all")
    if rank == 0:
        torch.save(model.module.state_dict(), f"{args.out}/model.pt")
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
