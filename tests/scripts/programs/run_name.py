"""A run name that rank 0 draws and broadcasts, and objects that are gathered at the end."""

import argparse
import json
import os
import uuid

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
    rank = dist.get_rank()
    names = [f"run-{uuid.uuid4()}" if rank == 0 else None]
    dist.broadcast_object_list(names, src=0)
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, names[0])
    print(f"rank {rank}: the name is {'the same' if len(set(everywhere)) == 1 else 'not the same'}")
    folder = os.path.join(args.out, "run")  # a test cannot compare folders with random names
    if rank == 0:
        os.makedirs(folder)
    dist.barrier()
    torch.manual_seed(rank)
    model = DDP(nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    history = []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 3)).square().mean()
        loss.backward()
        optimizer.step()
        history.append({"rank": rank, "step": step, "loss": exact(loss)})
    with open(os.path.join(folder, f"rank-{rank}.json"), "w") as file:
        json.dump(history, file)
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"rank": rank, "last": history[-1]["loss"]})
    at_root = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(len(history), at_root, dst=0)
    print(f"rank {rank}: gathered {gathered}, at the root {at_root}")
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
