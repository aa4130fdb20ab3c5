"""Choice of the back end for a job's name: a cluster or this machine. `--help` states the rule.

With -n, --context or --kubeconfig it is a cluster. Otherwise a run folder, or the name of a run of
this user, is a job on this machine. Any other name is a job in the kubeconfig's cluster.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline_api.errors import PacelineError

from paceline.cli.output import say
from paceline.jobs import places
from paceline.jobs.errors import AmbiguousJobError, NoSuchJobError
from paceline.jobs.interface import Jobs
from paceline.jobs.local import LocalJobs

if TYPE_CHECKING:
    from paceline.jobs.cluster.jobs import ClusterJobs

RULE: Final = (
    "With -n, --context or --kubeconfig, JOB is a job in that cluster. Otherwise JOB is a run "
    "folder or the name of one of your runs on this machine, those in ./runs first, or else a job "
    "in the kubeconfig's cluster."
)


@dataclass(frozen=True, slots=True)
class Where:
    """The options that name a cluster; all are None if the user gave none of them."""

    namespace: str | None = None
    context: str | None = None
    kubeconfig: Path | None = None

    @property
    def given(self) -> bool:
        """Return True if the user gave one of the options."""
        return any(one is not None for one in (self.namespace, self.context, self.kubeconfig))


def cluster(where: Where) -> ClusterJobs:
    """Return the jobs of the cluster and namespace that the options name."""
    return places.cluster(where.kubeconfig, where.context, where.namespace, say=_say)


def _say(text: str) -> None:
    """Print a message to stderr, apart from the output of the command."""
    say(f"paceline: {text}", to_stderr=True)


def choose(name: str, where: Where) -> Jobs:
    """Return the back end that has the job `name`.

    Args:
        name: Name of a job, or path of a run folder.
        where: Options that name a cluster.

    Returns:
        This machine or a cluster, by the rule of this module.

    Raises:
        NoSuchJobError: There is no such run on this machine, and the cluster cannot be asked.
        PacelineError: The cluster that the options name cannot be used.
    """
    local = LocalJobs()
    if not where.given and local.has(name):
        return local
    try:
        return cluster(where)
    except PacelineError as error:
        if where.given:
            raise
        raise NoSuchJobError(
            f"no job {name} is running here as this user, and no cluster can be asked for it: "
            f"{error.message}",
            hint=f"start one with `paceline run job.yaml`; for a job of a cluster: {error.hint}",
        ) from None


@dataclass(frozen=True, slots=True)
class Meant:
    """The one job that a command changes."""

    jobs: Jobs
    name: str
    """Name for the back end; on this machine the run folder, which is unambiguous."""
    place: str
    """The place as text for a message; on this machine with the run folder."""


def choose_one(name: str, where: Where) -> Meant:
    """Return the one job to change, and ask the user if several runs have that name.

    Args:
        name: Name of a job, or path of a run folder.
        where: Options that name a cluster.

    Returns:
        The job.

    Raises:
        AmbiguousJobError: Several runs have that name, and there is no terminal to ask on, or the
            answer is none of them.
    """
    try:
        jobs = choose(name, where)
    except AmbiguousJobError as error:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        name = _ask(error)
        jobs = choose(name, where)
    if not isinstance(jobs, LocalJobs):
        return Meant(jobs, name, jobs.where)
    folder = jobs.folder(name)
    return Meant(jobs, folder, f"{jobs.where} in {folder}")


def _ask(error: AmbiguousJobError) -> str:
    """Ask the user for one of several run folders; raise `error` if the answer is none."""
    lines = [f"  {number}  {folder}" for number, folder in enumerate(error.folders, 1)]
    say("\n".join(["several jobs of that name are running:", *lines]), to_stderr=True)
    print("which one? ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline().strip()
    if not answer.isdecimal() or not 1 <= int(answer) <= len(error.folders):
        raise error
    return error.folders[int(answer) - 1]
