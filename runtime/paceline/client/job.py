"""`Job`: one job of a client, with methods to query, wait for, change and end it."""

from __future__ import annotations

import threading
from collections.abc import Generator
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from paceline_api.errors import PacelineError
from paceline_api.times import NS_PER_S

from paceline.client.errors import EndUnknownError, JobFailedError
from paceline.client.figures import Figures
from paceline.client.progress import ProgressBar, console_for
from paceline.clock import now_ns, wall_s
from paceline.jobs.errors import MissingExtraError, NoSuchJobError, WaitTimeoutError
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
    """One job; the methods of `JobClient` return it.

    All methods block. Errors are those of `paceline.jobs.errors` and `paceline.client.errors`.
    """

    def __init__(self, jobs: Jobs, status: JobStatus) -> None:
        self._jobs = jobs
        self.name = status.name
        # Several runs on this machine may have the name, so remember the run folder.
        self._at = status.place if status.place.startswith("/") else status.name
        self._figures = Figures()
        self._note(status)

    def __repr__(self) -> str:
        return f"<Job {self.name} of {self._jobs.where}>"

    def status(self) -> JobStatus:
        """Return the current status of the job."""
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
        """Block until the job has `ended`, is `training` with all replicas, or is `suspended`.

        The wait is over for a job that has ended, too. A wait that exceeds `timeout_s` raises
        WaitTimeoutError, and a job that is deleted meanwhile NoSuchJobError.

        Args:
            until: The condition to wait for.
            timeout_s: Upper bound on the wait in seconds; None waits without a bound.
            progress: Show a progress bar; None shows one in a notebook and on a terminal.

        Returns:
            The status that ended the wait.

        Raises:
            JobFailedError: The job has failed.
            EndUnknownError: The job has ended and its files do not say how.
        """
        wanted = Until(until)
        console = console_for(progress)
        if console is None:
            status = self._until(wanted, timeout_s, None)
        else:
            with ProgressBar(console) as bar:
                status = self._until(wanted, timeout_s, bar)
        if status.state == FAILED:
            raise JobFailedError(status)
        if status.state == ENDED:
            raise EndUnknownError(status)
        return status

    def _until(self, wanted: Until, timeout_s: float | None, bar: ProgressBar | None) -> JobStatus:
        """Watch the job until it meets a condition; an error of the watch is raised here.

        A thread watches, because a watch blocks until the job changes while a wait has a time
        limit. The thread ends with the job, with an error, or with the first status after the wait.

        Args:
            wanted: The condition.
            timeout_s: Upper bound on the wait in seconds; None waits without a bound.
            bar: Shows each status.

        Returns:
            The status that meets the condition.

        Raises:
            NoSuchJobError: The job was deleted.
            WaitTimeoutError: `timeout_s` is over.
        """
        end_ns = None if timeout_s is None else now_ns() + round(timeout_s * NS_PER_S)
        arrivals: SimpleQueue[JobStatus | PacelineError | None] = SimpleQueue()
        over, state = threading.Event(), "not heard of"

        def watch() -> None:
            try:
                for status in self._jobs.watch(self._at):
                    if over.is_set():
                        return
                    arrivals.put(status)
                arrivals.put(None)
            except PacelineError as error:
                arrivals.put(error)

        threading.Thread(target=watch, name="paceline-follower", daemon=True).start()
        try:
            while True:
                left_s = None if end_ns is None else max(0.0, (end_ns - now_ns()) / NS_PER_S)
                arrived = arrivals.get(timeout=left_s)
                if arrived is None:
                    raise NoSuchJobError(
                        "the job was deleted while it was waited for", hint="submit it again"
                    )
                if isinstance(arrived, PacelineError):
                    raise arrived
                self._note(arrived)
                if bar is not None:
                    bar.show(arrived)
                if arrived.meets(wanted):
                    return arrived
                state = arrived.state
        except Empty:
            raise WaitTimeoutError(
                f"the job is {state} after {timeout_s:g} s, and not yet {wanted}",
                hint="wait longer with timeout_s; `paceline explain` says what it needs",
            ) from None
        finally:
            over.set()

    def logs(
        self,
        *,
        rank: int | None = None,
        follow: bool = False,
        previous: bool = False,
        tail: int | None = None,
    ) -> Generator[LogLine]:
        """Yield the lines that the ranks print, in order of time.

        Args:
            rank: Rank whose lines are returned; None for all ranks and the agents.
            follow: Continue with new lines until the job has ended.
            previous: Include the lines of attempts that were replaced.
            tail: Upper bound on the existing lines of each replica; None: no bound.

        Returns:
            A generator of lines.
        """
        selection = Selection(rank=rank, previous=previous, tail=tail)
        return self._jobs.logs(self._at, selection, follow=follow)

    def events(self) -> list[JobEvent]:
        """Return the history of the job, the oldest event first."""
        return self._jobs.events(self._at)

    def rounds(self) -> DataFrame:
        """Return the figures of the rounds as a table, one row for each observed round.

        A round is observed by each `status()` and, continuously, by `wait()`. This method observes
        the present one, too. The columns are round, wall_s (Unix time in seconds), state, replicas,
        ready, progress (0 to 1), rounds_per_s, round_s, samples_applied, samples_late,
        samples_dropped, updates, wait_avoided_s, and each figure that the script passes to
        `pl.log`: its mean over the rounds since the row before. A cluster does not report samples,
        updates and the figures of the script; Prometheus has them there.

        Returns:
            A pandas.DataFrame.

        Raises:
            MissingExtraError: The package `pandas` is not installed.
        """
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
        """Change the number of replicas; a rejected change raises RejectedError.

        Args:
            replicas: The new number of replicas.

        Returns:
            The number before the change.
        """
        return self._jobs.scale(self._at, replicas)

    def suspend(self) -> None:
        """Stop the job after a checkpoint, and keep it."""
        self._jobs.suspend(self._at)

    def resume(self) -> None:
        """Start the suspended job again, from its newest checkpoint if there is one."""
        self._jobs.resume(self._at)

    def delete(self, *, wait_s: float = 0.0) -> None:
        """End the job and remove it with its logs; wait at most `wait_s` seconds for that."""
        self._jobs.delete(self._at, wait_s=wait_s)

    def _note(self, status: JobStatus) -> None:
        self._figures.add(status, wall_s())
