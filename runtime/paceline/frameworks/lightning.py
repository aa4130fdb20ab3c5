"""Lightning in a job, with automatic optimization: the script needs only another strategy.

Change two lines of the script:

    from paceline.frameworks.lightning import JobStrategy

    trainer = Trainer(strategy=JobStrategy(), max_epochs=3)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar, cast

import torch
from lightning.fabric.plugins.environments import MPIEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from paceline.errors import UnsupportedError
from paceline.frameworks import joining
from paceline.train.context import current, init
from paceline.train.ddp_loader import adopt
from paceline.train.job import is_publisher
from paceline.worker.state.optimizer_binding import SchedulerFactory

T = TypeVar("T")
CALLED: Final = "paceline.frameworks.lightning.JobStrategy"
HINTS: Final = {
    "max_steps": "say Trainer(max_epochs=...): the job deals the samples of each epoch",
    "limit_train_batches": "wrap the data set to leave samples out: the job deals them",
    "overfit_batches": "wrap the data set to leave samples out: the job deals them",
    "ckpt_path": "say spec.checkpoint in the job: a running job gets its state from its members",
    "manual optimization": "set automatic_optimization = True, or write the loop yourself, with "
    "pl.DistributedOptimizer",
    "a scheduler in configure_optimizers()": "hand it to the strategy: JobStrategy(scheduler="
    "lambda opt: StepLR(opt, 30)); the job steps it",
    "a validation during fit()": "say Trainer(limit_val_batches=0) and call trainer.validate() "
    "behind fit(), or evaluate in on_train_epoch_end() within pl.evaluating()",
}


class JobStrategy(SingleDeviceStrategy):
    """Lightning strategy of one rank of the job, on one device.

    The Trainer's `gradient_clip_val` limits the averaged gradient, after the reduction.

    Args:
        device: Device of this rank; by default the GPU of its place, or the CPU.
        scheduler: A function that makes a learning-rate scheduler for an optimizer; the job steps
            it.
    """

    strategy_name = "paceline"

    def __init__(
        self, device: torch.device | str | None = None, *, scheduler: SchedulerFactory | None = None
    ) -> None:
        init()
        # In a job only the agent starts this process. Lightning would ask MPI for its size, and an
        # MPI that Paceline has loaded and not initialized would end the process.
        setattr(MPIEnvironment, "detect", staticmethod(lambda: False))  # noqa: B010
        self._scheduler = scheduler
        self._joined: torch.optim.Optimizer | None = None
        self._dealt: EndlessLoader[Any] | None = None
        super().__init__(_device() if device is None else device)

    @property
    def is_global_zero(self) -> bool:
        """Return True if this rank is the publisher, which writes for all."""
        return is_publisher()

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Set up the optimizers; options that a job cannot honor raise UnsupportedError."""
        module = cast("LightningModule", self.lightning_module)
        validates = is_overridden("validation_step", module) and trainer.limit_val_batches != 0
        joining.refuse(
            {
                "manual optimization": not module.automatic_optimization,
                "max_steps": trainer.max_steps not in (-1, None),
                "limit_train_batches": trainer.limit_train_batches not in (1.0, None),
                "overfit_batches": trainer.overfit_batches != 0,
                "ckpt_path": trainer.ckpt_path is not None,
                "a validation during fit()": validates and _has_validation_data(trainer),
            },
            HINTS,
        )
        super().setup_optimizers(trainer)
        joining.refuse(
            {"a scheduler in configure_optimizers()": bool(self.lr_scheduler_configs)}, HINTS
        )

    def setup(self, trainer: Trainer) -> None:
        """Set up the strategy, and make the Trainer's optimizer step the job."""
        super().setup(trainer)
        if not self.optimizers:
            return
        self._joined = self.optimizers[0]
        limit = trainer.gradient_clip_val
        # The job clips the average. Lightning would clip the gradient of this rank.
        trainer.gradient_clip_val = None
        by_value = str(trainer.gradient_clip_algorithm or "norm").endswith("value")
        joining.join(
            cast("torch.nn.Module", self.model),
            self._joined,
            called=CALLED,
            scheduler=self._scheduler,
            clip_norm=None if by_value else limit or None,
            clip_value=limit or None if by_value else None,
        )

    def process_dataloader(self, dataloader: object) -> object:
        """Replace the training loader by the job's; other loaders stay as they are.

        Returns:
            The loader that Lightning iterates over.

        Raises:
            UnsupportedError: The Trainer asks for a second training loader.
        """
        trainer = cast("LightningModule", self.lightning_module).trainer
        if self._joined is None or not trainer.training:
            return dataloader
        if self._dealt is not None:
            raise UnsupportedError(
                "a second training loader in one fit()",
                hint="return one DataLoader from train_dataloader(), and leave "
                "reload_dataloaders_every_n_epochs out",
            )
        epochs = joining.check_epochs(trainer.max_epochs, "max_epochs")
        self._dealt = EndlessLoader(
            adopt(
                cast("torch.utils.data.DataLoader[Any]", dataloader),
                epochs=epochs,
                accumulate=trainer.accumulate_grad_batches,
            )
        )
        return self._dealt

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **options: Any,
    ) -> Any:
        """Run the closure, which is forward and backward, and then make the round.

        Returns:
            The loss, as the strategy of Lightning returns it.
        """
        rank_zero_only.rank = 0 if is_publisher() else 1  # the rank that logs and shows progress
        return super().optimizer_step(_AfterItsClosure(optimizer), closure, model, **options)


class _AfterItsClosure:
    """Optimizer for Lightning's precision plugins, which pass forward and backward to `step()`."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def step(self, closure: Callable[[], Any], **options: Any) -> Any:
        """Run the closure, step the job's optimizer without it, and return the closure's result."""
        result = closure()
        self._optimizer.step(**options)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class EndlessLoader(joining.JobLoader[T]):
    """Loader that reports a length which Lightning never reaches.

    With the nominal length Lightning would end an epoch after that number of batches. How many
    batches a rank gets is known only when there are no more. Without any length Lightning would
    take each batch before the step on the previous one.
    """

    @property
    def batch_size(self) -> int:
        """Number of samples of one batch on one rank."""
        return self._loader.batch_size

    def __len__(self) -> int:
        return 1 << 40

    def __iter__(self) -> Iterator[T]:
        return iter(self._loader)


def _has_validation_data(trainer: Trainer) -> bool:
    return bool(trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined())  # noqa: SLF001


def _device() -> torch.device:
    if torch.cuda.is_available():
        place = current(CALLED).session.place
        return torch.device("cuda", place % torch.cuda.device_count())
    return torch.device("cpu")
