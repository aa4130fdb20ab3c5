"""Hugging Face accelerate in a job: one call that replaces `accelerator.prepare()`.

    from paceline.frameworks.accelerate import prepare

    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, epochs=3)

The script's loop stays: `accelerator.accumulate()`, `accelerator.backward()`, `optimizer.step()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device

from paceline.frameworks import joining
from paceline.train.context import current, init
from paceline.train.ddp import refuse_reductions
from paceline.train.ddp_loader import ScriptLoader, adopt
from paceline.worker.state.optimizer_binding import SchedulerFactory

T = TypeVar("T")
CALLED: Final = "paceline.frameworks.accelerate.prepare"
HINTS: Final = {
    "DeepSpeed": "leave its plugin out: each rank holds the whole model",
    "FSDP": "leave its plugin out: each rank holds the whole model",
    "Megatron-LM": "leave its plugin out: each rank holds the whole model",
    'mixed_precision="fp16"': 'say Accelerator(mixed_precision="bf16"), which needs no scaling',
}


def prepare(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: torch.utils.data.DataLoader[T],
    *,
    epochs: int,
    scheduler: SchedulerFactory | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> tuple[torch.nn.Module, torch.optim.Optimizer, DeviceLoader[T]]:
    """Let a script for accelerate train in a job; call it in place of `accelerator.prepare()`.

    Options of the Accelerator that a job cannot honor raise UnsupportedError. Main thread only.

    Args:
        accelerator: The Accelerator of the script.
        model: The plain model.
        optimizer: The optimizer of its parameters. From now on its `step()` makes a round.
        loader: The torch DataLoader of the training data, before any `prepare()`.
        epochs: Number of loops that the script makes over the loader. The job ends with the last
            one.
        scheduler: As for `pl.DistributedOptimizer`.
        clip_norm: As for `pl.DistributedOptimizer`.
        clip_value: As for `pl.DistributedOptimizer`.

    Returns:
        Model and optimizer as accelerate prepares them, and a loader that gives each sample to one
        rank.
    """
    init()
    joining.refuse(
        {
            "DeepSpeed": accelerator.distributed_type.value == "DEEPSPEED",
            "FSDP": accelerator.distributed_type.value == "FSDP",
            "Megatron-LM": accelerator.distributed_type.value == "MEGATRON_LM",
            'mixed_precision="fp16"': accelerator.mixed_precision == "fp16",
        },
        HINTS,
    )
    joining.check_alone(accelerator.num_processes, "the Accelerator")
    epochs = joining.check_epochs(epochs, "epochs")
    dealt = adopt(loader, epochs=epochs, accumulate=accelerator.gradient_accumulation_steps)
    prepared, stepped = accelerator.prepare(model, optimizer)
    joining.join(
        prepared,
        optimizer,
        called=CALLED,
        scheduler=scheduler,
        clip_norm=clip_norm,
        clip_value=clip_value,
    )
    if current(CALLED).session.size > 1:
        refuse_reductions()
    return prepared, stepped, DeviceLoader(dealt, accelerator.device)


class DeviceLoader(joining.JobLoader[T]):
    """The job's loader, which moves each batch to the accelerator's device.

    Args:
        loader: The job's loader.
        device: Device of the accelerator.
    """

    def __init__(self, loader: ScriptLoader[T], device: torch.device) -> None:
        super().__init__(loader)
        self._device = device

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the job decides the order of the samples."""

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[T]:
        for batch in self._loader:
            yield send_to_device(batch, self._device)
