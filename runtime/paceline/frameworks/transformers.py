"""transformers.Trainer in a job: another class with the same name and arguments.

    from paceline.frameworks.transformers import Trainer  # not: from transformers import Trainer

It evaluates on each rank without delaying the others, except in mode Full. The publisher saves.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import torch
import transformers
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from paceline.frameworks import joining
from paceline.train.context import init
from paceline.train.ddp_loader import ScriptLoader
from paceline.train.job import evaluating, is_publisher, log
from paceline.worker.state.optimizer_binding import SchedulerFactory

CALLED: Final = "paceline.frameworks.transformers.Trainer"
HINTS: Final = {
    "max_steps": "say num_train_epochs: the job deals the samples of each epoch",
    "gradient_accumulation_steps": "say a larger per_device_train_batch_size: the Trainer takes "
    "all batches of a step before it computes the first one, and the job deals one at a time",
    "fp16": "say bf16=True, which needs no scaling",
    "deepspeed": "leave it out: each rank holds the whole model",
    "fsdp": "leave it out: each rank holds the whole model",
    "resume_from_checkpoint": "say spec.checkpoint in the job: a running job gets its state from "
    "its members",
    "load_best_model_at_end": "leave it out: the job ends with the weights of its last round",
    "auto_find_batch_size": "say per_device_train_batch_size: all ranks need the same",
    "an IterableDataset": "use a data set with __len__ and __getitem__: the job deals its samples",
    "a scheduler in optimizers=": "say lr_scheduler_type and its arguments: the job makes it",
    "DataParallel": "say procsPerReplica: one rank per GPU",
    "a train_sampling_strategy": "leave it out: the job deals the samples in an order of its own",
}


class Trainer(transformers.Trainer):
    """`transformers.Trainer` in a job: `train()` ends with the job's final weights.

    The job steps the scheduler of `lr_scheduler_type` once per nominal step. `max_grad_norm` limits
    the averaged gradient, after the reduction. All arguments are those of `transformers.Trainer`.
    """

    lr_scheduler: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        init()
        super().__init__(*args, **options)
        self.add_callback(_JobDecides())

    def train(self, resume_from_checkpoint: Any = None, **options: Any) -> Any:
        """Train as one rank of the job.

        Arguments that a job cannot honor raise UnsupportedError. A number of epochs that is not
        whole raises UsageError.

        Args:
            resume_from_checkpoint: Refused: a running job gets its state from its members.
            options: Further arguments of `transformers.Trainer.train`.

        Returns:
            What `transformers.Trainer.train` returns.
        """
        args = self.args
        joining.refuse(
            {
                "max_steps": args.max_steps > 0,
                "gradient_accumulation_steps": args.gradient_accumulation_steps > 1,
                "fp16": args.fp16,
                "deepspeed": bool(args.deepspeed),
                "fsdp": bool(args.fsdp),
                "resume_from_checkpoint": bool(resume_from_checkpoint),
                "load_best_model_at_end": args.load_best_model_at_end,
                "auto_find_batch_size": args.auto_find_batch_size,
                "an IterableDataset": isinstance(self.train_dataset, IterableDataset),
                "a scheduler in optimizers=": self.lr_scheduler is not None,
                "DataParallel": args.n_gpu > 1,
                "a train_sampling_strategy": args.train_sampling_strategy != "random",
            },
            HINTS,
        )
        joining.check_alone(args.world_size, "TrainingArguments")
        joining.check_epochs(args.num_train_epochs, "num_train_epochs")
        return super().train(**options)

    # ---- what the Trainer's own loop calls ------------------------------------------------------

    def get_train_dataloader(self) -> ScriptLoader[Any]:
        """Return the job's loader over the training data set."""
        args = self.args
        return ScriptLoader(
            self.train_dataset,
            self._train_batch_size,
            epochs=int(args.num_train_epochs),
            script_sampler=None,
            seed=args.seed if args.data_seed is None else args.data_seed,
            drop_last=args.dataloader_drop_last,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, "training"),
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
        )

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> Any:
        """Compute the Trainer's counts, with no upper bound on the steps.

        A rank may get more batches than its nominal share, so the job and not a count ends the
        loops.

        Returns:
            The tuple of the Trainer, in which both numbers of steps are `sys.maxsize`.
        """
        epochs, _, examples, samples, batch, nominal, steps = super().set_initial_training_values(
            args, dataloader
        )
        self._nominal_steps = steps
        return epochs, sys.maxsize, examples, samples, batch, nominal, sys.maxsize

    def create_scheduler(self, *_: Any, **__: Any) -> Any:
        """Return an object that shows the learning rate of the job, which steps the scheduler."""
        if self.lr_scheduler is None:
            self.lr_scheduler, self._created_lr_scheduler = _Shown(self), True
        return self.lr_scheduler

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        prepared = super()._prepare_for_training(
            max_steps, train_dataloader, resume_from_checkpoint
        )
        limit = self.args.max_grad_norm
        joining.join(
            prepared[0],
            self.optimizer.optimizer,  # the optimizer inside accelerate's wrapper
            called=CALLED,
            scheduler=self._scheduler_factory(),
            clip_norm=limit if limit and limit > 0 else None,
        )
        return prepared

    def _scheduler_factory(self) -> SchedulerFactory:
        args, steps = self.args, self._nominal_steps

        def make(optimizer: torch.optim.Optimizer) -> Any:
            return transformers.get_scheduler(
                args.lr_scheduler_type,
                optimizer=optimizer,
                num_warmup_steps=args.get_warmup_steps(steps),
                num_training_steps=steps,
                scheduler_specific_kwargs=args.lr_scheduler_kwargs,
            )

        return make

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return the next batches; without any, end the loop of the epoch."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.control.should_epoch_stop |= not batches
        return batches, items

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        """Compute loss and gradient of a batch, and log the loss to the job."""
        loss: torch.Tensor = super().training_step(*args, **options)
        log("loss", loss)
        return loss

    def _clip_grad_norm(self, model: torch.nn.Module) -> None:
        """Do nothing: the job clips the average, and this rank's own norm is shown."""

    def _evaluate(self, *args: Any, **options: Any) -> Any:
        with evaluating():
            return super()._evaluate(*args, **options)

    def _save_checkpoint(self, *args: Any, **options: Any) -> None:
        if is_publisher():
            super()._save_checkpoint(*args, **options)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, on the publisher only."""
        if is_publisher():
            super().save_model(output_dir, _internal_call)

    def is_world_process_zero(self) -> bool:
        """Return True on the publisher."""
        return is_publisher()


class _JobDecides(TrainerCallback):
    """Callback that prevents an early end of training on a rank that joins late.

    Such a rank finds past epochs empty, which the Trainer would take for the end of training.
    """

    def __init__(self) -> None:
        self._steps = -1

    def on_epoch_begin(
        self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_: Any
    ) -> None:
        """Record the number of steps at the beginning of the epoch."""
        self._steps = state.global_step

    def on_epoch_end(
        self, _args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Undo the Trainer's decision to stop if the epoch had no step on this rank."""
        if state.global_step == self._steps:
            control.should_training_stop = False


class _Shown:
    """Scheduler for the Trainer's log, with the learning rate that the job has set."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def get_last_lr(self) -> list[float]:
        """Return the present learning rate of each parameter group."""
        return [float(group["lr"]) for group in self._trainer.optimizer.param_groups]

    def step(self) -> None:
        """Do nothing: the job steps the scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the job keeps the state of the scheduler."""
        return {}
