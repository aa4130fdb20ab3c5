"""Model, data and optimizer of B10, the same for DDP and for Paceline.

The scripts of both sides use this module, so it imports nothing but torch.

    emulated      layers on a device that does not exist: forward and backward sleep without the
                  interpreter lock and without a core; gradients have their real size
    transformer   real computing
    tiny          next to nothing to compute and to send: shows what a step itself costs
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from itertools import product
from typing import Any, Final

import torch
from torch import nn

CONFIG: dict[str, Any] = json.loads(os.environ["BENCHMARK"])
DEVICE: Final = torch.device(CONFIG.get("device", "cpu"))
"""Device that the transformer runs on."""
BATCHES: Final = 8
"""Number of different batches, which are made before the first step."""
VOCABULARY: Final = 512

Loss = Callable[[nn.Module, int], torch.Tensor]
"""Function that returns the loss of the model, which may be wrapped, on the batch of a step."""


def make(rank: int) -> tuple[nn.Module, Loss]:
    """Return the model that the configuration names, and its loss function."""
    torch.manual_seed(0)
    model, loss = {"emulated": _emulated, "transformer": _transformer, "tiny": _tiny}[
        CONFIG["model"]
    ](rank, torch.Generator().manual_seed(1 + rank))
    return model, loss


def ddp_settings(*buckets_mb: int) -> list[dict[str, Any]]:
    """Return the settings of DDP among which a benchmark looks for the fastest."""
    return [
        {"bucket_cap_mb": bucket_mb, "gradient_as_bucket_view": view}
        for bucket_mb, view in product(buckets_mb, (False, True))
    ]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer: torch's fused SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, fused=True)


# ---- the emulated device -------------------------------------------------------------------------


class Late:
    """Chooses which rank is late in which step; all ranks draw the same choices."""

    def __init__(self, rank: int) -> None:
        self._rank, self._size = rank, CONFIG.get("ranks", 1)
        self._dice = random.Random(7)
        self.how = CONFIG.get("late", "")
        """Kind of lateness: slow, in front (of a step), inside (its backward); empty means no rank
        is late."""
        self.ms = CONFIG.get("late_ms", 0)
        self.victim: int | None = None
        """Rank that is late; None draws one for each step."""
        self.layer: int | None = None
        """Layer of a lateness `inside`; None draws one for each step."""
        self.inside = -1
        """Layer whose backward is delayed in this step; -1 for none."""

    @property
    def factor(self) -> float:
        """Factor on the times of this rank's layers: 2 on a slow rank."""
        return 2.0 if self.how == "slow" and self._rank == self._size - 1 else 1.0

    def begin(self, layers: int) -> None:
        """Begin a step of `layers` layers; sleep if this rank is late in front of it."""
        victim, layer = self._dice.randrange(self._size), self._dice.randrange(layers)
        self.inside = -1
        if self._rank != (victim if self.victim is None else self.victim):
            return
        if self.how == "in front":
            time.sleep(self.ms / 1000)
        elif self.how == "inside":
            self.inside = layer if self.layer is None else self.layer


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, _weight: torch.Tensor, model: Emulated, index: int
    ) -> torch.Tensor:
        ctx.model, ctx.index = model, index
        time.sleep(model.scale * model.late.factor * CONFIG["forward_ms"] / 1000)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        model = ctx.model
        if ctx.index == model.late.inside:
            time.sleep(model.late.ms / 1000)
        time.sleep(model.scale * model.late.factor * CONFIG["backward_ms"] / 1000)
        return gradient, model.gradient, None, None


class Emulated(nn.Module):
    """Model whose layers sleep instead of computing, with constant gradients."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        elements = CONFIG["elements"]
        self.layers = nn.ParameterList(torch.zeros(elements) for _ in range(CONFIG["layers"]))
        self.gradient = torch.full((elements,), 1.0 + rank)
        self.late = Late(rank)
        self.scale = 1.0
        """Factor on the times of all layers; a batch may be larger or smaller than usual."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all layers, each for its emulated time."""
        self.late.begin(len(self.layers))
        for index, weight in enumerate(self.layers):
            x = _Layer.apply(x, weight, self, index)
        return x


def _emulated(rank: int, _: torch.Generator) -> tuple[nn.Module, Loss]:
    x = torch.ones(1)
    return Emulated(rank), lambda model, _: model(x).sum()


# ---- real computing ------------------------------------------------------------------------------


class Transformer(nn.Module):
    """Transformer of 8.2 million parameters at a width of 256 and ten layers."""

    def __init__(self) -> None:
        super().__init__()
        width = CONFIG["width"]
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, CONFIG["layers"], enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (batch, length, VOCABULARY) for token ids (batch, length)."""
        answer: torch.Tensor = self.head(self.layers(self.embedding(tokens)))
        return answer


def _transformer(_: int, dice: torch.Generator) -> tuple[nn.Module, Loss]:
    shape = BATCHES, CONFIG["sentences"], CONFIG["words"] + 1
    tokens = torch.randint(0, VOCABULARY, shape, generator=dice).to(DEVICE)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        text = tokens[step % BATCHES]
        guesses = model(text[:, :-1])
        return nn.functional.cross_entropy(guesses.flatten(0, 1), text[:, 1:].flatten())

    return Transformer().to(DEVICE), loss


def _tiny(_: int, dice: torch.Generator) -> tuple[nn.Module, Loss]:
    x = torch.randn(BATCHES, 4, 64, generator=dice)
    model = nn.Sequential(
        *(nn.Linear(64, 256), nn.ReLU()),
        *(nn.Linear(256, 192), nn.ReLU(), nn.Linear(192, 16)),
    )
    return model, lambda model, step: model(x[step % BATCHES]).square().mean()
