"""One job in the hands of a program: ask it, wait for it, change it, end it."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from paceline.client.errors import EndUnknownError, JobFailedError
from paceline.client.figures import Figures
from paceline.client.follower import Follower
from paceline.client.progress import Bar, console_for
from paceline.clock import wall_s
from paceline.jobs.core.waiting import reached
from paceline.jobs.errors import MissingExtraError
from paceline.jobs.interface import (
    ENDED,
    FAILED,
    JobEvent,
    Jobs,
    JobStatus,
    LogLine,
    Selection,
    Until,
)

if TYPE_CHECKING:
    from pandas import DataFrame


class Job:
    """A job of a `JobClient`, which makes them. Errors are those of `paceline.jobs.errors`."""

    def __init__(self, jobs: Jobs, status: JobStatus) -> None:
        self._jobs = jobs
        self.name = status.name
        # On this machine several runs may have had the name; the folder is of one.
        self._at = status.place if status.place.startswith("/") else status.name
        self._figures = Figures()
        self._note(status)

    def __repr__(self) -> str:
        return f"<Job {self.name} of {self._jobs.where}>"

    def status(self) -> JobStatus:
        """As it is now."""
        status = self._jobs.status(self._at)
        self._note(status)
        return status

    def wait(
        self,
        until: Until | str = Until.ENDED,
        *,
        timeout_s: float | None = None,
        progress: bool | None = None,
    ) -> JobStatus:
        """Until the job has `ended`, is `training` with all replicas, or is `suspended`.

        `timeout_s`: seconds; None waits for as long as it takes. `progress`: show a bar; None for
        where somebody can see it, a notebook or a terminal. Raises JobFailedError for a job that
        has failed, EndUnknownError for one that has ended nobody knows how, WaitTimeoutError, and
        NoSuchJobError if it is deleted meanwhile.
        """
        wanted = Until(until)
        console = console_for(progress)
        if console is None:
            status = self._until(wanted, timeout_s, None)
        else:
            with Bar(console) as bar:
                status = self._until(wanted, timeout_s, bar)
        if status.state == FAILED:
            raise JobFailedError(status)
        if status.state == ENDED:
            raise EndUnknownError(status)
        return status

    def _until(self, wanted: Until, timeout_s: float | None, bar: Bar | None) -> JobStatus:
        def on_status(status: JobStatus) -> None:
            self._note(status)
            if bar is not None:
                bar.show(status)

        follower = Follower(lambda: self._jobs.watch(self._at), on_status)
        try:
            return follower.wait(
                lambda status: reached(status, wanted), what=wanted, timeout_s=timeout_s
            )
        finally:
            follower.leave()

    def logs(
        self,
        *,
        rank: int | None = None,
        follow: bool = False,
        previous: bool = False,
        tail: int | None = None,
    ) -> Generator[LogLine]:
        """What its ranks print, in order of time.

        `rank`: only of this one. `follow`: go on until the job has ended. `previous`: also of
        attempts that were replaced. `tail`: at most so many of each replica's that are there.
        """
        selection = Selection(rank=rank, previous=previous, tail=tail)
        return self._jobs.logs(self._at, selection, follow=follow)

    def events(self) -> list[JobEvent]:
        """Its history, the oldest entry first."""
        return self._jobs.events(self._at)

    def rounds(self) -> DataFrame:
        """Figures of its rounds, one row for each round at which this object has seen the job: in
        `wait()`, and in each `status()`. Columns: round, wall_s (Unix time), state, replicas,
        ready, progress (0 to 1), rounds_per_s, round_s, samples_applied, samples_late,
        samples_dropped, updates, wait_avoided_s, and each figure that the script gives to `pl.log`:
        its mean over the rounds since the row before.
        A cluster does not tell of samples, updates and the script's figures; they are for
        Prometheus there. Raises MissingExtraError without pandas."""
        self.status()
        try:
            import pandas as pd
        except ModuleNotFoundError:
            raise MissingExtraError(
                "a table of the rounds needs the package pandas, which is not installed",
                hint="pip install 'paceline[notebook]'",
            ) from None
        return pd.DataFrame(self._figures.rows())

    def scale(self, replicas: int) -> int:
        """Change the number of replicas; returns the one before. Raises RejectedError."""
        return self._jobs.scale(self._at, replicas)

    def suspend(self) -> None:
        """Stop it after a checkpoint, and keep it."""
        self._jobs.suspend(self._at)

    def resume(self) -> None:
        """Go on after `suspend`."""
        self._jobs.resume(self._at)

    def delete(self, *, wait_s: float = 0.0) -> None:
        """End it and remove it with its logs; waits at most `wait_s` seconds until it is gone."""
        self._jobs.delete(self._at, wait_s=wait_s)

    def _note(self, status: JobStatus) -> None:
        self._figures.add(status, wall_s())
