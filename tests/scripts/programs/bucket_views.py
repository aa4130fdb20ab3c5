"""DDP's options for memory and speed: gradients as views of buckets, small buckets, static graph.

The static graph has a layer that is used twice, which needs it.
"""

import argparse

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Recurrent(nn.Module):
    """The same layer, applied three times."""

    def __init__(self):
        super().__init__()
        self.enter, self.again, self.leave = nn.Linear(5, 64), nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x):
        x = self.enter(x)
        for _ in range(3):
            x = torch.tanh(self.again(x))
        return self.leave(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--static-graph", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(47)
    data = TensorDataset(torch.randn(40, 5), torch.randn(40, 1))
    loader = DataLoader(data, 5, sampler=DistributedSampler(data))
    model = DDP(
        Recurrent(),
        bucket_cap_mb=0.01,
        gradient_as_bucket_view=True,
        static_graph=args.static_graph,
        broadcast_buffers=False,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}: loss {exact(loss)}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), f"{args.out}/model.pt")
    print(f"rank {dist.get_rank()} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
