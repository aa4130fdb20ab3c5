"""Collectives that are imported by name at the top, and functional ones.

Names that were imported before the group exists must still reach it.
"""

import argparse

import torch
from figures import digest, exact
from torch import nn
from torch.distributed import (
    ReduceOp,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    destroy_process_group,
    get_rank,
    get_world_size,
    init_process_group,
)
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    init_process_group("gloo")
    rank, world_size = get_rank(), get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("data",))
    torch.manual_seed(30 + rank)
    model = DDP(nn.Linear(3, 1), device_mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, 3)
        loss = (model(x) - x.sum(1, keepdim=True)).abs().mean()
        loss.backward()
        optimizer.step()
        worst, mean = loss.detach().clone(), loss.detach().clone()
        all_reduce(worst, op=ReduceOp.MAX)
        handle = all_reduce(mean, op=ReduceOp.AVG, async_op=True)
        handle.wait()
        total = functional.all_reduce(loss.detach(), "sum", mesh["data"])
        print(f"rank {rank} step {step}: {exact(worst)} {exact(mean)} {exact(total)}")
    mine = torch.tensor([float(rank), loss.item()])
    everybody = [torch.empty(2) for _ in range(world_size)]
    all_gather(everybody, mine)
    gathered = functional.all_gather_tensor(mine, 0, mesh["data"])
    assert torch.equal(torch.cat(everybody), gathered)
    best = gathered.view(-1, 2)[:, 1].min()
    broadcast(best, src=world_size - 1)
    print(f"rank {rank} {[exact(part[1]) for part in everybody]} best {exact(best)}")
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "best": best}, f"{args.out}/model.pt")
    barrier()
    print(f"rank {rank} weights {digest(model)}")
    destroy_process_group()


if __name__ == "__main__":
    main()
