"""An in-memory implementation of `paceline.jobs.interface.Jobs` that replays given statuses."""

# ruff: noqa: ARG002 - the interface has parameters that this back end does not need

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path

from paceline.jobs.errors import NoSuchJobError
from paceline.jobs.interface import (
    ALL_LINES,
    NOTHING,
    Explanation,
    JobEvent,
    JobStatus,
    LogLine,
    Samples,
    Selection,
    Until,
)
from paceline_api.settings import ResolvedJob
from paceline_api.status import LogStatus, Status
from paceline_api.types.job import TrainingJob


def at(round_: int, state: str = "Training", **metrics: float) -> JobStatus:
    """Return the status of a job at round `round_` of ten."""
    log = LogStatus(gradients=4 * round_, samples_applied=128 * round_, metrics=metrics)
    return JobStatus(
        name="job",
        place="space",
        state=state,
        replicas=4,
        ready=4 if state == "Training" else 0,
        round=round_,
        progress=round_ / 10,
        rounds_per_s_now=2.0,
        left_s=(10 - round_) / 2,
        detail=Status("job", "", replicas=4, version=round_, log=log),
    )


class FakeJobs:
    """A back end whose job goes through the given statuses.

    A watch yields all statuses and then blocks, as for a real job, until `go` is set.
    """

    def __init__(self, statuses: Iterable[JobStatus] = ()) -> None:
        self.statuses = list(statuses) or [at(0, "Starting")]
        self.submitted: TrainingJob | None = None
        self.function: Mapping[str, str] = {}
        self.calls: list[tuple[object, ...]] = []
        self.go = threading.Event()
        self.closed_by: str | None = None

    where = "this test"

    def submit(
        self, job: TrainingJob, *, folder: Path, function: Mapping[str, str] = NOTHING
    ) -> JobStatus:
        self.submitted, self.function = job, function
        return self.statuses[0]

    def all(self) -> list[JobStatus]:
        return [self.statuses[-1]]

    def status(self, name: str) -> JobStatus:
        if name != "job":
            raise NoSuchJobError(f"there is no job {name}", hint="look at list_jobs()")
        return self.statuses[-1]

    def watch(self, name: str) -> Generator[JobStatus]:
        yield from self.statuses
        self.go.wait(30)

    def wait(
        self, name: str, until: Until = Until.ENDED, *, timeout_s: float | None = None
    ) -> JobStatus:
        raise AssertionError("the SDK follows")

    def logs(
        self, name: str, selection: Selection = ALL_LINES, *, follow: bool = False
    ) -> Generator[LogLine]:
        self.calls.append(("logs", name, selection, follow))
        try:
            for number in range(3):
                yield LogLine(number, "job-0-0", "0.0#0", 0, f"line {number}")
        finally:
            self.closed_by = threading.current_thread().name

    def scale(self, name: str, replicas: int) -> int:
        self.calls.append(("scale", name, replicas))
        return 4

    def suspend(self, name: str) -> None:
        self.calls.append(("suspend", name))

    def resume(self, name: str) -> None:
        self.calls.append(("resume", name))

    def delete(self, name: str, *, wait_s: float = 0.0) -> None:
        self.calls.append(("delete", name, wait_s))

    def events(self, name: str) -> list[JobEvent]:
        return [JobEvent(0.0, False, "Created", "it was made")]

    def explain(self, name: str) -> Explanation:
        return Explanation("it is well")

    def resolved(self, name: str) -> ResolvedJob:
        raise AssertionError("the SDK makes no plans")

    def samples(self, name: str) -> Samples:
        raise AssertionError("the SDK makes no pages")
