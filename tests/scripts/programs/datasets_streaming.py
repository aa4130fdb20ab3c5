"""`datasets` in streaming mode: files split over the ranks, mapped and shuffled in a buffer."""

import argparse
import json
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

SHARDS, LINES = 4, 12


def write_shards(folder):
    os.makedirs(folder, exist_ok=True)
    generator = torch.Generator().manual_seed(8)
    for shard in range(SHARDS):
        words = torch.randint(0, 16, (LINES, 5), generator=generator).tolist()
        with open(f"{folder}/{shard}.jsonl", "w") as file:
            file.writelines(json.dumps({"words": line}) + "\n" for line in words)


def label(sample):
    return {"label": float(sum(sample["words"]) % 2)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = f"{args.out}/shards"
    if rank == 0:
        write_shards(folder)
    dist.barrier()
    files = [f"{folder}/{shard}.jsonl" for shard in range(SHARDS)]
    data = load_dataset("json", data_files=files, split="train", streaming=True)
    data = split_dataset_by_node(data, rank=rank, world_size=size)
    data = data.map(label).shuffle(seed=3, buffer_size=6).with_format("torch")
    loader = DataLoader(data, batch_size=2, num_workers=args.workers)
    torch.manual_seed(9)
    model = DDP(nn.Sequential(nn.EmbeddingBag(16, 6), nn.Linear(6, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for epoch in range(3):
        data.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            output = model(batch["words"]).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(output, batch["label"].float())
            loss.backward()
            optimizer.step()
        print(f"rank {rank} epoch {epoch}: loss {exact(loss)}")
    if rank == 0:
        torch.save(model.module.state_dict(), f"{args.out}/model.pt")
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
