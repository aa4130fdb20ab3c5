"""Batches of sentences of like length, and samples drawn by weight, in samplers of the script."""

import argparse

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler


class Sentences(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(2)
        self.lengths = torch.randint(2, 12, (size,), generator=generator).tolist()
        self.words = [torch.randint(1, 20, (n,), generator=generator) for n in self.lengths]

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        return self.words[index]


class Bucketed(Sampler):
    """Batches with at most `tokens` tokens of sentences of like length, split over the ranks."""

    def __init__(self, lengths, tokens, rank, size):
        self.lengths, self.tokens, self.rank, self.size = lengths, tokens, rank, size
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def batches(self):
        generator = torch.Generator().manual_seed(self.epoch)
        noise = torch.rand(len(self.lengths), generator=generator).tolist()
        order = sorted(range(len(self.lengths)), key=lambda i: self.lengths[i] + noise[i])
        batches, batch = [], []
        for index in order:
            if batch and (len(batch) + 1) * self.lengths[index] > self.tokens:
                batches.append(batch)
                batch = []
            batch.append(index)
        batches.append(batch)
        shuffled = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
        return shuffled[: len(shuffled) // self.size * self.size]

    def __iter__(self):
        return iter(self.batches()[self.rank :: self.size])

    def __len__(self):
        return len(self.batches()) // self.size


class Weighted(Sampler):
    """A weighted draw that all ranks make alike, of which each takes its share."""

    def __init__(self, weights, draws, rank, size):
        self.generator = torch.Generator()
        self.inner = WeightedRandomSampler(weights, draws * size, generator=self.generator)
        self.draws, self.rank, self.size = draws, rank, size

    def set_epoch(self, epoch):
        self.generator.manual_seed(50 + epoch)

    def __iter__(self):
        return iter(list(self.inner)[self.rank :: self.size])

    def __len__(self):
        return self.draws


def collate(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--weighted", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(19)
    data = Sentences(120)
    if args.weighted:
        sampler = Weighted([1 / n for n in data.lengths], 24, rank, size)
        loader = DataLoader(data, batch_size=3, sampler=sampler, collate_fn=collate)
    else:
        sampler = Bucketed(data.lengths, 30, rank, size)
        loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
    model = DDP(nn.Sequential(nn.EmbeddingBag(20, 8, padding_idx=0), nn.Linear(8, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen = torch.zeros(1)
        for words in loader:
            loss = (model(words).squeeze(1) - (words > 0).sum(1) / 10).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += len(words)
        dist.all_reduce(seen)
        print(f"rank {rank} epoch {epoch}: {int(seen)} sentences, loss {exact(loss)}")
    if rank == 0:
        torch.save(model.module.state_dict(), f"{args.out}/model.pt")
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
