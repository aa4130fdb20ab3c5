"""A communication hook that sends gradients as float16, as torch has it, or one of the script."""

import argparse

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def rounded_hook(group, bucket):
    """Average gradients that are rounded to 1/1024 before."""
    tensor = torch.round(bucket.buffer() * 1024) / 1024 / dist.get_world_size(group)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--hook", default="fp16", choices=["fp16", "rounded"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(53)
    data = TensorDataset(torch.randn(32, 5), torch.randn(32, 1))
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    model = DDP(nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 1)))
    if args.hook == "fp16":
        model.register_comm_hook(state=None, hook=default_hooks.fp16_compress_hook)
    else:
        model.register_comm_hook(dist.group.WORLD, rounded_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"rank {dist.get_rank()} loss {exact(loss)}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), f"{args.out}/model.pt")
    print(f"rank {dist.get_rank()} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
