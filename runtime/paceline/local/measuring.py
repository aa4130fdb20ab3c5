"""Short run of a job, to measure how long its steps take at one size.

It is the user's own job, started by the same runner, but nothing of it is kept. It has a folder
that is removed afterwards and no checkpoints. Its ranks are ended as soon as enough is known, so no
code after the training loop runs. All rounds wait for every rank, so that each arrival is known.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from paceline_api.errors import PacelineError
from paceline_api.settings import ResolvedJob
from paceline_api.status import Outcome, Status
from paceline_api.times import NS_PER_S
from paceline_api.types.enums import Mode, StragglerResponse

from paceline.clock import now_ns, wall_s
from paceline.core.anatomy.samples import PodSamples
from paceline.core.forecast.book import Measurement
from paceline.core.forecast.measured import reported_noise_scale, row
from paceline.local import steps
from paceline.local.runner import Runner
from paceline.local.timeline import Timeline
from paceline.private_files import FOLDER_MODE
from paceline.scratch import Scratch
from paceline.signals import on_request_to_end

ROUNDS: Final = 72
"""Number of rounds to make: as many as ranks keep samples of, and a few before them."""
BRIEF_S: Final = 2.0
"""Lower bound on the seconds of training, because a process is slower at first."""
ROUNDS_FEW: Final = 16
"""Number of rounds that suffices once LONG_S have passed."""
LONG_S: Final = 20.0
"""Seconds of training after which ROUNDS_FEW rounds suffice."""
SOURCE: Final = "--measure"
"""Source of the measurement, as tables show it."""


@dataclass(frozen=True, slots=True)
class Size:
    """Size at which a job is measured."""

    replicas: int
    procs: int
    """Number of members in each replica: ranks, or groups of `model` ranks."""
    model: int

    def __str__(self) -> str:
        ranks = self.replicas * self.procs * self.model
        text = f"{ranks} rank{'s' if ranks > 1 else ''}"
        return f"{text} in groups of {self.model}" if self.model > 1 else text


class NotMeasuredError(PacelineError):
    """Raised if the job failed, ended too early, or made too few rounds in its time."""


def at_size(job: ResolvedJob, size: Size) -> ResolvedJob:
    """Return the job as it is measured at this size.

    It runs in mode Full, without checkpoints, deadline or metrics port, and replaces no slow rank.

    Returns:
        A copy of the job with another name.
    """
    return replace(
        job,
        name=f"{job.name}-plan",  # must not be mistaken for the job itself
        replicas=size.replicas,
        min_replicas=1,
        max_replicas=None,
        procs_per_replica=size.procs,
        model=size.model,
        suspend=False,
        active_deadline_ns=None,
        checkpoint=None,
        metrics_port=0,
        collective=replace(job.collective, mode=Mode.FULL),
        straggler=replace(job.straggler, respond=(StragglerResponse.TOLERATE,)),
        elasticity=replace(job.elasticity, allowed_sizes=()),
    )


async def measure(
    job: ResolvedJob, size: Size, *, working_dir: Path, limit_s: float
) -> Measurement | None:
    """Run the job at this size for up to `limit_s`; return None if the user has ended it."""
    begun_s = wall_s()
    with Scratch.make() as own:
        folder = own.temporary / "run"
        folder.mkdir(FOLDER_MODE)
        run = _Measured(at_size(job, size), folder, working_dir)
        outcome = await run.until_known(limit_s)
        if run.interrupted:
            return None
        forecast = None
        if (status := run.status) is not None:
            noise_scale = reported_noise_scale(status.ranks)
            forecast = row(run.pods, status.round_settings, size.model, noise_scale)
    if forecast is None:
        raise _not_measured(size, outcome, run.rounds, limit_s)
    return Measurement(SOURCE, begun_s, forecast.setting, forecast.step_s, forecast)


class _Measured:
    """One measuring run: the runner, and what is known so far."""

    def __init__(self, job: ResolvedJob, folder: Path, working_dir: Path) -> None:
        self.rounds = 0
        self.interrupted = False
        self.status: Status | None = None
        """Status at the time of the samples."""
        self.pods: Sequence[PodSamples] = ()
        self._folder = folder
        self._enough = asyncio.Event()
        self._runner = Runner(
            job,
            run_dir=folder,
            working_dir=working_dir,
            faults=(),
            show=self._show,
            say=lambda _: None,
            on_line=lambda _: None,
            measures=True,
        )

    async def until_known(self, limit_s: float) -> Outcome | None:
        """Run the job until enough is known, or until `limit_s` seconds have passed.

        Returns:
            How the job ended, if it ended by itself; else None.
        """
        on_request_to_end(asyncio.get_running_loop(), self._interrupt)
        run = asyncio.create_task(self._runner.run())
        enough = asyncio.create_task(self._enough.wait())
        try:
            both: set[asyncio.Future[Any]] = {run, enough}
            done, _ = await asyncio.wait(both, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            status = self.status
            if self.rounds:
                self.pods = await asyncio.to_thread(_samples, self._folder)
            self.status = status
        finally:
            enough.cancel()
            self._runner.end_at_once()
            result = await run
        return result.outcome if run in done else None

    def _interrupt(self, _: signal.Signals) -> None:
        self.interrupted = True
        self._enough.set()
        self._runner.end_at_once()

    def _show(self, status: Status, timeline: Timeline) -> None:
        self.status = status
        self.rounds = status.version
        trained_s = timeline.elapsed_ns(now_ns()) / NS_PER_S
        wanted, at_least_s = (ROUNDS_FEW, LONG_S) if trained_s >= LONG_S else (ROUNDS, BRIEF_S)
        if self.rounds >= wanted and trained_s >= at_least_s:
            self._enough.set()


def _samples(folder: Path) -> Sequence[PodSamples]:
    pods, silent = steps.of_run(folder)
    return () if silent else pods


def _not_measured(
    size: Size, outcome: Outcome | None, rounds: int, limit_s: float
) -> NotMeasuredError:
    if outcome is None:
        return NotMeasuredError(
            f"with {size} the job made {rounds} rounds in {limit_s:g} s, too few to measure it",
            hint="give it more time with --timeout, such as 10m",
        )
    if outcome.complete:
        return NotMeasuredError(
            f"with {size} the job was over after {rounds} rounds, too early to be measured",
            hint="let it train for longer, such as for more epochs: it is ended after some "
            f"{ROUNDS} rounds",
        )
    return NotMeasuredError(
        f"with {size} the job failed while it was measured: {outcome.message}",
        hint=outcome.hint or "see whether `paceline run` trains it",
    )
