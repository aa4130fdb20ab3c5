"""Collectives with handles that the script polls, waits for, or continues from."""

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def poll(work):
    while not work.is_completed():
        time.sleep(0.001)


def main(args):
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = DDP(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = TensorDataset(torch.randn(48, 4, generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=3, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            loss = model(x).pow(2).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        total = loss.detach().clone()
        poll(dist.all_reduce(total, async_op=True))
        every = torch.empty(3 * size)
        dist.all_gather_into_tensor(every, torch.full((3,), float(rank)), async_op=True).wait()
        part = torch.empty(2)
        dist.reduce_scatter_tensor(part, torch.arange(2.0 * size) + rank, async_op=True).wait()
        largest = torch.tensor([float(rank + epoch)])
        work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True)
        doubled = work.get_future().then(lambda done: done.value()[0] * 2).wait()
        outputs = [torch.empty(2) for _ in range(size)]
        dist.all_to_all(outputs, [each + rank for each in torch.arange(2.0 * size).chunk(size)])
        dist.monitored_barrier(timeout=timedelta(seconds=30))
        if rank == 0:
            figures = [every.tolist(), part.tolist(), doubled.item(), torch.cat(outputs).tolist()]
            print(f"epoch {epoch} {exact(total)} {figures}")
            torch.save(model.state_dict(), os.path.join(args.out, "model.pt"))
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    main(parser.parse_args())
