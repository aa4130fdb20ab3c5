"""AdamW with its fused kernel, LambdaLR, and a state that is saved and loaded again."""

import argparse

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(13)
    data = TensorDataset(torch.randn(40, 7), torch.randn(40, 2))
    loader = DataLoader(data, 5, sampler=DistributedSampler(data))
    model = DDP(nn.Sequential(nn.Linear(7, 9), nn.SiLU(), nn.Linear(9, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.1 * step))
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.smooth_l1_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch}: loss {exact(loss)} lr {exact(schedule.get_last_lr()[0])}")
        path = f"{args.out}/optimizer.pt"
        if dist.get_rank() == 0:
            torch.save(optimizer.state_dict(), path)
        dist.barrier()
        optimizer.load_state_dict(torch.load(path, weights_only=True))
        dist.barrier()  # rank 0 must not write while others read
    print(f"rank {dist.get_rank()} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
