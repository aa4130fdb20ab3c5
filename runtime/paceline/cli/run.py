"""`paceline run`: one job on this machine, from its file to the exit code."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from paceline_api.errors import EXIT_FAILURE, SpecError
from paceline_api.reading.load import load_job
from paceline_api.resolve import resolve
from paceline_api.settings import ResolvedJob

from paceline.cli.output import say
from paceline.cli.screen import Screen
from paceline.core.faults import SEPARATOR, Fault, FaultError, FaultKind, check_ranks, parse_faults
from paceline.local import checkpoint_folder, detached, index
from paceline.local.report import summary, verdict
from paceline.local.room import (
    Room,
    check_loopback,
    check_room,
    check_shared_memory,
    shared_memory_bytes,
)
from paceline.local.rundir import make_run_dir
from paceline.local.runner import Runner, RunResult
from paceline.local.script import check_script
from paceline.signals import on_request_to_end

EXIT_INTERRUPTED: Final = 130
"""As a shell reports a program that Ctrl-C ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What was asked for on the command line."""

    file: Path = field(kw_only=False)
    replicas: int | None
    overrides: Sequence[str]
    inject: Sequence[str]
    run_dir: Path | None
    quiet: bool
    record: bool
    raw: bool = False

    def words(self) -> list[str]:
        """The same on a command line."""
        words = [str(self.file)]
        words += [] if self.replicas is None else ["--replicas", str(self.replicas)]
        words += [word for override in self.overrides for word in ("--set", override)]
        words += [word for fault in self.inject for word in ("--inject", fault)]
        words += [] if self.run_dir is None else ["--run-dir", str(self.run_dir)]
        return words + ["--quiet"] * self.quiet + ["--record"] * self.record


def detach(order: Order) -> int:
    """Run it as a process of its own; the exit code."""
    # A table, or a line of it each second, is for somebody who looks on.
    entry = detached.start(replace(order, quiet=True).words(), Path())
    say(f"job {entry.job} runs as process {entry.pid}, logs in {entry.run_dir}")
    return 0


def run(order: Order, *, ready_fd: int | None = None) -> int:
    """The exit code. Raises PacelineError before anything is started. `ready_fd`: of whoever has
    started this without a terminal (`local.detached`)."""
    file, overrides, run_dir = order.file, order.overrides, order.run_dir
    if order.replicas is not None:
        overrides = [*overrides, f"spec.replicas={order.replicas}"]
    job = _beside_file(resolve(load_job(file, overrides)), file)
    if job.suspend:
        raise SpecError(
            "spec.suspend",
            value=True,
            problem="keeps the job from starting",
            hint="paceline run --set spec.suspend=false",
        )
    if order.record and job.model > 1:
        raise SpecError(
            "spec.parallelism.model",
            job.model,
            "does not go with --record: a replay computes each rank alone",
            hint="leave --record out",
        )
    faults = tuple(parse_faults(SEPARATOR.join(order.inject)))
    replicas = _check_faults(job, faults)
    check_room(job, replicas, Room.of_this_machine())
    check_shared_memory(job, replicas, shared_memory_bytes())
    working_dir = working_dir_of(job, file)
    check_script(job.trainer.command, working_dir)
    check_loopback()
    with checkpoint_folder.locked(Path(job.checkpoint.path) if job.checkpoint else None):
        folder = make_run_dir(job.name, run_dir)
        result = asyncio.run(_run(job, folder, working_dir, faults, order, ready_fd))
    if result.removed:
        shutil.rmtree(folder, ignore_errors=True)
    return _exit_code(result)


async def _run(
    job: ResolvedJob,
    folder: Path,
    working_dir: Path,
    faults: tuple[Fault, ...],
    order: Order,
    ready_fd: int | None,
) -> RunResult:
    def listening(entry: index.Entry) -> None:
        if ready_fd is not None:
            detached.listening(ready_fd, entry)

    loop = asyncio.get_running_loop()
    screen = Screen(quiet=order.quiet, raw=order.raw)
    async with screen:
        runner = Runner(
            job,
            run_dir=folder,
            working_dir=working_dir,
            faults=faults,
            show=screen.show,
            say=screen.say,
            on_line=screen.on_line,
            record=order.record,
            on_listen=listening,
        )
        on_request_to_end(loop, runner.signalled)
        kind = "ranks" if job.model == 1 else f"groups of {job.model} ranks"
        ranks = f"{job.replicas} x {job.procs_per_replica} {kind}"
        screen.say(f"job {job.name}: {ranks}, mode {job.collective.mode}, logs in {folder}")
        if job.trainer.env_from_cluster:
            names = ", ".join(job.trainer.env_from_cluster)
            screen.say(f"warning: only a cluster can fill in {names}; left out here")
        result = await runner.run()
    _tell(job, folder, result, screen)
    return result


def _tell(job: ResolvedJob, folder: Path, result: RunResult, screen: Screen) -> None:
    outcome = result.outcome
    screen.say(verdict(job.name, outcome, interrupted=result.interrupted))
    for line in summary(result.status, result.timeline):
        screen.write(line)
    if result.left_over and not result.interrupted:
        screen.write(f"  processes that had to be killed at the end: {result.left_over}")
    screen.write(f"  logs                 {folder}")
    if not outcome.complete:
        screen.write(f"error: {outcome.message}")
        if outcome.hint:
            screen.write(f"hint: {outcome.hint}")


def _exit_code(result: RunResult) -> int:
    if result.interrupted:
        return EXIT_INTERRUPTED
    return 0 if result.outcome.complete else EXIT_FAILURE


def _check_faults(job: ResolvedJob, faults: tuple[Fault, ...]) -> int:
    """How many replicas there will be with those that join."""
    joined = sum(fault.count for fault in faults if fault.kind is FaultKind.JOIN)
    most = job.replicas + joined
    if joined and job.max_replicas is not None and most > job.max_replicas:
        raise FaultError(
            "join",
            f"{most} replicas would be more than spec.maxReplicas = {job.max_replicas}",
            hint=f"allow more with --set spec.maxReplicas={most}",
        )
    check_ranks(faults, most * job.procs_per_replica)
    return most


def _beside_file(job: ResolvedJob, file: Path) -> ResolvedJob:
    """A relative spec.checkpoint.path begins at the job file, so that a second run finds it."""
    if job.checkpoint is None:
        return job
    path = (file.parent / job.checkpoint.path).resolve()
    return replace(job, checkpoint=replace(job.checkpoint, path=str(path)))


def working_dir_of(job: ResolvedJob, file: Path) -> Path:
    """Of the ranks on this machine: the container's; relative to the job file, whose folder is also
    the default."""
    given = job.trainer.working_dir
    folder = (file.parent / (given or ".")).resolve()
    if not folder.is_dir():
        raise SpecError(
            "spec.template.spec.containers[trainer].workingDir",
            given,
            "is no folder on this machine",
            hint="on a laptop it is relative to the job file; leave it out for that file's folder",
        )
    return folder
