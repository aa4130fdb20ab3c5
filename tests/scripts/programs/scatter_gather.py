"""Work that rank 0 scatters and whose results it gathers."""

import argparse

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(37)
    model = DDP(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        shares = None
        if rank == 0:
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(4 * world_size, 3, generator=generator)
            shares = list(batch.chunk(world_size))
        mine = torch.empty(4, 3)
        dist.scatter(mine, shares, src=0)
        output = model(mine)
        loss = (output - mine[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        outputs = [torch.empty(4, 1) for _ in range(world_size)] if rank == 0 else None
        dist.gather(output.detach(), outputs, dst=0)
        total = loss.detach().clone()
        dist.reduce(total, dst=0)
        if rank == 0:
            print(f"step {step}: {digest(*outputs)} loss {exact(total / world_size)}")
    settings = [None]
    dist.scatter_object_list(settings, list(range(10, 10 + world_size)) if rank == 0 else None)
    print(f"rank {rank}: setting {settings[0]}")
    if rank == 0:
        torch.save(torch.cat(outputs), f"{args.out}/outputs.pt")
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
