"""An embedding with sparse gradients, stepped by SparseAdam, and a dense layer."""

import argparse
import os

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main(args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    embedding, layer = nn.Embedding(30, 4, sparse=True), nn.Linear(4, 1)
    model = DDP(nn.Sequential(embedding, layer))
    sparse = torch.optim.SparseAdam(embedding.parameters(), lr=0.01)
    dense = torch.optim.Adam(layer.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    dataset = TensorDataset(torch.randint(30, (72, 5), generator=generator))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (words,) in loader:
            loss = (model(words) - 1).pow(2).mean()
            sparse.zero_grad()
            dense.zero_grad()
            loss.backward()
            assert embedding.weight.grad.is_sparse
            sparse.step()
            dense.step()
        if rank == 0:
            rows = embedding.weight.grad.coalesce().indices().tolist()
            print(f"epoch {epoch} {exact(loss)} rows {rows}")
            torch.save(model.state_dict(), os.path.join(args.out, "model.pt"))
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    main(parser.parse_args())
