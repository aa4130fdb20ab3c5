"""Tensor parallelism inside a pod, data parallelism between pods: a transformer block.

paceline run examples/tensor-parallel/job.yaml      two groups of two ranks
python examples/tensor-parallel/train.py            alone, with the whole block

The block learns to tell which of two digits occurs more often in a row of sixteen.
"""

import os

import paceline as pl
import torch
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import TensorDataset

EPOCHS = int(os.environ.get("EPOCHS", "12"))
WIDTH, HEADS, LENGTH = 32, 4, 16


class Attention(nn.Module):
    """Self-attention over the heads that this rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return attended features of shape (batch, LENGTH, WIDTH)."""
        # This rank has as many heads as its columns hold.
        q, k, v = (
            part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Transformer block with an embedding and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, digits: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (batch, 2) for digits of shape (batch, LENGTH)."""
        x = self.embed(digits)
        x = x + self.attention(self.norm1(x))
        x = x + self.narrow(nn.functional.gelu(self.wide(self.norm2(x))))
        return self.head(x.mean(dim=1))


PLAN = {
    **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
    "attention.out": RowwiseParallel(),
    "wide": ColwiseParallel(),
    "narrow": RowwiseParallel(),
}
"""Layers that are sharded over the group. The rest is small, and each rank has a copy of it."""

torch.manual_seed(0)  # every rank must build the same data set and the same model
torch.set_num_threads(1)  # the ranks of one machine share its cores
pl.init()

digits = torch.randint(2, (2048, LENGTH))
majority = (digits.sum(dim=1) * 2 > LENGTH).long()
model = parallelize_module(Block(), pl.group(), PLAN)
optimizer = pl.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, clip_norm=1.0
)
loader = pl.DataLoader(TensorDataset(digits, majority), batch_size=32, seed=0)

for _ in loader.epochs(EPOCHS):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        pl.log("loss", loss.detach(), weight=len(x))

# The model now holds the final weights; a group computes together, so all of it must take part.
right = (model(digits).argmax(dim=1) == majority).float().mean()
if pl.is_publisher():
    print(f"accuracy {right:.3f} after {EPOCHS} epochs", flush=True)
