"""File with the measurements and forecasts of a job, below `runs/`, and measurements from its runs.

The name of a file contains the job's name and a fingerprint of what its ranks run. Another program,
other arguments or another transport therefore use another file.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec
from paceline_api.bounded import read_file
from paceline_api.decoding import UNDECODABLE
from paceline_api.errors import EXIT_BAD_INPUT, JobFileError, PacelineError
from paceline_api.jobfile import JOB_FILE, read_resolved_job
from paceline_api.settings import ResolvedJob
from paceline_api.status import Status

from paceline import private_files
from paceline.core.forecast.book import Book, Measurement
from paceline.core.forecast.measured import earlier, row
from paceline.local import control, index, steps
from paceline.local.rundir import RUNS, WHAT_RUNS, LastStatusError, numbered, read_last_status

RUNS_READ: Final = 16
"""Number of runs of a job that are read: the latest ones."""
FILE_BYTES_MAX: Final = 16 * 2**20
"""Upper bound on the size of a file in bytes."""


class PlanFileError(PacelineError):
    """Raised if a file with measurements cannot be read or written.

    Args:
        path: The file.
        problem: What is wrong with it.
        hint: What to do.
    """

    def __init__(self, path: Path, problem: str, *, hint: str) -> None:
        super().__init__(f"{path}: {problem}", hint=hint, exit_code=EXIT_BAD_INPUT)


def fingerprint(job: ResolvedJob, place: str = "") -> str:
    """Return a hash of what a job's ranks run, independent of its size and mode.

    Args:
        job: The job.
        place: Name of a cluster; empty for this machine. Measurements of one place are not valid
            for another.

    Returns:
        Eight hexadecimal digits.
    """
    trainer, c = job.trainer, job.collective
    same = (
        trainer.command,
        sorted(trainer.env.items()),
        trainer.working_dir,
        c.backend,
        c.wire,
        c.segment_bytes,
        c.overlap,
        c.pipeline,
        *([place] if place else []),
    )
    return blake2b(msgspec.json.encode(same), digest_size=4).hexdigest()


def path_of(job: ResolvedJob, runs: Path = RUNS, *, place: str = "") -> Path:
    """Return the path of the file for this job; `place` as for `fingerprint`."""
    return runs / f"{job.name}.plan-{fingerprint(job, place)}.json"


def read(path: Path) -> Book:
    """Return the measurements and forecasts in a file; empty if there is no file.

    A folder that another user can write to raises ForeignFolderError.

    Returns:
        The content of the file.

    Raises:
        PlanFileError: The file cannot be read, or holds something else.
    """
    try:
        private_files.check_folder(path.parent, WHAT_RUNS)
        return msgspec.json.decode(read_file(path, FILE_BYTES_MAX), type=Book)
    except FileNotFoundError:
        return Book()
    except OSError as error:
        raise PlanFileError(path, _reason(error), hint="it must be readable") from None
    except UNDECODABLE as error:
        raise PlanFileError(
            path, f"holds no measurements: {error}", hint="remove it and measure again"
        ) from None


def write(path: Path, book: Book) -> None:
    """Write the file, completely or not at all.

    Raises:
        PlanFileError: It cannot be written.
    """
    try:
        private_files.make_folder(path.parent, WHAT_RUNS)
        private_files.write(path, msgspec.json.format(msgspec.json.encode(book)))
    except OSError as error:
        raise PlanFileError(
            path, _reason(error), hint="call paceline in a folder that you may write to"
        ) from None


def of_runs(job: ResolvedJob, runs: Path = RUNS) -> Iterator[Measurement]:
    """Yield the measurements from the latest runs of a job, including those that still run.

    Args:
        job: The job; only runs with its fingerprint count.
        runs: The folder of runs.

    Yields:
        One measurement for each membership that a run has had.
    """
    mine = fingerprint(job)
    for folder in _latest(job.name, runs):
        try:
            ran = read_resolved_job(folder / JOB_FILE)
        except JobFileError:
            continue  # the run could not write its job file
        if fingerprint(ran) == mine and (status := _status(folder)) is not None:
            yield from _of_run(folder, status, ran.model)


def _of_run(folder: Path, status: Status, model: int) -> Iterator[Measurement]:
    pods, silent = steps.of_run(folder)
    # If a pod does not answer, the row would be that of fewer ranks.
    forecast = None if silent else row(pods, status.round_settings, model)
    if forecast is None or not status.changes:
        return
    for one in earlier(status, forecast.setting.batch, model):
        source = f"{folder.name}, {one.generation}"
        yield Measurement(source, one.at_s, one.setting, one.step_s)
    last = status.changes[-1]
    source = f"{folder.name}, {last.generation.short}"
    yield Measurement(source, last.wall_s, forecast.setting, forecast.step_s, forecast)


def _latest(job: str, runs: Path) -> list[Path]:
    if not private_files.is_private(runs):
        return []
    latest = [path for _, path in sorted(numbered(job, runs).items())[-RUNS_READ:]]
    return [path for path in latest if private_files.is_private(path)]


def _status(folder: Path) -> Status | None:
    """Return the status of a run; None if it was killed, has only just begun or is damaged."""
    if (entry := index.of_run_dir(folder)) is not None:
        try:
            return control.look(entry).status
        except control.ControlError:
            return None
    try:
        return read_last_status(folder)
    except (FileNotFoundError, LastStatusError):
        return None


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
