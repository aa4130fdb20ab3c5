"""Watching one job on a thread of its own, so that a wait can have a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Final

from paceline_api.errors import PacelineError
from paceline_api.times import NS_PER_S

from paceline.clock import now_ns
from paceline.jobs.errors import NoSuchJobError, WaitTimeoutError
from paceline.jobs.interface import JobStatus


class Follower:
    """Watches a job on a daemon thread and passes on each status.

    The thread is needed because a watch blocks until the job changes, while a wait has a time
    limit. It ends with the job, with an error, or with the first status after `leave`.
    """

    def __init__(
        self, watch: Callable[[], Generator[JobStatus]], on_status: Callable[[JobStatus], None]
    ) -> None:
        """Start the thread.

        Args:
            watch: Returns the statuses of the job; called once, on the thread.
            on_status: Called on the thread with each status, with the lock held.
        """
        self._watch, self._on_status = watch, on_status
        self._changed = threading.Condition()
        self._latest: JobStatus | None = None
        self._error: PacelineError | None = None
        self._ended = self._left = False
        threading.Thread(target=self._follow, name="paceline-follower", daemon=True).start()

    def wait(
        self, reached: Callable[[JobStatus], bool], *, what: str, timeout_s: float | None
    ) -> JobStatus:
        """Block until a status meets the condition.

        An error of the watch is raised here.

        Args:
            reached: The condition.
            what: Its name, for the error.
            timeout_s: Upper bound on the wait in seconds; None waits without a bound.

        Returns:
            The latest status, once it meets the condition.

        Raises:
            WaitTimeoutError: `timeout_s` is over.
            NoSuchJobError: The watch has ended without such a status: the job was deleted.
        """
        end_ns = None if timeout_s is None else now_ns() + round(timeout_s * NS_PER_S)
        with self._changed:
            while self._latest is None or not reached(self._latest):
                if self._error is not None:
                    raise self._error
                if self._ended:
                    raise NoSuchJobError(
                        "the job was deleted while it was waited for", hint="submit it again"
                    )
                left_s = WAKE_S if end_ns is None else (end_ns - now_ns()) / NS_PER_S
                if left_s <= 0:
                    state = self._latest.state if self._latest else "not heard of"
                    raise WaitTimeoutError(
                        f"the job is {state} after {timeout_s:g} s, and not yet {what}",
                        hint="wait longer with timeout_s; `paceline explain` says what it needs",
                    )
                self._changed.wait(left_s)
            return self._latest

    def leave(self) -> None:
        """Stop watching; `on_status` is not called any more."""
        with self._changed:
            self._left = True

    def _follow(self) -> None:
        try:
            for status in self._watch():
                with self._changed:
                    if self._left:
                        return
                    self._on_status(status)
                    self._latest = status
                    self._changed.notify_all()
        except PacelineError as error:
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()


WAKE_S: Final = 3600.0
"""Timeout in seconds of each inner wait where the caller gave none. Ctrl-C interrupts it like any
other."""
