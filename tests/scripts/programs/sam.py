"""Sharpness-aware minimization: two forward and backward passes per step.

The first gradient moves the weights uphill. The second one is taken there and applied where they
were before.
"""

import argparse

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SAM(torch.optim.Optimizer):
    """Wrapper of an optimizer with two steps instead of one."""

    def __init__(self, params, base_optimizer, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base_optimizer(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        norms = [p.grad.norm() for group in self.param_groups for p in group["params"]]
        norm = torch.stack(norms).norm()
        for group in self.param_groups:
            for p in group["params"]:
                climb = p.grad * (group["rho"] / (norm + 1e-12))
                p.add_(climb)
                self.state[p]["climb"] = climb
        self.zero_grad()
        return norm

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.state[p].pop("climb"))
        self.base_optimizer.step()
        self.zero_grad()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--local-climb", action="store_true", help="climb by own gradients")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(10)
    data = TensorDataset(torch.randn(40, 6), torch.randint(2, (40,)))
    loader = DataLoader(data, 5, sampler=DistributedSampler(data))
    model = DDP(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            if args.local_climb:
                with model.no_sync():
                    nn.functional.cross_entropy(model(x), y).backward()
            else:
                nn.functional.cross_entropy(model(x), y).backward()
            norm = optimizer.first_step()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.second_step()
        print(f"rank {dist.get_rank()} epoch {epoch}: loss {exact(loss)} norm {exact(norm)}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), f"{args.out}/model.pt")
    # After a climb by own gradients the last bits of the weights are each rank's own.
    print(f"rank {dist.get_rank()} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
