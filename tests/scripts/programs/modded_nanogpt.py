"""Muon and AdamW beside each other over one model, as modded-nanogpt trains it.

There is no DDP. Muon averages its gradients by `reduce_scatter`, each rank orthogonalizes the
matrices that it owns, and the new weights are gathered. AdamW's gradients are averaged one by one.
"""

import argparse
import os

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--iterations", type=int, default=10)
args = parser.parse_args()
torch.set_num_threads(1)
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(backend="gloo")
dist.barrier()
master_process = rank == 0
torch.manual_seed(100 + rank)


def orthogonalize(matrix, steps=4):
    """Return the orthogonal factor of a matrix, roughly, by iterations of Newton and Schulz."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(steps):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are orthogonal; the matrices are split over the ranks."""

    def __init__(self, params, lr, momentum):
        super().__init__(list(params), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        for group in self.param_groups:
            params = group["params"]
            spare = [torch.zeros_like(params[-1])] * (-len(params) % world_size)
            for base in range(0, len(params), world_size):
                some = [*params, *spare][base : base + world_size]
                grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in some]
                mine = torch.empty_like(grads[rank])
                dist.reduce_scatter(mine, grads, op=dist.ReduceOp.AVG)
                if base + rank < len(params):
                    p = params[base + rank]
                    state = self.state[p]
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(p)
                    buffer = state["momentum_buffer"].lerp_(mine, 1 - group["momentum"])
                    p.add_(orthogonalize(mine.lerp(buffer, group["momentum"])), alpha=-group["lr"])
                gathered = [torch.empty_like(p) for p in some]
                dist.all_gather(gathered, some[rank].clone())
                for p, new in zip(params[base : base + world_size], gathered, strict=False):
                    p.copy_(new)


class Net(nn.Module):
    """Square matrices between an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(8, 12, bias=False)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for scale, layer in zip(self.scale, self.layers, strict=True):
            x = x + scale * F.relu(layer(F.rms_norm(x, (8,)))).square()
        return F.cross_entropy(self.head(F.rms_norm(x, (8,))).flatten(0, 1), targets.flatten())


def batches(seed):
    """Yield the shares of this rank of an endless stream of tokens."""
    stream = (
        torch.randint(12, (4096,), generator=torch.Generator().manual_seed(seed)).cumsum(0) % 12
    )
    at = rank * 24
    while at + 25 <= len(stream):
        part = stream[at : at + 25]
        yield part[:-1].view(3, 8), part[1:].view(3, 8)
        at += world_size * 24


model = Net()
for param in model.parameters():
    dist.broadcast(param.detach(), 0)  # each rank has drawn its own weights
adam = torch.optim.AdamW(
    [
        {"params": [model.embed.weight, model.head.weight], "lr": 0.02},
        {"params": [model.scale], "lr": 0.01},
    ],
    betas=(0.8, 0.95),
)
muon = Muon([layer.weight for layer in model.layers], lr=0.02, momentum=0.9)
optimizers = [adam, muon]
for opt in optimizers:
    for group in opt.param_groups:
        group["initial_lr"] = group["lr"]

loader = batches(seed=1)
val_batches = [next(batches(seed=2)) for _ in range(2)]
for step in range(args.iterations + 1):
    if step % 5 == 0:
        model.eval()
        with torch.no_grad():
            val_loss = torch.stack([model(*batch) for batch in val_batches]).mean()
        dist.all_reduce(val_loss, op=dist.ReduceOp.AVG)
        if master_process:
            print(f"step:{step}/{args.iterations} val_loss:{exact(val_loss)}")
        model.train()
    if step == args.iterations:
        if master_process:
            log = {"step": step, "model": model.state_dict(), "adam": adam.state_dict()}
            torch.save(log, f"{args.out}/state_step{step:06d}.pt")
        break
    model(*next(loader)).backward()
    for group in adam.param_groups:
        for param in group["params"]:
            dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
    for opt in optimizers:
        for group in opt.param_groups:
            group["lr"] = group["initial_lr"] * (1 - step / args.iterations)
        opt.step()
    model.zero_grad(set_to_none=True)
print(f"rank {rank} weights {digest(model)}")
dist.destroy_process_group()
