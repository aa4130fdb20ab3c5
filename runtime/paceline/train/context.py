"""The one job that this process takes part in, as the training API sees it.

`init()` connects; the optimizer and the loader meet here, so that a script passes neither to the
other. The optimizer puts itself here; what the others need of it is `JobOptimizer`, so that this
file knows neither optimizer nor loader. Everything is used by the main thread only.
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

if TYPE_CHECKING:  # a script that has no use for a mesh shall not load it
    from torch.distributed.device_mesh import DeviceMesh


class JobOptimizer(Protocol):
    """What the loader and the script's questions need of its `DistributedOptimizer`."""

    @property
    def started(self) -> bool: ...
    @property
    def stopped(self) -> bool: ...
    @property
    def builder(self) -> ContributionBuilder: ...
    def start(self, plan: DataPlan, lookahead: int) -> None: ...
    def ensure_started(self) -> None: ...
    def after_parking(self) -> None: ...


class Context:
    """A connected script: session, optimizer, and the figures logged since the last step."""

    def __init__(self, session: Session, faults: Sequence[Fault] = ()) -> None:
        self.session = session
        self.faults = faults
        self.optimizer: JobOptimizer | None = None
        self.mesh: DeviceMesh | None = None
        """What `group()` has made."""
        self.finished = False
        self.changes = ExitStack()
        """Takes back what was changed in the script's process and on its model, when the job is
        over (docs/porting.md)."""
        self._metrics: dict[str, tuple[float, float]] = {}

    def log(self, name: str, value: float | torch.Tensor, weight: float) -> None:
        name = printable(name)  # it travels in messages, and stands in tables and on pages
        total, weights = self._metrics.get(name, (0.0, 0.0))
        self._metrics[name] = (total + float(value) * weight, weights + weight)

    def take_metrics(self) -> tuple[LoggedMetric, ...]:
        """What was logged since the last call; rides in the announcement (D11)."""
        taken = tuple(LoggedMetric(name, *sums) for name, sums in self._metrics.items())
        self._metrics.clear()
        return taken

    def need_optimizer(self, why: str) -> JobOptimizer:
        if self.optimizer is None:
            raise UsageError(
                f"{why} without an optimizer of the job",
                hint="say before: optimizer = pl.DistributedOptimizer(optimizer, model), or in a "
                "DDP script pl.ddp(model, optimizer, ...)",
            )
        return self.optimizer

    def finish(self) -> None:
        """Final weights into the model, then wait for the release (D7). Twice is once."""
        if not self.finished:
            self.need_optimizer("finish()").ensure_started()
            self.session.finish()
            self._end()

    def stop(self) -> None:
        """End the job on all ranks, then as `finish`."""
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


def init() -> None:
    """Connect this process to its job, which it finds in the environment.

    Outside of a job the script works alone, as rank 0 of 1. Calling it twice changes nothing.
    """
    if _context is None and (run_dir := os.environ.get(ENV_REPLAY)):
        from paceline.train.replay import ReplaySession

        explain_errors(lambda *_: None)
        install(Context(ReplaySession(Path(run_dir))))
    elif _context is None:
        from paceline.worker.engine import connect  # only here: it brings sockets and transports

        alone = explain_errors(lambda *_: None)  # of the environment: nobody can be told yet
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
    """Make this the process's context; `init` does it, and tests that bring a session."""
    global _context
    _context = context


def session() -> Session | None:
    """The process's session, if it has one."""
    return _context.session if _context is not None else None


def current(why: str) -> Context:
    """The process's context. UsageError before `init()`; `why` names what needs it."""
    if _context is None:
        raise UsageError(f"{why} before init()", hint="call paceline.init() first")
    return _context
