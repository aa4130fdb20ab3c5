"""A stream of samples that an IterableDataset splits by rank, with batches built by a function."""

import argparse
import itertools

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    """Every W-th sample of an endless stream, for one epoch."""

    def __init__(self, length):
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(100 + self.epoch)
        stream = (torch.randn(5, generator=generator) for _ in range(self.length))
        return itertools.islice(stream, dist.get_rank(), None, dist.get_world_size())


def collate(samples):
    x = torch.stack(samples)
    return {"inputs": x[:, :4], "labels": (x[:, 4:] > 0).float()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(31)
    stream = Stream(64)
    loader = DataLoader(stream, batch_size=4, collate_fn=collate)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.02)
    for epoch in range(2):
        stream.set_epoch(epoch)
        for batch in loader:
            logits = model(batch["inputs"])
            loss = nn.functional.binary_cross_entropy_with_logits(logits, batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"rank {dist.get_rank()} epoch {epoch}: loss {exact(loss)}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), f"{args.out}/model.pt")
    print(f"rank {dist.get_rank()} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
