"""A loader with `state_dict()` as torchdata has it, saved and continued within an epoch."""

import argparse
import os

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class StatefulLoader(DataLoader):
    """A DataLoader that knows how many batches it has given, and goes on behind them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.given, self.skip = 0, 0

    def __iter__(self):
        skip, self.skip = self.skip, 0
        self.given = 0
        for batch in super().__iter__():
            self.given += 1
            if self.given > skip:
                yield batch

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.skip = state["given"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--stop", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(29)
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data, seed=3)
    loader = StatefulLoader(data, batch_size=2, sampler=sampler)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    path = f"{args.out}/snapshot-{rank}.pt"
    first, steps = 0, 0
    if os.path.exists(path):
        snapshot = torch.load(path)
        model.module.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        loader.load_state_dict(snapshot["loader"])
        first, steps = snapshot["epoch"], snapshot["steps"]
    for epoch in range(first, 3):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch), target)
            loss.backward()
            optimizer.step()
            steps += 1
            if steps % 5 == 0:
                torch.save(
                    {
                        "model": model.module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "loader": loader.state_dict(),
                        "epoch": epoch,
                        "steps": steps,
                    },
                    path,
                )
            if steps == args.stop:
                break
        print(f"rank {rank} epoch {epoch}: loss {exact(loss)} after {steps} steps")
        if steps == args.stop:
            break
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
