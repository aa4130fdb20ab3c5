"""`Jobs` of this machine: running jobs of this user by name, and any run by its folder.

A running job is asked through its control socket (`paceline.local.control`). A question can wait
for news there, so no polling is needed. The status of a run that has ended is read from its folder.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from paceline_api.errors import JobFileError
from paceline_api.jobfile import JOB_FILE, JobFile, read_job_file, read_resolved_job
from paceline_api.settings import ResolvedJob
from paceline_api.times import NS_PER_S
from paceline_api.types.job import TrainingJob
from paceline_api.types.template import TRAINER

from paceline.clock import now_ns, wall_s
from paceline.core.anatomy.samples import with_steps
from paceline.jobs.core import explain, from_run
from paceline.jobs.core.lines import parse_line
from paceline.jobs.errors import (
    AmbiguousJobError,
    AwayError,
    NameTakenError,
    NoSamplesError,
    NoSuchJobError,
    NoSuchRankError,
    RejectedError,
    UnreadableRunError,
    WaitTimeoutError,
)
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
from paceline.local import control, detached, index, steps
from paceline.local.rundir import (
    LOCK,
    PRINTED,
    RUNS,
    STATUS,
    WHAT_RUNS,
    LastStatusError,
    check,
    numbered,
    read_last_status,
    with_function,
)
from paceline.private_files import check_folder

Found = TypeVar("Found")
SILENT_TOLD: Final = 3
"""Upper bound on the pods that an error about missing samples lists with a reason."""
_AGENT: Final = re.compile(r"(\S+) (agent-(\d{1,9})-(\d{1,9})) (.*)", re.S)


class LocalJobs:
    """Runs of this user on this machine; implements `Jobs`.

    See `paceline.jobs.interface.Jobs` for the contract of the methods.
    """

    def __init__(self, env: Mapping[str, str] = os.environ, folder: Path = Path()) -> None:
        """Create the back end; nothing is read yet.

        Args:
            env: Environment that says where the notes about running jobs are (XDG_RUNTIME_DIR,
                XDG_STATE_HOME, HOME).
            folder: Folder that contains `runs/`.
        """
        self._env, self._runs = env, folder / RUNS

    @property
    def where(self) -> str:
        """The place as text for a message."""
        return "this machine"

    def has(self, name: str) -> bool:
        """Return True if `name` is a run folder, a running job, or a run below `runs/`.

        Several running jobs with that name raise AmbiguousJobError, and a run folder of another
        user raises ForeignFolderError.

        Args:
            name: Name of a job, or path of a run folder.

        Returns:
            True if the other methods accept this name.
        """
        return self._find_run(name) is not None

    def submit(
        self, job: TrainingJob, *, folder: Path, function: Mapping[str, str] = NOTHING
    ) -> JobStatus:
        """Start a detached `paceline run` and return the status of the new run."""
        name = job.metadata.name
        if any(entry.job == name for entry in index.running(self._env)):
            raise NameTakenError(
                f"a job {name} is already running here",
                hint=f"choose another metadata.name, or `paceline delete {name}` first",
            )
        text = msgspec.json.encode(_placed(job, folder.resolve()))  # JSON is YAML
        words = ["/dev/stdin", "--quiet"]
        if function:
            run_dir = with_function(name, self._runs, function)
            words += ["--run-dir", str(run_dir)]
        try:
            entry = detached.start(words, self._runs.parent, text)
        except detached.NotStartedError as error:
            if function:
                shutil.rmtree(run_dir)
            raise RejectedError(error.message, hint=error.hint) from None
        return self.status(entry.run_dir)

    def all(self) -> list[JobStatus]:
        """Return the running jobs, sorted by name.

        A run that cannot be asked is listed with the state Unknown.

        Returns:
            One status for each running job.
        """
        statuses = []
        for entry in index.running(self._env):
            with suppress(control.EndedError):
                statuses.append(self._running_or_unknown(entry))
        return statuses

    def status(self, name: str) -> JobStatus:
        """Return the current status of a run, or how it ended."""
        run = self._run(name)
        if (entry := run.entry) is not None:
            try:
                return self._running(entry)
            except control.EndedError:
                _until_ended(entry)
        return run.ended()

    def resolved(self, name: str) -> ResolvedJob:
        """Return the settings from the job file of a run, at its current size."""
        job = read_resolved_job(self._run(name).folder / JOB_FILE)
        return replace(job, replicas=self.status(name).replicas or job.replicas)

    def watch(self, name: str) -> Generator[JobStatus]:
        """Yield each new status of a run; the last one says how it ended."""
        run = self._run(name)
        if (entry := run.entry) is not None:
            revision = None
            try:
                while True:
                    view = _asked(partial(control.look, entry, revision))
                    revision = view.revision
                    yield _status_of(view)
            except control.EndedError:
                _until_ended(entry)
        if run.folder.exists():
            yield run.ended()

    def wait(
        self, name: str, until: Until = Until.ENDED, *, timeout_s: float | None = None
    ) -> JobStatus:
        """Block until a run meets a condition, or has ended."""
        run = self._run(name)
        entry, end_ns = run.entry, _end_ns(timeout_s)
        if entry is not None:
            revision: int | None = None
            try:
                while True:
                    view = _asked(partial(control.look, entry, revision, _left_s(end_ns)))
                    revision, status = view.revision, _status_of(view)
                    # The wait ends with the process, which still has to write its summary.
                    if not status.ended and status.meets(until):
                        return status
                    if end_ns is not None and now_ns() >= end_ns:
                        raise WaitTimeoutError(
                            f"job {view.job} is {status.state} after {timeout_s:g} s, and not yet "
                            f"{until}",
                            hint="wait longer with --timeout; `paceline explain` says what it "
                            "waits for",
                        )
            except control.EndedError:
                _until_ended(entry)
        if not run.folder.exists():
            raise NoSuchJobError(
                f"job {name} was deleted while it was waited for", hint="submit it again"
            )
        return run.ended()

    def logs(
        self, name: str, selection: Selection = ALL_LINES, *, follow: bool = False
    ) -> Generator[LogLine]:
        """Yield the lines that the ranks printed, from the file in the run folder."""
        run = self._run(name)
        chosen = _Chosen(selection, run.job_file())
        path = run.folder / PRINTED
        if not path.exists() and run.entry is None:
            return
        try:
            file = path.open("rb")
        except OSError as error:
            raise UnreadableRunError(
                f"{path} cannot be read: {(error.strerror or str(error)).lower()}",
                hint=f"the logs of each process are in {run.folder / 'logs'}",
            ) from None
        with file:
            yield from chosen.until_now(file.read())
            while follow and run.entry is not None:
                try:
                    _asked(partial(control.more_lines, run.entry, file.tell()))
                except control.EndedError:
                    follow = False
                yield from chosen.all(file.read())

    def scale(self, name: str, replicas: int) -> int:
        """Change the number of replicas of a running job; return the one before."""
        return self._changed(name, partial(control.scale, replicas=replicas)).before

    def suspend(self, name: str) -> None:
        """Stop a running job after a checkpoint, and keep its `paceline run` alive."""
        self._changed(name, partial(control.suspend, suspend=True))

    def resume(self, name: str) -> None:
        """Start the replicas of a suspended run again."""
        self._changed(name, partial(control.suspend, suspend=False))

    def delete(self, name: str, *, wait_s: float = 0.0) -> None:
        """End a run and remove its folder."""
        run = self._run(name)
        if (entry := run.entry) is not None:
            try:
                _asked(partial(control.end, entry))
            except control.EndedError:
                _until_ended(entry)
            else:
                if wait_s and not _until_ended(entry, wait_s):
                    raise WaitTimeoutError(
                        f"job {entry.job} is ending, and has not ended after {wait_s:g} s",
                        hint="wait longer with --timeout",
                    )
                return
        shutil.rmtree(run.folder)

    def events(self, name: str) -> list[JobEvent]:
        """Return the history of a run, as its coordinator recorded it."""
        return from_run.events(self.status(name).detail)

    def explain(self, name: str) -> Explanation:
        """Return why a run is slow or does not start, and what to type next."""
        status = self.status(name)
        return explain.explain(status, from_run.events(status.detail), flags="", cluster=False)

    def samples(self, name: str) -> Samples:
        """Return the samples of the last steps, from the agents or the run folder."""
        run = self._run(name)
        pods, silent = steps.of_run(run.folder)
        if not (known := with_steps(pods)):
            without = "".join(f"; {one.pod}: {one.why}" for one in silent[:SILENT_TOLD])
            raise NoSamplesError(
                f"no steps are known of the run in {run.folder}{without}",
                hint="ask again when it has made some; "
                f"`paceline explain {shlex.quote(name)}` says what it waits for",
            )
        return Samples(known, tuple(silent), str(run.folder))

    # ---- which run -------------------------------------------------------------------------

    def _run(self, name: str) -> _Run:
        if (run := self._find_run(name)) is not None:
            return run
        others = ", ".join(entry.job for entry in index.running(self._env)) or "none"
        raise NoSuchJobError(
            f"no job {name} is running here as this user",
            hint=f"running jobs: {others}; start one with `paceline run job.yaml`",
        )

    def _find_run(self, name: str) -> _Run | None:
        """Return the run that `name` refers to; None if there is none.

        A run folder comes first. Then comes a running job below `runs/` of this folder, then the
        latest run of that name below `runs/`, then a job that runs elsewhere. A run folder of
        another user raises ForeignFolderError.

        Args:
            name: Name of a job, or path of a run folder.

        Returns:
            The run.

        Raises:
            AmbiguousJobError: Several running jobs have that name.
        """
        folder = Path(name)
        if (folder / LOCK).is_file():
            return _Run(check(folder).resolve(), index.of_run_dir(folder))
        named = [entry for entry in index.running(self._env) if entry.job == name]
        own = self._runs.resolve()
        here = [entry for entry in named if Path(entry.run_dir).resolve().parent == own]
        if not here:
            runs = numbered(name, self._runs)
            earlier = [number for number, path in runs.items() if (path / LOCK).is_file()]
            if earlier:
                check_folder(self._runs, WHAT_RUNS)
                latest = check(runs[max(earlier)])
                return _Run(latest.resolve(), index.of_run_dir(latest))
        fit = here or named
        if len(fit) > 1:
            raise AmbiguousJobError(name, tuple(entry.run_dir for entry in fit))
        return _Run(Path(fit[0].run_dir), fit[0]) if fit else None

    def folder(self, name: str) -> str:
        """Return the path of the run folder that `name` refers to.

        An unknown name raises NoSuchJobError, and a name of several running jobs raises
        AmbiguousJobError.

        Args:
            name: Name of a job, or path of a run folder.

        Returns:
            The absolute path.
        """
        return str(self._run(name).folder)

    def _changed(self, name: str, change: Callable[[index.RunEntry], Found]) -> Found:
        """Send a change to a running job and return its answer.

        Args:
            name: Name of a job, or path of a run folder.
            change: Sends the request to the runner.

        Returns:
            The answer of the runner.

        Raises:
            NoSuchJobError: The run has ended.
        """
        run = self._run(name)
        try:
            if run.entry is not None:
                return _asked(partial(change, run.entry))
        except control.EndedError:
            pass
        others = [
            entry.run_dir
            for entry in index.running(self._env)
            if entry.job == run.name() and entry.run_dir != str(run.folder)
        ]
        hint = f"another one of that name runs in {', '.join(others)}: name its folder"
        raise NoSuchJobError(
            f"the run in {run.folder} has ended",
            hint=hint if others else "paceline status shows how",
        )

    def _running(self, entry: index.RunEntry) -> JobStatus:
        return _status_of(_asked(partial(control.look, entry)))

    def _running_or_unknown(self, entry: index.RunEntry) -> JobStatus:
        try:
            return self._running(entry)
        except AwayError as error:
            return from_run.unknown(entry.job, entry.run_dir, why=error.message, hint=error.hint)


class _Run:
    """One run, by its folder; `entry` is None if the run has ended."""

    def __init__(self, folder: Path, entry: index.RunEntry | None) -> None:
        self.folder, self.entry = folder, entry

    def ended(self) -> JobStatus:
        """Return how the run ended; raise NoSuchJobError if its folder was deleted meanwhile."""
        folder = str(self.folder)
        try:
            age_s = wall_s() - (self.folder / LOCK).stat().st_mtime
        except OSError:
            raise NoSuchJobError(
                f"the run in {folder} was deleted just now", hint="submit it again"
            ) from None
        try:
            status = read_last_status(self.folder)
            if status.outcome is None:
                raise LastStatusError(self.folder / STATUS, "has no outcome")
        except FileNotFoundError:
            return from_run.lost(self.name(), folder, age_s)
        except LastStatusError as error:
            return from_run.end_unknown(
                self.name(), folder, age_s, why=error.message, hint=error.hint
            )
        return from_run.ended(folder, status, status.outcome, age_s)

    def job_file(self) -> JobFile | None:
        """Return the job file of the run; None if the run was not able to write it."""
        try:
            return read_job_file(self.folder / JOB_FILE)
        except JobFileError:
            return None

    def name(self) -> str:
        """Return the name of the job: that of the folder without its number."""
        return re.sub(r"-\d+$", "", self.folder.name)


class _Chosen:
    """Filter that returns the selected lines of a file of printed lines."""

    def __init__(self, selection: Selection, job: JobFile | None) -> None:
        """Create the filter; `job` says how many ranks each replica has."""
        self._selection = selection
        self._procs = job.procs if job is not None else 1
        self._replicas = job.replicas if job is not None else 1
        self._rest = b""

    def until_now(self, data: bytes) -> list[LogLine]:
        """Return the selected lines of the part that existed when reading began.

        Args:
            data: Content of the file from its beginning. An incomplete last line is kept for `all`.

        Returns:
            The lines in the order of the file, at most `tail` of each replica.
        """
        lines = list(self._parsed(data))
        self._check(lines)
        if not self._selection.previous:
            newest: dict[str, int] = {}
            for slot, attempt, _ in lines:
                newest[slot] = max(newest.get(slot, 0), attempt)
            lines = [one for one in lines if one[1] == newest[one[0]]]
        meant = [line for _, _, line in lines if self._is_meant(line)]
        return meant if self._selection.tail is None else self._last(meant, self._selection.tail)

    def all(self, data: bytes) -> Iterator[LogLine]:
        """Yield the selected lines of a further part of the file."""
        return (line for _, _, line in self._parsed(data) if self._is_meant(line))

    def _parsed(self, data: bytes) -> Iterator[tuple[str, int, LogLine]]:
        """Yield (slot, attempt, line) for each complete line; keep an incomplete one."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        for raw in whole:
            if (match := _AGENT.fullmatch(raw.decode(errors="replace"))) is None:
                continue
            at, agent, slot, attempt, text = match.groups()
            line = parse_line(f"{at} {text}", source=agent, procs=self._procs)
            if line is not None:
                yield slot, int(attempt), line

    def _is_meant(self, line: LogLine) -> bool:
        return self._selection.rank in (None, line.rank)

    @staticmethod
    def _last(lines: list[LogLine], count: int) -> list[LogLine]:
        """Return at most the last `count` lines of each replica, in their order."""
        kept: dict[str, deque[int]] = {}
        for number, line in enumerate(lines):
            kept.setdefault(line.source, deque(maxlen=count)).append(number)
        return [lines[number] for number in sorted(n for own in kept.values() for n in own)]

    def _check(self, lines: list[tuple[str, int, LogLine]]) -> None:
        """Raise NoSuchRankError if the selected rank does not exist.

        A replica that joined later counts once it has printed a line.

        Args:
            lines: All lines printed so far.

        Raises:
            NoSuchRankError: The rank number is negative or beyond the ranks of the job.
        """
        rank = self._selection.rank
        counts = [line.rank + 1 for _, _, line in lines if line.rank is not None]
        ranks = max([self._replicas * self._procs, *counts])
        if rank is not None and not 0 <= rank < ranks:
            raise NoSuchRankError(
                f"the job has no rank {rank}",
                hint=f"use 0 to {ranks - 1}: slot x procsPerReplica + process, as the table of "
                "`paceline status` shows it",
            )


def _placed(job: TrainingJob, folder: Path) -> dict[str, Any]:
    """Return the job as a mapping with its relative paths made absolute below `folder`."""
    manifest = job.to_mapping()
    if checkpoint := manifest["spec"].get("checkpoint"):
        checkpoint["path"] = str(folder / checkpoint["path"])
    for container in manifest["spec"]["template"]["spec"]["containers"]:
        if container["name"] == TRAINER:
            container["workingDir"] = str(folder / container.get("workingDir", "."))
    return manifest


def _asked(ask: Callable[[], Found]) -> Found:
    """Call `ask` and translate the errors of the control socket.

    Args:
        ask: Sends one request to a runner.

    Returns:
        The answer of the runner.

    Raises:
        control.EndedError: The run has ended; the caller then reads its folder.
        RejectedError: The runner rejects the request.
        AwayError: The runner does not answer.
    """
    try:
        return ask()
    except control.EndedError:
        raise
    except control.ControlRefusedError as error:
        raise RejectedError(error.message, hint=error.hint) from None
    except control.ControlError as error:
        raise AwayError(error.message, hint=error.hint) from None


def _status_of(view: control.View) -> JobStatus:
    return from_run.running(
        view.job,
        view.run_dir,
        view.status,
        replicas=view.replicas,
        suspended=view.suspended,
        rounds_per_s_now=view.rounds_per_s_now,
        left_s=view.left_s,
        age_s=max(0.0, wall_s() - view.started_wall_s),
    )


def _end_ns(timeout_s: float | None) -> int | None:
    return None if timeout_s is None else now_ns() + round(timeout_s * NS_PER_S)


def _left_s(end_ns: int | None) -> float:
    left_s = control.WAIT_S if end_ns is None else (end_ns - now_ns()) / NS_PER_S
    return min(control.WAIT_S, max(0.0, left_s))


def _until_ended(entry: index.RunEntry, timeout_s: float = 60.0) -> bool:
    """Wait until the process of a run is gone, at most `timeout_s` seconds.

    A run writes its summary after it has closed its control socket, so its end is that of the
    process.

    Args:
        entry: The run.
        timeout_s: Upper bound on the wait in seconds.

    Returns:
        True if the process is gone.
    """
    try:
        pidfd = os.pidfd_open(entry.pid)
    except OSError:
        return True
    try:
        waiting_for = select.poll()
        waiting_for.register(pidfd, select.POLLIN)
        return bool(waiting_for.poll(timeout_s * 1000))
    finally:
        os.close(pidfd)
