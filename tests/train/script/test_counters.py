"""Real Trainers of frameworks that join a job in the middle of an epoch (S8, S9)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
import transformers
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import Callback
from paceline.core.protocol.places import Path as Places
from paceline.core.protocol.places import Spot
from paceline.train.script.counters import COUNTING, LastSteps
from paceline.train.script.passes import Passes
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCHES, ACCUMULATED = 8, 3


class Engine:
    """Engine of a rank that joins a job whose first pass has averaged some batches."""

    def __init__(self) -> None:
        self.operations = SimpleNamespace(path=Places[Any](follows=True, state=Spot(1, 2)))

    def load(self) -> None:
        self.operations.path.load()


def joining(monkeypatch: pytest.MonkeyPatch) -> Passes:
    """Return the passes of a rank that joins behind two steps of the first pass."""
    monkeypatch.setattr(DataLoader, "__iter__", DataLoader.__iter__)  # restored after the test
    engine: Any = Engine()
    passes = Passes(engine)
    passes.install()
    passes.training, passes.cursors = {0}, {0: 2 * ACCUMULATED}
    return passes


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Two samples for each batch."""

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([float(index)])}


class Model(nn.Module):
    """A model with the loss that Trainer wants."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).mean()}


def test_a_trainer_that_joins_makes_the_last_step_of_fewer_batches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two batches are left of eight, which is no multiple of three."""
    monkeypatch.setattr(  # restored after the test
        transformers.Trainer, "get_batch_samples", transformers.Trainer.get_batch_samples
    )
    passes = joining(monkeypatch)
    last = LastSteps(lambda: passes.joined)
    last.install()
    steps: list[int] = []

    class Steps(transformers.TrainerCallback):
        def on_optimizer_step(self, args: Any, *_: Any, **__: Any) -> None:
            last.restore()
            steps.append(args.gradient_accumulation_steps)

    trainer = transformers.Trainer(
        Model(),
        transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=ACCUMULATED,
            num_train_epochs=2,
            save_strategy="no",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Numbers(),
        callbacks=[Steps()],
    )
    trainer.train()
    # One step of the rest, then the three of an epoch of which this rank has all batches.
    assert steps == [ACCUMULATED] * 4


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
        found = trainer.fit_loop.epoch_loop
        self.loop = COUNTING[type(found).__module__, type(found).__name__](found, self.reads_at)

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


@pytest.mark.filterwarnings("ignore")  # of Lightning about its own code
def test_the_counts_of_lightning_go_on_on_a_rank_that_joins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The donor waits in the seventh batch of the first epoch."""
    averaged = 2 * ACCUMULATED
    donor = Seen(reads_at=averaged)
    fit(donor, tmp_path)
    joiner, passes = Seen(), joining(monkeypatch)
    passes.on_joined = lambda: joiner.loop.load_state_dict(donor.state)
    fit(joiner, tmp_path)
    assert donor.counts == [*((n, n) for n in range(BATCHES)), *((8 + n, n) for n in range(8))]
    assert joiner.counts == donor.counts[averaged:]
