"""Choice of the job that a plan is about, and of the file that keeps what was measured of it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline_api.errors import EXIT_BAD_INPUT, PacelineError
from paceline_api.reading.load import load_job
from paceline_api.resolve import resolve
from paceline_api.rounds import RoundSettings
from paceline_api.settings import ResolvedJob

from paceline.cli.choice import Where, choose
from paceline.cli.runtimes import check_whole
from paceline.clock import wall_s
from paceline.core.forecast.book import Measurement
from paceline.core.forecast.measured import row
from paceline.jobs.errors import NoSamplesError
from paceline.jobs.interface import Jobs
from paceline.jobs.local import LocalJobs
from paceline.local import plan_file

FILES: Final = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class Planned:
    """The job that a plan is about, and where its measurements come from."""

    job: ResolvedJob
    file: Path | None
    """Path of its job file; None for a job that was given by its name."""
    book: Path
    """File of the earlier measurements and forecasts."""
    measurements: Callable[[], Iterable[Measurement]]
    """Returns what can be measured now; raises PacelineError if that is not possible."""
    hint: str
    """Advice for the case that nothing is known about the job."""


def planned(named: str, where: Where, overrides: Sequence[str]) -> Planned:
    """Return the job to plan.

    An unusable file or an unknown job raises PacelineError, too.

    Args:
        named: Path of a job file, or a job as the other commands name it.
        where: Options that name a cluster.
        overrides: Values of --set; for a job file only.

    Returns:
        The job and where its measurements come from.

    Raises:
        PacelineError: A job file was given together with a cluster.
    """
    path = Path(named)
    if path.suffix not in FILES and (path.is_dir() or not path.exists()):
        return _of_name(named, where, overrides)
    if where.given:
        raise PacelineError(
            f"{named} is a file, and a cluster's job is planned from what it has done there",
            hint="name the job instead of the file, as in `paceline plan JOB -n NAMESPACE`",
            exit_code=EXIT_BAD_INPUT,
        )
    written = load_job(path, overrides)
    check_whole(written)
    job = resolve(written)
    hint = f"say `paceline plan {shlex.quote(named)} --measure`, or run it here"
    return Planned(job, path, plan_file.path_of(job), lambda: plan_file.of_runs(job), hint)


def _of_name(name: str, where: Where, overrides: Sequence[str]) -> Planned:
    if overrides:
        raise PacelineError(
            f"--set changes what a file says, and {name} is a job",
            hint="say what to forecast with --ranks, --model and --batch",
            exit_code=EXIT_BAD_INPUT,
        )
    jobs = choose(name, where)
    job = jobs.resolved(name)
    hint = "ask again when it has made more rounds"
    if isinstance(jobs, LocalJobs):
        runs = Path(jobs.status(name).place).parent
        book = plan_file.path_of(job, runs)
        return Planned(job, None, book, lambda: plan_file.of_runs(job, runs), hint)
    book = plan_file.path_of(job, place=jobs.where)
    return Planned(job, None, book, lambda: _measurements(jobs, name, job), hint)


def _measurements(jobs: Jobs, name: str, job: ResolvedJob) -> list[Measurement]:
    """Return the measurement of a job in a cluster, at its current size.

    Args:
        jobs: The back end.
        name: The job.
        job: Its settings.

    Returns:
        One measurement from the samples of all workers; none if they do not suffice.

    Raises:
        NoSamplesError: A worker does not answer.
    """
    samples = jobs.samples(name)
    if silent := samples.silent:  # without them the row would describe fewer ranks
        raise NoSamplesError(
            f"{len(silent)} of the {len(silent) + len(samples.pods)} workers of job {name} do not "
            f"answer: {silent[0].pod}: {silent[0].why}",
            hint="ask again; `paceline explain` says whether it trains",
        )
    forecast = row(samples.pods, RoundSettings.of(job.collective), job.model)
    if forecast is None:
        return []
    detail = jobs.status(name).detail
    generation = f", {detail.generation.short}" if detail is not None else ""
    return [
        Measurement(f"{name}{generation}", wall_s(), forecast.setting, forecast.step_s, forecast)
    ]
