"""torchdata's StatefulDataLoader: its state is saved within an epoch, and a later run goes on."""

import argparse
import os

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader


class Stream(IterableDataset):
    """This rank's part of the samples; it knows how far it has been read."""

    def __init__(self, *tensors):
        self.tensors, self.at = tensors, 0

    def __iter__(self):
        rank, size = dist.get_rank(), dist.get_world_size()
        length = len(self.tensors[0]) // size
        while self.at < length:
            self.at += 1
            yield tuple(each[(self.at - 1) * size + rank] for each in self.tensors)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--stop", type=int, default=1000)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(29)
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True)
    data = Stream(x, y) if args.stream else TensorDataset(x, y)
    sampler = None if args.stream else DistributedSampler(data, seed=3)
    loader = StatefulDataLoader(data, batch_size=2, sampler=sampler, num_workers=args.workers)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    path = f"{args.out}/snapshot-{rank}.pt"
    first, steps = 0, 0
    if os.path.exists(path):
        snapshot = torch.load(path, weights_only=False)
        model.module.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        loader.load_state_dict(snapshot["loader"])
        first, steps = snapshot["epoch"], snapshot["steps"]
    for epoch in range(first, 3):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch), target)
            loss.backward()
            optimizer.step()
            steps += 1
            if steps % 5 == 0 and args.stop < 1000:
                snapshot = {"model": model.module.state_dict(), "epoch": epoch, "steps": steps}
                snapshot |= {"optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
                torch.save(snapshot, path)
            if steps == args.stop:
                break
        print(f"rank {rank} epoch {epoch}: loss {exact(loss)}")
        if steps == args.stop:
            break
    if rank == 0:
        torch.save(model.module.state_dict(), f"{args.out}/model.pt")
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
