"""The verbs for jobs, whatever they run on, and the nouns that the verbs speak of.

`paceline.jobs.cluster.jobs.ClusterJobs` and `paceline.jobs.local.LocalJobs` keep this promise. All
calls block; iterators wait inside of `next()`, and `close()` ends them from the same thread. Errors
are a `PacelineError`: most of `paceline.jobs.errors`, of a login `paceline_api.access.errors`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol

from msgspec import Struct
from paceline_api.settings import ResolvedJob
from paceline_api.types.job import TrainingJob

from paceline.core.anatomy.samples import PodSamples, SilentPod
from paceline.core.status import Status

COMPLETE = "Complete"
FAILED = "Failed"
ENDED = "Ended"
"""How it has ended is not known: what it left of its end is damaged."""
UNKNOWN = "Unknown"
"""It runs, and cannot be asked."""
SUSPENDED = "Suspended"
SUSPENDING = "Suspending"
TRAINING = "Training"


class JobStatus(Struct, frozen=True):
    """A job at one moment: what `paceline status` shows, and prints as JSON."""

    name: str
    place: str
    """Its namespace, or on this machine its run folder."""
    state: str
    """One word: Starting, Training, Resizing, Suspending, Suspended, Complete, Failed, or the
    reason why it trains with less than was asked for, such as Unschedulable. On this machine also
    Ended, if what a run has left does not say how it ended, and in a list Unknown, for a run that
    cannot be asked."""
    message: str = ""
    """What happened, where the word alone does not say it: the last words of a rank that failed."""
    hint: str = ""
    """What to do about it; empty where nothing is known."""
    replicas: int = 0
    """Wanted."""
    ready: int = 0
    """Replicas whose ranks all take part."""
    round: int = 0
    """Rounds applied."""
    progress: float | None = None
    """0 to 1; None if nothing says where the end is."""
    rounds_per_s_now: float = 0.0
    """0 where nobody has measured it."""
    left_s: float | None = None
    """Seconds to the end at the present speed; None while nobody knows."""
    age_s: float = 0.0
    """Since it was submitted."""
    told_s: float = 0.0
    """How old round, progress and the ranks' figures are; 0 on this machine, and of a job that has
    ended."""
    detail: Status | None = None
    """Ranks, rounds, conditions; None before there is anything to tell. On a cluster it is put
    together from the TrainingJob and its pods: the script's own figures are missing, and the ranks'
    figures are there for 64 at most."""

    @property
    def ended(self) -> bool:
        """Return True if it is Complete, Failed or Ended; it does not run again."""
        return self.state in (COMPLETE, FAILED, ENDED)


class Until(StrEnum):
    """What `wait` may wait for."""

    ENDED = "ended"
    TRAINING = "training"
    """All replicas that are wanted take part."""
    SUSPENDED = "suspended"
    """Stopped by its spec, and nothing of it runs any more."""


class Selection(Struct, frozen=True):
    """Which lines of a job's logs are meant."""

    rank: int | None = None
    """Only of this rank, by its place (slot x procsPerReplica + process). None: all, and what the
    agents say besides."""
    previous: bool = False
    """Also those of attempts that were replaced. Without it, only of the latest of each replica."""
    tail: int | None = None
    """At most so many of each replica's that are there already, the last ones. None: all."""


ALL_LINES = Selection()
NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class LogLine(Struct, frozen=True):
    """One line that a rank, or the agent of its replica, has printed."""

    wall_ns: int
    """When, as Unix time."""
    source: str
    """Name of the pod, or of the agent's process."""
    member: str
    """slot.process#attempt of the rank; empty for the agent."""
    rank: int | None
    """Its place; None for the agent."""
    text: str
    """Without the end of the line and without the prefix of the rank."""


class JobEvent(Struct, frozen=True):
    """One entry in the history of a job."""

    wall_s: float
    warning: bool
    """Something to act on, in the words of Kubernetes a `Warning`."""
    reason: str
    """One word for programs."""
    message: str
    source: str = ""
    """Who says it: operator, scheduler, coordinator, a pod's kubelet."""
    count: int = 1
    """How often it was said; `wall_s` is the last time."""


class Samples(Struct, frozen=True):
    """The last steps of a job's ranks, as their agents tell them."""

    pods: tuple[PodSamples, ...]
    """With a step each, by slot."""
    silent: tuple[SilentPod, ...] = ()
    folder: str = ""
    """Its run folder on this machine; empty for a job of a cluster."""


class Explanation(Struct, frozen=True):
    """Why a job is where it is, and what to type next."""

    verdict: str
    """One sentence."""
    because: tuple[str, ...] = ()
    """What it follows from: conditions, the blamed rank, the operator's and coordinator's words."""
    commands: tuple[str, ...] = ()
    """To type next, the most useful first; at most three."""


class Jobs(Protocol):
    """The jobs of one place: a namespace of a cluster, or this user's on this machine.

    `name` is that of a job; on this machine a run folder as well. Every verb raises NoSuchJobError
    where there is no such job, and on a cluster NotAllowedError, AwayError and RefusedError."""

    @property
    def where(self) -> str:
        """The place in words for a message: 'namespace a of https://...', 'this machine'."""

    def submit(
        self, job: TrainingJob, *, folder: Path, function: Mapping[str, str] = NOTHING
    ) -> JobStatus:
        """Start a job. `folder`: where its relative paths begin, on this machine. `function`: files
        of the function that is its program, by name (`paceline.function`); they lie below the run
        folder of each rank, and go with the job. It does not wait for anything but the answer that
        the job is there. Raises NameTakenError, RejectedError."""

    def all(self) -> list[JobStatus]:
        """All, by name. Without `detail` where that would cost a request for each."""

    def status(self, name: str) -> JobStatus: ...

    def resolved(self, name: str) -> ResolvedJob:
        """Its settings with all defaults, at its present size. Raises JobFileError for a run that
        was not able to write them down."""

    def watch(self, name: str) -> Generator[JobStatus]:
        """Each new status, the present one first, the one of the end last. Ends too when the job is
        deleted."""

    def wait(
        self, name: str, until: Until = Until.ENDED, *, timeout_s: float | None = None
    ) -> JobStatus:
        """The status that was waited for, or that of the job's end if that comes before. Raises
        WaitTimeoutError after `timeout_s`, NoSuchJobError if it is deleted meanwhile."""

    def logs(
        self, name: str, selection: Selection = ALL_LINES, *, follow: bool = False
    ) -> Generator[LogLine]:
        """Lines of all ranks in order of time. `follow`: go on with what they print, and with the
        replicas that come later, until the job has ended. Raises NoSuchRankError."""

    def scale(self, name: str, replicas: int) -> int:
        """Change the number of replicas; the one before. Raises RejectedError."""

    def suspend(self, name: str) -> None:
        """Stop it after a checkpoint and keep it; nothing happens to one that is suspended."""

    def resume(self, name: str) -> None: ...

    def delete(self, name: str, *, wait_s: float = 0.0) -> None:
        """End it and remove it with its logs. `wait_s`: at most so long until it is gone; raises
        WaitTimeoutError then. A checkpoint in a volume or folder of the user's stays."""

    def events(self, name: str) -> list[JobEvent]:
        """Its history and that of its pods, the oldest first."""

    def explain(self, name: str) -> Explanation: ...

    def samples(self, name: str) -> Samples:
        """Of all pods that answer in time. On a cluster only while it trains. Raises
        NoSamplesError; AwayError where pods run and none answers."""
