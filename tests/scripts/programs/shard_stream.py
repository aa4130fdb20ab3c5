"""A stream of tar files as webdataset reads it: shards split over ranks and workers, a buffer."""

import argparse
import io
import os
import random
import tarfile

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


def write_shards(folder, shards, samples):
    os.makedirs(folder, exist_ok=True)
    generator = torch.Generator().manual_seed(7)
    for shard in range(shards):
        with tarfile.open(f"{folder}/{shard:04}.tar", "w") as tar:
            for number in range(samples):
                content = torch.randn(5, generator=generator).numpy().tobytes()
                entry = tarfile.TarInfo(f"{number:04}.bin")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))


class Shards(IterableDataset):
    """The samples of this rank's and this worker's share of the shards, shuffled in a buffer."""

    def __init__(self, folder, rank, size):
        self.folder, self.rank, self.size, self.epoch = folder, rank, size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        shards = sorted(os.listdir(self.folder))
        random.Random(self.epoch).shuffle(shards)
        for shard in shards[self.rank :: self.size][number::workers]:
            yield from self.shuffled(self.samples(shard), random.Random(f"{self.epoch} {shard}"))

    def samples(self, shard):
        with tarfile.open(f"{self.folder}/{shard}") as tar:
            for entry in tar:
                content = tar.extractfile(entry).read()
                yield torch.frombuffer(bytearray(content), dtype=torch.float32)

    def shuffled(self, samples, draw, size=4):
        buffer = []
        for sample in samples:
            buffer.append(sample)
            if len(buffer) >= size:
                yield buffer.pop(draw.randrange(len(buffer)))
        draw.shuffle(buffer)
        yield from buffer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--start", default="fork")
    parser.add_argument("--persistent", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = f"{args.out}/shards"
    if rank == 0:
        write_shards(folder, shards=2 * size, samples=12)
    dist.barrier()
    torch.manual_seed(13)
    shards = Shards(folder, rank, size)
    loader = DataLoader(
        shards,
        batch_size=4,
        num_workers=args.workers,
        multiprocessing_context=args.start if args.workers else None,
        persistent_workers=args.persistent,
    )
    model = DDP(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        shards.set_epoch(epoch)
        total, batches = 0, 0
        for batch in loader:
            loss = nn.functional.mse_loss(model(batch[:, :4]), batch[:, 4:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            batches += 1
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        print(f"rank {rank} epoch {epoch}: {batches} batches, loss {exact(total)}")
    dist.barrier()
    if rank == 0:
        for name in os.listdir(folder):
            os.unlink(f"{folder}/{name}")
        os.rmdir(folder)
        torch.save(model.module.state_dict(), f"{args.out}/model.pt")
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
