"""Features of the frameworks that a job does not support are refused before training starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import lightning
import pytest
import torch
from accelerate import Accelerator
from paceline.errors import PacelineError, UnsupportedError, UsageError
from paceline.frameworks import accelerate as in_accelerate
from paceline.frameworks import lightning as in_lightning
from paceline.frameworks import transformers as in_transformers
from paceline.train.context import Context, install
from torch.utils.data import DataLoader, TensorDataset
from transformers import TrainingArguments

from testing.lone_session import LoneSession

# The frameworks take seconds to import.
pytestmark = pytest.mark.long

DATA = TensorDataset(torch.randn(16, 2), torch.randn(16, 1))


@pytest.fixture(autouse=True)
def in_a_job() -> Iterator[None]:
    install(Context(LoneSession()))
    yield
    install(None)


class Net(lightning.LightningModule):
    def __init__(self, *, schedules: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self._schedules = schedules

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        made = torch.optim.SGD(self.parameters(), lr=0.1)
        if self._schedules:
            return [made], [torch.optim.lr_scheduler.StepLR(made, 3)]
        return made


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Validates(Net):
    def validation_step(self, batch: Any, _: int) -> None: ...


@pytest.mark.parametrize(
    ("named", "net", "options"),
    [
        ("max_steps", Net(), {"max_steps": 5}),
        ("limit_train_batches", Net(), {"limit_train_batches": 3}),
        ("manual optimization", Manual(), {}),
        ("a scheduler in configure_optimizers", Net(schedules=True), {}),
        ("a validation during fit", Validates(), {}),
        ("max_epochs=-1", Net(), {"max_epochs": -1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore")
def test_unsupported_features_of_lightning_are_refused(
    named: str, net: Net, options: dict[str, Any], tmp_path: Any
) -> None:
    trainer = lightning.Trainer(
        strategy=in_lightning.JobStrategy("cpu"),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **{"max_epochs": 2, **options},
    )
    loader = DataLoader(DATA, 4)
    with pytest.raises(PacelineError, match=named.replace("(", r"\(")) as refused:
        trainer.fit(net, loader, loader if isinstance(net, Validates) else None)
    assert refused.value.hint


@pytest.mark.processes
def test_lightning_does_not_call_an_uninitialized_mpi() -> None:
    """Lightning probes for its launcher, which may be MPI.

    MPI used to end the rank if Paceline had loaded the library without initializing it.
    """
    script = (
        "import paceline.transport.mpi.provider, lightning\n"
        "from paceline.frameworks.lightning import JobStrategy\n"
        "lightning.Trainer(strategy=JobStrategy('cpu'), accelerator='cpu', logger=False)\n"
        "print('MADE')"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=300
    )
    assert "MADE" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ("max_steps", {"max_steps": 5}),
        ("gradient_accumulation_steps", {"gradient_accumulation_steps": 2}),
        ("num_train_epochs=1.5", {"num_train_epochs": 1.5}),
        ("auto_find_batch_size", {"auto_find_batch_size": True}),
    ],
)
def test_unsupported_arguments_of_transformers_are_refused(
    named: str, options: dict[str, Any], tmp_path: Any
) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **options)
    trainer = in_transformers.Trainer(torch.nn.Linear(2, 1), args, train_dataset=DATA)
    with pytest.raises(PacelineError, match=named) as refused:
        trainer.train()
    assert refused.value.hint


def test_unsupported_use_of_accelerate_is_refused() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(DATA, 4)
    accelerator = Accelerator(cpu=True)
    with pytest.raises(UsageError, match="epochs=0"):
        in_accelerate.prepare(accelerator, model, optimizer, loader, epochs=0)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with pytest.raises(UnsupportedError, match="scheduler was already made"):
        in_accelerate.prepare(accelerator, model, optimizer, loader, epochs=1)
