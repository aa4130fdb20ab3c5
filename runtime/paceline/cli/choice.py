"""Which jobs are meant: a cluster's, or this machine's. One rule, which `--help` states.

With -n, --context or --kubeconfig a cluster. Else what is a run folder, or the name of a run of
this user, is of this machine. Else the cluster of the kubeconfig.
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
    "JOB is looked for in a cluster with -n, --context or --kubeconfig. Without them it is a run "
    "of this machine if it is a run folder or the name of one of your runs, those in ./runs first, "
    "and else a job of the kubeconfig's cluster."
)


@dataclass(frozen=True, slots=True)
class Where:
    """The options that name a cluster."""

    namespace: str | None = None
    context: str | None = None
    kubeconfig: Path | None = None

    @property
    def given(self) -> bool:
        return any(one is not None for one in (self.namespace, self.context, self.kubeconfig))


def cluster(where: Where) -> ClusterJobs:
    return places.cluster(where.kubeconfig, where.context, where.namespace, say=_say)


def _say(text: str) -> None:
    """Beside what the verb prints."""
    say(f"paceline: {text}", to_stderr=True)


def choose(name: str, where: Where) -> Jobs:
    """The jobs among which `name` is looked for."""
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
    """The one job that a verb changes."""

    jobs: Jobs
    name: str
    """What it is called there: on this machine its run folder, so that it is that run for sure."""
    place: str
    """In words, for a message; on this machine with its folder."""


def choose_one(name: str, where: Where) -> Meant:
    """The job that is to be changed. Asks on a terminal if several runs have that name; without
    one, raises AmbiguousJobError, which lists them."""
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
    """The folder that is chosen. Raises the error if none is."""
    lines = [f"  {number}  {folder}" for number, folder in enumerate(error.folders, 1)]
    say("\n".join(["several jobs of that name are running:", *lines]), to_stderr=True)
    print("which one? ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline().strip()
    if not answer.isdecimal() or not 1 <= int(answer) <= len(error.folders):
        raise error
    return error.folders[int(answer) - 1]
