"""A backbone that is frozen first, then trained too with a rate of its own.

The model is wrapped again when it is unfrozen, since DDP looks at `requires_grad` only once.
"""

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
    parser.add_argument("--unfreeze-at", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(8)
    data = TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 4, sampler=sampler)
    backbone = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.ReLU())
    model = nn.Sequential(backbone, nn.Linear(10, 3))
    for parameter in backbone.parameters():
        parameter.requires_grad_(False)
    ddp_model = DDP(model)
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=1e-2)
    for epoch in range(3):
        if epoch == args.unfreeze_at:
            for parameter in backbone.parameters():
                parameter.requires_grad_(True)
            optimizer.add_param_group({"params": list(backbone.parameters()), "lr": 1e-3})
            ddp_model = DDP(model)
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp_model(x), y)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {exact(loss)} backbone {digest(backbone)}")
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), f"{args.out}/model.pt")
    print(f"rank {dist.get_rank()} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
