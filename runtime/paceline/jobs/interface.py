"""The interface `Jobs`, common to all back ends, and the data types that its methods exchange.

`paceline.jobs.cluster.jobs.ClusterJobs` and `paceline.jobs.local.LocalJobs` implement it. All calls
block. Generators wait inside `next()`; close one from the thread that iterates over it. Every error
is a `PacelineError`: most come from `paceline.jobs.errors`, errors of a login from
`paceline_api.access.errors`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol

from msgspec import Struct
from paceline_api.settings import ResolvedJob
from paceline_api.status import Status
from paceline_api.types.job import TrainingJob

from paceline.core.anatomy.samples import PodSamples, SilentPod

COMPLETE = "Complete"
FAILED = "Failed"
ENDED = "Ended"
"""State of a run that has ended with an unknown outcome: its last status is damaged."""
UNKNOWN = "Unknown"
"""State of a run that is running and cannot be asked for its status."""
SUSPENDED = "Suspended"
SUSPENDING = "Suspending"
TRAINING = "Training"


class Until(StrEnum):
    """Conditions that `Jobs.wait` can wait for."""

    ENDED = "ended"
    TRAINING = "training"
    """All replicas that the spec asks for take part in training."""
    SUSPENDED = "suspended"
    """The job was stopped by its spec and no part of it runs any more."""


class JobStatus(Struct, frozen=True):
    """Status of a job at one moment; `paceline status` shows it and prints it as JSON."""

    name: str
    place: str
    """Namespace of the job; for a job on this machine, its run folder."""
    state: str
    """State in one word: Starting, Training, Resizing, Suspending, Suspended, Deleting, Complete,
    Failed, or the reason why the job trains with less than was asked for, such as Unschedulable.
    On this machine also Ended, if the files of a run do not say how it ended, and, in a list,
    Unknown for a run that cannot be asked."""
    message: str = ""
    """Explanation of the state, for example the last lines that a failed rank printed."""
    hint: str = ""
    """Advice on what to do; empty if there is none."""
    replicas: int = 0
    """Number of replicas that the spec asks for."""
    ready: int = 0
    """Number of replicas whose ranks are all members of the current generation."""
    round: int = 0
    """Number of rounds applied."""
    progress: float | None = None
    """Fraction of the job that is done, 0 to 1; None if the end is unknown."""
    rounds_per_s_now: float = 0.0
    """Current rounds per second; 0 if it was not measured."""
    left_s: float | None = None
    """Seconds to the end at the current speed; None if unknown."""
    age_s: float = 0.0
    """Seconds since the job was submitted; for a run on this machine that has ended, since its run
    folder was locked."""
    told_s: float = 0.0
    """Age in seconds of `round`, `progress` and the figures of the ranks. It is 0 on this machine,
    and for a job that has ended."""
    detail: Status | None = None
    """Ranks, rounds and conditions; None while there is nothing to report. For a job in a cluster
    it is derived from the TrainingJob and its pods: it lacks the figures that the script logs,
    and it has the figures of at most 64 ranks."""

    @property
    def ended(self) -> bool:
        """Return True if the job is Complete, Failed or Ended; it does not run again."""
        return self.state in (COMPLETE, FAILED, ENDED)

    def meets(self, until: Until) -> bool:
        """Return True if a wait for `until` is over.

        It is over for a job that has ended, too, because such a job never meets another condition.
        """
        if self.ended or until is Until.ENDED:
            return self.ended
        if until is Until.SUSPENDED:
            return self.state == SUSPENDED
        return self.state == TRAINING and self.ready == self.replicas


class Selection(Struct, frozen=True):
    """Filter that selects lines of a job's logs."""

    rank: int | None = None
    """Rank number (slot x procsPerReplica + process) whose lines are selected. None selects all
    ranks and the lines of the agents themselves."""
    previous: bool = False
    """True selects the lines of replaced attempts, too. False selects those of the latest attempt
    of each replica only."""
    tail: int | None = None
    """Upper bound on the number of existing lines of each replica; the last ones are kept. None: no
    bound."""


ALL_LINES = Selection()
NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class LogLine(Struct, frozen=True):
    """One line that a rank, or the agent of its replica, printed."""

    wall_ns: int
    """Time at which it was printed: Unix time in nanoseconds."""
    source: str
    """Name of the pod, or of the agent's process on this machine."""
    member: str
    """Member that printed the line, as `slot.process#attempt`; empty for the agent."""
    rank: int | None
    """Rank number, slot x procsPerReplica + process; None for the agent."""
    text: str
    """The line without its line end and without the prefix that names the rank."""


class JobEvent(Struct, frozen=True):
    """One entry in the history of a job."""

    wall_s: float
    warning: bool
    """True if a user should act on it; Kubernetes' type `Warning`."""
    reason: str
    """Machine-readable reason in CamelCase."""
    message: str
    source: str = ""
    """Component that reported it: operator, scheduler, coordinator or a kubelet."""
    count: int = 1
    """Number of occurrences; `wall_s` is the time of the last one."""


class ClusterFinding(Struct, frozen=True):
    """One thing that the API server would say to a job."""

    field: str
    """Field of the job; empty if the message names it."""
    message: str
    hint: str


class Checks(Struct, frozen=True):
    """What an API server would say to a job, before anything of it is created."""

    wrong: tuple[ClusterFinding, ...] = ()
    unchecked: tuple[ClusterFinding, ...] = ()
    """What could not be checked, with the reason, such as a right that is missing."""


class RuntimeRow(Struct, frozen=True):
    """One runtime of a cluster, as `paceline runtimes` lists it."""

    name: str
    kind: str
    """ClusterTrainingRuntime or TrainingRuntime."""
    ready: str
    """True, False, or Unknown while no operator has judged it."""
    description: str = ""
    problem: str = ""
    """What is wrong with it; empty if it is not known to be wrong."""


class Samples(Struct, frozen=True):
    """Timing samples of the last steps of a job's ranks, as reported by their agents."""

    pods: tuple[PodSamples, ...]
    """Samples of the pods that have made at least one step, in order of their slots."""
    silent: tuple[SilentPod, ...] = ()
    """Pods that did not answer, or whose answer was unusable, with the reason."""
    folder: str = ""
    """Run folder on this machine; empty for a job in a cluster."""


class Explanation(Struct, frozen=True):
    """Why a job is in its current state, and which commands to type next."""

    verdict: str
    """The most important cause, in one sentence."""
    because: tuple[str, ...] = ()
    """Evidence for the verdict: conditions, slow ranks, and messages of the operator and the
    coordinator."""
    commands: tuple[str, ...] = ()
    """Commands to type next, the most useful first; at most three."""


class Jobs(Protocol):
    """Interface to the jobs of one place: a namespace of a cluster, or this user's on this machine.

    A parameter `name` is the name of a job; on this machine it may be a run folder as well. Every
    method that takes a name raises NoSuchJobError if there is no such job. On a cluster every
    method can raise NotAllowedError (403), AwayError (no answer), NotInstalledError (no
    TrainingJobs) and RefusedError (401). On this machine a method raises AwayError if a run does
    not answer.
    """

    @property
    def where(self) -> str:
        """The place as text for a message: 'namespace a of https://...', 'this machine'."""

    def submit(
        self, job: TrainingJob, *, folder: Path, function: Mapping[str, str] = NOTHING
    ) -> JobStatus:
        """Start a job and return as soon as it exists; nothing else is waited for.

        Args:
            job: The job to start.
            folder: On this machine, the folder to which relative paths in the job refer. A cluster
                ignores it.
            function: Text files of the function that is the job's program, by file name
                (`paceline.function`). They are placed below the run folder of each rank and are
                deleted together with the job.

        Returns:
            The status of the new job.

        Raises:
            NameTakenError: A job with that name exists already; on this machine, one that is
                running.
            RejectedError: The API server, or `paceline run`, rejects the job.
        """

    def all(self) -> list[JobStatus]:
        """Return the status of all jobs, sorted by name.

        On this machine only running jobs are listed.

        Returns:
            One status for each job. `detail` is None where it would cost a request for each job.
        """

    def status(self, name: str) -> JobStatus:
        """Return the current status of a job, with `detail`."""

    def resolved(self, name: str) -> ResolvedJob:
        """Return the settings of a job with all defaults filled in, at its current size.

        Raises:
            JobFileError: The run was not able to write its settings down, or the file is
                unreadable.
        """

    def watch(self, name: str) -> Generator[JobStatus]:
        """Yield the current status of a job, and then each new one until the job has ended.

        The generator also ends when the job is deleted.

        Yields:
            Statuses in order; that of the end is the last.
        """

    def wait(
        self, name: str, until: Until = Until.ENDED, *, timeout_s: float | None = None
    ) -> JobStatus:
        """Block until a job reaches a condition, or until it has ended.

        Args:
            name: The job.
            until: The condition to wait for.
            timeout_s: Upper bound on the wait in seconds; None waits without a bound.

        Returns:
            The status that meets the condition, or the status of the job's end if the end comes
            first.

        Raises:
            WaitTimeoutError: `timeout_s` is over.
            NoSuchJobError: There is no such job, or it was deleted during the wait.
        """

    def logs(
        self, name: str, selection: Selection = ALL_LINES, *, follow: bool = False
    ) -> Generator[LogLine]:
        """Yield the log lines of all ranks, merged in order of time.

        Args:
            name: The job.
            selection: Which lines to return.
            follow: Continue with new lines, and with replicas that start later, until the job has
                ended.

        Yields:
            The selected lines.

        Raises:
            NoSuchRankError: The job has no rank `selection.rank`.
        """

    def scale(self, name: str, replicas: int) -> int:
        """Change the number of replicas that the job asks for.

        Args:
            name: The job.
            replicas: The new number of replicas, at least 1.

        Returns:
            The number of replicas before the change.

        Raises:
            RejectedError: The change breaks a rule of the job, such as `maxReplicas`.
        """

    def suspend(self, name: str) -> None:
        """Stop a job after a checkpoint and keep it. Suspending it again has no effect."""

    def resume(self, name: str) -> None:
        """Start a suspended job again, from its newest checkpoint if there is one."""

    def delete(self, name: str, *, wait_s: float = 0.0) -> None:
        """End a job and remove it together with its logs.

        Checkpoints in a volume or folder of the user are kept.

        Args:
            name: The job.
            wait_s: Upper bound in seconds on the wait until the job is gone; 0 does not wait.

        Raises:
            WaitTimeoutError: The job is not gone after `wait_s`.
        """

    def events(self, name: str) -> list[JobEvent]:
        """Return the history of a job and of its pods, the oldest event first."""

    def explain(self, name: str) -> Explanation:
        """Return why a job is slow or does not start, and which commands to type next."""

    def samples(self, name: str) -> Samples:
        """Return the samples of the last steps, from all pods that answer in time.

        A job in a cluster has samples only while its worker pods run.

        Returns:
            The samples, and the pods that did not answer.

        Raises:
            NoSamplesError: No pod runs, or no rank has made a step yet.
            AwayError: Worker pods run in the cluster and none of them answers.
        """
