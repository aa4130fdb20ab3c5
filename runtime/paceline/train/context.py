"""The one job that this process takes part in, as the training API sees it.

`init()` connects to the job. The optimizer and the loader meet in the context, so that a script
need not pass one to the other. The optimizer registers itself here. The protocol `JobOptimizer` is
the part of it that the others use, so that this file imports neither optimizer nor loader.
Everything here is used by the main thread only.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from paceline_api.errors import printable

from paceline.core.faults import Fault, parse_faults
from paceline.core.protocol.records import DataPlan, LoggedMetric
from paceline.environment import ENV_FAULTS, ENV_REPLAY, RankSettings
from paceline.errors import UsageError
from paceline.train.contribution import ContributionBuilder
from paceline.train.mistakes import explain_errors
from paceline.train.refusals import check_process
from paceline.worker.session import Session

if TYPE_CHECKING:  # a script without a mesh must not pay for the import
    from torch.distributed.device_mesh import DeviceMesh


class JobOptimizer(Protocol):
    """Part of `DistributedOptimizer` that the loader and the functions of `train.job` use."""

    @property
    def started(self) -> bool:
        """True once training has started on this rank."""

    @property
    def stopped(self) -> bool:
        """True when the job's last round is committed."""

    @property
    def builder(self) -> ContributionBuilder:
        """Builder of the contribution under construction; available once training has started."""

    def start(self, plan: DataPlan, lookahead: int) -> None:
        """Take over the model's parameters and join the job; block until this rank is a member.

        Called once. It raises ChangedLaterError if a scheduler was made for the wrapped optimizer.

        Args:
            plan: How samples are dealt. A plan without samples stands for a script that draws its
                own batches.
            lookahead: Number of leases that this rank may hold at once (D1).
        """

    def ensure_started(self) -> None:
        """Start training without a loader, unless it has started."""

    def after_parking(self) -> None:
        """Show the newest learning rate; called when a call into the session has returned."""


class Context:
    """State of a connected script: session, optimizer, and metrics since the last step."""

    def __init__(self, session: Session, faults: Sequence[Fault] = ()) -> None:
        self.session = session
        self.faults = faults
        self.optimizer: JobOptimizer | None = None
        self.mesh: DeviceMesh | None = None
        """Mesh that `group()` has made; None until then."""
        self.finished = False
        self.changes = ExitStack()
        """Callbacks that undo, at the end of the job, the changes to the script's process and model
        (docs/porting.md)."""
        self._metrics: dict[str, tuple[float, float]] = {}

    def log(self, name: str, value: float | torch.Tensor, weight: float) -> None:
        """Add a value to the weighted sum of a metric, for the next announcement (D11).

        Args:
            name: Name of the metric.
            value: A number or a tensor with one element.
            weight: Weight of the value.
        """
        name = printable(name)  # it appears in messages, tables and pages
        total, weights = self._metrics.get(name, (0.0, 0.0))
        self._metrics[name] = (total + float(value) * weight, weights + weight)

    def take_metrics(self) -> tuple[LoggedMetric, ...]:
        """Return and clear what was logged since the last call, for the announcement (D11)."""
        taken = tuple(LoggedMetric(name, *sums) for name, sums in self._metrics.items())
        self._metrics.clear()
        return taken

    def need_optimizer(self, why: str) -> JobOptimizer:
        """Return the job's optimizer.

        Args:
            why: The call that needs it; it begins the error message.

        Returns:
            The optimizer that the script has wrapped.

        Raises:
            UsageError: The script has wrapped none yet.
        """
        if self.optimizer is None:
            raise UsageError(
                f"{why} without an optimizer of the job",
                hint="say before: optimizer = pl.DistributedOptimizer(optimizer, model)",
            )
        return self.optimizer

    def finish(self) -> None:
        """Copy the final weights into the model and block until the job is released (D7).

        A second call does nothing.
        """
        if not self.finished:
            self.need_optimizer("finish()").ensure_started()
            self.session.finish()
            self._end()

    def stop(self) -> None:
        """End the job on all ranks, then continue as `finish`.

        Raises:
            UsageError: Training has not started.
        """
        optimizer = self.need_optimizer("stop()")
        if not optimizer.started:
            raise UsageError(
                "stop() before training has started",
                hint="call it inside the training loop, or behind a loop of the script's own",
            )
        if self.finished or (self.session.is_replay and not self.session.stopped):
            return
        optimizer.builder.end()
        self.session.finish(stop=True)
        self._end()

    def _end(self) -> None:
        self.finished = True
        self.changes.close()


_context: Context | None = None
_refusal: UsageError | None = None
"""Why `init` is refused in this process; None if it is not."""


def refuse_init(why: str, hint: str) -> None:
    """Make `init` raise from now on: something else takes part in the job for this process."""
    global _refusal
    _refusal = UsageError(why, hint=hint)


def init() -> None:
    """Connect this process to its job, which it finds in the environment.

    Call it on the main thread, before any other function of Paceline. Outside of a job the script
    works alone, as rank 0 of 1. A second call changes nothing. In a script that is run by
    `paceline launch`, which takes part in the job for it, a UsageError is raised.
    """
    if _refusal is not None:
        raise _refusal
    if _context is None and (run_dir := os.environ.get(ENV_REPLAY)):
        from paceline.train.replay import ReplaySession

        explain_errors(lambda *_: None)
        install(Context(ReplaySession(Path(run_dir))))
    elif _context is None:
        from paceline.worker.engine import connect  # a late import: it loads all transports

        # Errors in the environment come before there is a session to report them to.
        alone = explain_errors(lambda *_: None)
        settings = RankSettings.from_environment(os.environ)
        if settings is not None:
            check_process(os.environ, child=multiprocessing.parent_process() is not None)
        text = os.environ.get(ENV_FAULTS, "") if settings is None else settings.faults
        session = connect(settings)
        alone()
        context = Context(session, parse_faults(text))
        context.changes.callback(explain_errors(session.failed))
        install(context)


def install(context: Context | None) -> None:
    """Set the context of this process; `init` calls it, and so do tests that bring a session."""
    global _context
    _context = context


def session() -> Session | None:
    """Return the session of this process, or None before `init()`."""
    return _context.session if _context is not None else None


def current(why: str) -> Context:
    """Return the context of this process.

    Args:
        why: The call that needs it; it begins the error message.

    Returns:
        The context that `init()` has made.

    Raises:
        UsageError: `init()` was not called.
    """
    if _context is None:
        raise UsageError(f"{why} before init()", hint="call paceline.init() first")
    return _context
