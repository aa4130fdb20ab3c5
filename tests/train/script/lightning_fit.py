"""A training run of Lightning on one rank that notes its counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import Callback
from paceline.train.script.counters import COUNTING
from torch import nn
from torch.utils.data import DataLoader

from tests.train.script.numbers import Numbers


class Net(lightning.LightningModule):
    """A model that Lightning trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.layer(batch["x"]).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Seen(Callback):
    """Notes the counts of each backward pass, and reads a state in one of them."""

    def __init__(self, reads_at: int = -1) -> None:
        self.counts: list[tuple[int, int]] = []
        self.reads_at, self.state = reads_at, dict[str, Any]()

    def on_fit_start(self, trainer: Any, *_: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        self.loop = COUNTING[type(loop).__module__, type(loop).__name__](loop, self.reads_at)

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        if len(self.counts) == self.reads_at:
            self.state = self.loop.state_dict()
        self.counts.append((trainer.global_step, trainer.fit_loop.epoch_loop.batch_idx))


def fit(seen: Seen, folder: Path) -> None:
    """Train for two epochs on one rank."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=[seen],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        default_root_dir=folder,
        max_epochs=2,
        plugins=[LightningEnvironment()],  # else Lightning starts MPI to look for other processes
    )
    trainer.fit(Net(), DataLoader(Numbers(), batch_size=2))
