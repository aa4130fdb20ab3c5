"""`DistributedOptimizer`: the user's optimizer, stepped by the job instead of by this process.

`step()` announces the gradient and returns with newer weights. The update itself happens once, on
the communication thread, on parameters of its own, from what the round has reduced (D2). To the
script it looks like a torch optimizer. Its `param_groups` show the model's parameters and the
present learning rate; they are read-only once training has started.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from paceline.core.protocol.records import DataPlan
from paceline.errors import ChangedLaterError, DismissedError, JobStoppedError, UsageError
from paceline.train import other_steps, phases, refusals
from paceline.train.context import current
from paceline.train.contribution import Contribution, ContributionBuilder
from paceline.train.faults import Faults
from paceline.worker.state.committed import Committed
from paceline.worker.state.gradients import Gradients
from paceline.worker.state.optimizer_binding import SchedulerFactory, changed, changed_later

SELF_FED_LOOKAHEAD = 2

log = logging.getLogger("paceline.rank")


class DistributedOptimizer(torch.optim.Optimizer):
    """Optimizer whose `step()` makes a round of the job; one per job.

    All methods are called on the main thread. The gradient memory belongs to the runtime: once
    training has started, each `p.grad` is a view of a flat buffer (D3).

    Call `step()` once per batch. With `DataLoader(accumulate=K)` the first K - 1 calls of a step
    only count batches. When the last one returns, the model holds the newest committed weights and
    `p.grad` is zero. `samples=` is the number of samples of the batch, by default 1, for a script
    without `pl.DataLoader`, which knows the size of each batch. A closure is refused with
    UnsupportedError, because the update runs on another thread, after the reduction. After the
    job's last round a step has no effect; the second such step raises JobStoppedError. If another
    rank has called `pl.stop()`, the script of this rank ends there instead.

    Args:
        optimizer: The torch optimizer to wrap. It must hold all trainable parameters of `model`.
        model: The model that the optimizer trains.
        scheduler: A function that makes a learning-rate scheduler for an optimizer. The job steps
            the scheduler once per nominal step's worth of applied samples, alike on every rank.
        clip_norm: Limit of the norm of the averaged gradient, applied once, after the reduction.
        clip_value: Limit of each element of the averaged gradient.
        loss_reduction: What the loss does over a batch: "mean" or "sum". The update uses the mean
            gradient per sample in both cases.

    Raises:
        UsageError: The job has an optimizer already, or an argument is of the wrong kind.
        UnsupportedError: The optimizer, the model or the scheduler cannot be used in a job.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        scheduler: SchedulerFactory | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        loss_reduction: str = "mean",
    ) -> None:
        self._started = False
        self._context = current("DistributedOptimizer()")
        if isinstance(optimizer, DistributedOptimizer) or self._context.optimizer is not None:
            raise UsageError(
                "a second DistributedOptimizer",
                hint="one per job: put all parameters into one optimizer, in parameter groups",
            )
        self._inner = refusals.check_optimizer(optimizer)
        self._model = refusals.check_model(model, optimizer, self._context.session.shards)
        refusals.check_scheduler(scheduler)
        refusals.check_limits(loss_reduction, clip_norm, clip_value)
        self._scheduler = scheduler
        self._clip_norm, self._clip_value = clip_norm, clip_value
        self._mean = loss_reduction == "mean"
        self._steps_after_stop = 0
        self._self_fed = False
        self._differed = False
        """True if the weights of this rank were not the job's when it started."""
        self._gradients: Gradients
        self._committed: Committed
        self._trainables: refusals.Trainables
        self._making: ContributionBuilder
        self._faults: Faults
        self._shown: list[dict[str, Any]] = []
        # The groups are copies. The user may change them until the start copies them back.
        groups = [dict(group) for group in optimizer.param_groups]
        super().__init__(groups, optimizer.defaults)
        self.state = optimizer.state
        self._context.optimizer = self

    # ---- what a script calls ----------------------------------------------------------------

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, samples: int | None = None
    ) -> None:
        """Announce the gradient; return with the newest weights when the next batch may start."""
        if closure is not None:
            raise refusals.refuse_closure()
        if self.stopped:
            self._after_stop()
            return
        foreign = not self._started and self._starts_with_others_weights()
        self._check_unchanged()
        contribution = self._complete(samples)
        if contribution is not None:
            self._announce(contribution, foreign=foreign)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what backward() has added since the last step.

        No script needs this call, because the gradients are zero after a step. It is allowed
        everywhere. The gradient buffers may also hold earlier work of this rank that no round has
        taken yet; that work stays. The batch in hand counts if another backward pass follows.
        Otherwise it is dropped and counted as dropped.

        Args:
            set_to_none: As in torch. It matters only before training starts.
        """
        if not self._started:
            super().zero_grad(set_to_none)
        elif not self._self_fed:
            self._making.discard()
        else:
            self._gradients.erase()

    @property
    def stopped(self) -> bool:
        """True when the job's last round is committed: further steps have no effect."""
        return self._started and self._context.session.stopped

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, before training starts.

        Raises:
            ChangedLaterError: Training has started.
        """
        if self._started:
            raise ChangedLaterError(
                "add_param_group() after training had started",
                hint="add all groups before the first step",
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the format of the wrapped optimizer.

        Returns:
            A state dict that loads into such an optimizer without Paceline. Once training has
            started it is the committed state.
        """
        return self._committed.state_dict() if self._started else self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state before training starts; later, a rank gets its state from a donor.

        Raises:
            ChangedLaterError: Training has started.
        """
        if self._started:
            raise ChangedLaterError(
                "load_state_dict() after training had started",
                hint="load before loader.epochs() or the first step()",
            )
        self._hand_on_groups()
        self._inner.load_state_dict(state_dict)
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update({key: value for key, value in inner.items() if key != "params"})
        self.state = self._inner.state

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Attribute that only GradScaler.step() reads; it raises UnsupportedError (D9)."""
        raise refusals.refuse_grad_scaler()

    # ---- what the loader and the context call -----------------------------------------------

    @property
    def started(self) -> bool:
        """True once training has started on this rank."""
        return self._started

    @property
    def committed(self) -> Committed:
        """Committed weights and optimizer state; available once training has started."""
        return self._committed

    @property
    def builder(self) -> ContributionBuilder:
        """Builder of the contribution under construction; available once training has started."""
        return self._making

    def ensure_started(self) -> None:
        """Start training without a loader, unless it has started: gradients count as they are."""
        if not self._started:
            self.start(DataPlan(), SELF_FED_LOOKAHEAD)

    def start(self, plan: DataPlan, lookahead: int) -> None:
        """Take over the parameters and join the job; see `JobOptimizer.start`."""
        self._self_fed = plan.samples == 0
        if not self._self_fed:
            super().zero_grad()  # gradients from before the first batch belong to no lease
        self._hand_on_groups()
        refusals.check_optimizer(self._inner)
        if hasattr(self.step, "_wrapped_by_lr_sched"):
            raise changed_later("DistributedOptimizer", "a scheduler was made for it")
        refusals.check_memory(self._model)
        self._trainables = refusals.Trainables(self._model, self.param_groups)
        refusals.check_shards(self._inner, self._trainables.named)
        session = self._context.session
        self._gradients = Gradients(
            self._trainables.named,
            session.segment_bytes,
            zeros=session.zeros,
            wire=session.wire,
        )
        self._committed = Committed(
            self._model,
            self._inner,
            self._gradients,
            scheduler=self._make_scheduler if self._scheduler is not None else None,
            clip_norm=self._clip_norm,
            clip_value=self._clip_value,
        )
        self._started = True
        self._making = ContributionBuilder(self._context.session, self._gradients, mean=self._mean)
        own = self._committed.hash()
        session.begin(self._gradients, self._committed, plan, lookahead)
        self._differed = self._committed.hash() != own
        if session.version and not plan.ends:
            log.warning(
                "this rank begins its loop at the first step, and the job has made %d: the script "
                "feeds itself and says no number of steps. Say `for step in pl.steps(N)`, and the "
                "job counts",
                session.progress.step,
            )
        self._faults = Faults(self._context.faults, session.place)
        changes = self._context.changes
        for hook in phases.follow(self._model):
            changes.callback(hook.remove)
        changes.callback(other_steps.refuse_for(self._model, self._is_own).remove)
        self._show_groups()

    def after_parking(self) -> None:
        """Show the newest learning rate; called when a call into the session has returned."""
        if self._committed.binding.known is not self._shown:
            self._show_groups()

    # ---- inside -----------------------------------------------------------------------------

    def _is_own(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if this is the job's optimizer, under any of its names.

        Returns:
            True for this object, for the wrapped optimizer, and for a wrapper that shows its
            groups.
        """
        return optimizer in (self, self._inner) or optimizer.param_groups is self.param_groups

    def _complete(self, samples: int | None) -> Contribution | None:
        """Return the contribution that this step completes; None if its lease has more batches.

        Raises:
            UsageError: The script gave a number of samples although it uses `pl.DataLoader`.
        """
        if self._self_fed:
            return self._making.complete_self_fed(1 if samples is None else samples)
        if samples is not None:
            raise UsageError(
                f"step(samples={samples}) inside the loop of pl.DataLoader",
                hint="leave samples out: the loader knows the size of each batch",
            )
        return self._making.complete()

    def _starts_with_others_weights(self) -> bool:
        """Start a script that draws its own batches, at its first step.

        Returns:
            True if the gradient of this step was computed on weights that are not the job's. Such a
            gradient is dropped and counted.
        """
        self.ensure_started()
        if self._differed:
            log.warning(
                "the weights of this rank were not the job's, so its first gradient is dropped: "
                "begin with `for step in pl.steps(N)`, which fetches them before"
            )
        return self._differed

    def _announce(self, contribution: Contribution, *, foreign: bool = False) -> None:
        session = self._context.session
        self._faults.before_announcing(
            version=session.version,
            rank=session.place,
            size=session.size,
            poison=self._making.poison,
        )
        session.step(
            leases=contribution.leases,
            samples=contribution.samples,
            unit=contribution.unit,
            metrics=self._context.take_metrics(),
            foreign=foreign,
        )
        if self._gradients.unit:  # work that no round has taken must not mix with the next batch
            self._gradients.lay_by()
        self.after_parking()
        self._faults.step_ended()
        if self._self_fed and not self.stopped:
            # Assume that the next step has the same number of samples.
            session.computing((), contribution.samples, contribution.unit)

    def _after_stop(self) -> None:
        self._steps_after_stop += 1
        if self._steps_after_stop > 1 and self._context.session.stopped_by_another:
            log.warning(
                "another rank has ended the job with pl.stop(), and this one goes on stepping: its "
                "script ends here. Leave the loop when optimizer.stopped is true"
            )
            self._context.finish()
            raise DismissedError(0)
        if self._steps_after_stop > 1:
            raise JobStoppedError(
                "the job has stopped and the script goes on stepping",
                hint="leave the loop when optimizer.stopped is true; pl.DataLoader ends by itself",
            )

    def _check_unchanged(self) -> None:
        difference = changed(self._shown, self.param_groups)
        if difference:
            raise changed_later("DistributedOptimizer", difference)
        self._trainables.check_unchanged()

    def _show_groups(self) -> None:
        """Copy the values that the job has set into `param_groups`."""
        self._shown = self._committed.binding.known
        for group, values in zip(self.param_groups, self._shown, strict=True):
            group.update(values)

    def _hand_on_groups(self) -> None:
        """Copy the wrapper's groups into the wrapped optimizer.

        Before the start the user may change them as if they were those of the wrapped optimizer.
        """
        for index, group in enumerate(self.param_groups):
            if index < len(self._inner.param_groups):
                self._inner.param_groups[index].update(group)
            else:
                self._inner.add_param_group(dict(group))

    def _make_scheduler(
        self, optimizer: torch.optim.Optimizer
    ) -> torch.optim.lr_scheduler.LRScheduler:
        assert self._scheduler is not None
        made = self._scheduler(optimizer)
        refusals.check_made_scheduler(made)
        return made
