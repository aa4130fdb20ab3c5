"""Real Trainers of frameworks that join a job in the middle of an epoch (S8, S9).

The tests import the frameworks themselves: each process of a test run imports this file.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paceline.core.protocol.places import Path as Places
from paceline.core.protocol.places import Spot
from paceline.train.script.counters import LastSteps
from paceline.train.script.passes import Passes
from torch import nn
from torch.utils.data import DataLoader

from tests.train.script.numbers import BATCHES, Numbers

ACCUMULATED = 3


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
    passes.training, passes.cursors = {0: 0}, {0: 2 * ACCUMULATED}
    return passes


class Model(nn.Module):
    """A model with the loss that Trainer wants."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).mean()}


@pytest.mark.long
def test_a_trainer_that_joins_makes_the_last_step_of_fewer_batches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two batches are left of eight, which is no multiple of three."""
    import transformers

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


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of Lightning about its own code
def test_the_counts_of_lightning_go_on_on_a_rank_that_joins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The donor waits in the seventh batch of the first epoch."""
    from tests.train.script.lightning_fit import Seen, fit

    averaged = 2 * ACCUMULATED
    donor = Seen(reads_at=averaged)
    fit(donor, tmp_path)
    joiner, passes = Seen(), joining(monkeypatch)
    passes.on_joined = lambda: joiner.loop.load_state_dict(donor.state)
    fit(joiner, tmp_path)
    assert donor.counts == [*((n, n) for n in range(BATCHES)), *((8 + n, n) for n in range(8))]
    assert joiner.counts == donor.counts[averaged:]
