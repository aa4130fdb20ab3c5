"""`paceline run`: runs one job on this machine, from the job file to the exit code."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from paceline_api.errors import EXIT_FAILURE, SpecError
from paceline_api.resolve import resolve
from paceline_api.rules.launchers import LAUNCH_MODULE, launched_script
from paceline_api.settings import ResolvedJob

from paceline.cli.output import Format, print_data, say
from paceline.cli.program import (
    SIZES,
    Program,
    UnrunnableScriptError,
    misread_options,
    misread_values,
)
from paceline.cli.runtimes import check_whole, runtime_of
from paceline.cli.screen import Screen
from paceline.core.faults import SEPARATOR, Fault, FaultError, FaultKind, check_ranks, parse_faults
from paceline.jobs.local import LocalJobs
from paceline.local import checkpoint_folder, detached, index
from paceline.local.report import summary, verdict
from paceline.local.room import (
    MachineLimits,
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
"""Exit code of a program that Ctrl-C ended, as a shell reports it."""


LAUNCH_HERE: Final = (sys.executable, "-m", LAUNCH_MODULE)
"""Beginning of the command of a rank: this Python, as torchrun does, and not the one in PATH."""
COUNT: Final = (
    "import sys; from torch.distributed.run import determine_local_world_size as count; "
    "print(count(sys.argv[1]))"
)
"""Program that counts as torchrun does."""
COUNT_S: Final = 120
HERE: Final = "none"
"""Image of the job of a script on this machine, where images have no meaning."""
LATE_SIZES: Final = (*SIZES, "--procs")
"""Options that are easily written among the script's instead of before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The arguments of `paceline run`."""

    program: Program = field(kw_only=False)
    nodes: str = "1"
    """Number of machines, as of torchrun."""
    is_size_given: bool = False
    """True if the user has chosen a number of replicas."""
    overrides: Sequence[str]
    inject: Sequence[str]
    run_dir: Path | None
    quiet: bool
    record: bool
    raw: bool = False
    output: Format | None = None
    runtime: Path | None = None
    """File of the runtime."""

    def words(self) -> list[str]:
        """Return the arguments as words of a command line."""
        words = [word for override in self.overrides for word in ("--set", override)]
        words += [word for fault in self.inject for word in ("--inject", fault)]
        words += [] if self.run_dir is None else ["--run-dir", str(self.run_dir)]
        words += [] if self.runtime is None else ["--runtime", str(self.runtime)]
        words += ["--quiet"] * self.quiet + ["--record"] * self.record
        return words + self.program.words()


def replicas_of(size: str, replicas: int | None, procs: int | None) -> int:
    """Return the number of replicas for torchrun's `--nproc-per-node`.

    Args:
        size: Its value: a number, or what torchrun counts on this machine.
        replicas: Value of --replicas, which means the same.
        procs: Value of --procs.

    Returns:
        A number, at least 1.

    Raises:
        UnrunnableScriptError: The value has no meaning here.
    """
    if replicas is not None:
        raise UnrunnableScriptError(
            f"--replicas {replicas} and --nproc-per-node {size} are both the number of replicas",
            hint="leave out one of them",
        )
    if procs is not None and not size.isdecimal():
        raise UnrunnableScriptError(
            f"--nproc-per-node {size} counts ranks, and --procs {procs} makes several of each",
            hint=f"give the number of replicas, each of {procs} ranks: --replicas N",
        )
    try:
        count = int(size)
    except ValueError:
        count = _counted_by_torch(size)
    if count < 1:
        raise UnrunnableScriptError(
            f"--nproc-per-node {size} is {count} ranks", hint="give 1 or a larger number"
        )
    return count


def _counted_by_torch(size: str) -> int:
    """Return what torchrun counts on this machine: its GPUs, its CPUs, or what there is.

    Raises:
        UnrunnableScriptError: The word has no meaning for torch, or there is no such device.
    """
    hint = "give the number of ranks; `auto` takes the CPUs if there is no GPU"
    try:
        # In a process of its own: this one runs without torch, and begins within a second.
        done = subprocess.run(
            [sys.executable, "-c", COUNT, size],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COUNT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnrunnableScriptError(
            f"--nproc-per-node {size}: torch has not counted within {COUNT_S} s", hint=hint
        ) from None
    if done.returncode == 0:
        return int(done.stdout.split()[-1])
    why = done.stderr.strip().rpartition("\n")[2].removeprefix("ValueError: ")
    if why.startswith("Unsupported nproc_per_node"):
        message = f"--nproc-per-node {size} is no number, and none of gpu, xpu, cpu and auto"
    else:
        message = f"--nproc-per-node {size}: torch does not find them on this machine: {why}"
    raise UnrunnableScriptError(message, hint=hint)


def detach(order: Order) -> int:
    """Start the run as a detached process; return the exit code 0 once it is running."""
    # Nobody watches the output, so it needs neither a table nor lines.
    _check_nodes(order)
    _warn_of_words(order)
    entry = detached.start(replace(order, quiet=True).words(), Path())
    if order.output is not None:
        print_data(LocalJobs().status(entry.run_dir), order.output)
    else:
        say(f"job {entry.job} runs as process {entry.pid}, logs in {entry.run_dir}")
    return 0


def run(order: Order, *, ready_fd: int | None = None) -> int:
    """Run a job in the foreground.

    Everything is checked before the first process starts; a failed check raises PacelineError.

    Args:
        order: The arguments of the command.
        ready_fd: File descriptor of the process that started this one without a terminal
            (`local.detached`); it is written to when the run can be asked. None otherwise.

    Returns:
        The exit code.

    Raises:
        SpecError: The job is suspended by its spec, or --record does not support it.
    """
    _check_nodes(order)
    program, base = order.program, order.program.folder
    runtime = runtime_of(order.runtime)
    image = HERE if runtime is None else ""
    whole = program.job(LAUNCH_HERE, order.overrides, image=image, runtime=runtime)
    check_whole(whole)
    job = _beside(resolve(whole), base)
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
    if order.record and launched_script(job.trainer.command):
        raise SpecError(
            "spec.template.spec.containers[trainer].command",
            "paceline launch",
            "does not go with --record: a replay knows the rounds of Paceline's own optimizer only",
            hint="leave --record out",
        )
    faults = tuple(parse_faults(SEPARATOR.join(order.inject)))
    replicas = _check_faults(job, faults)
    check_room(job, replicas, MachineLimits.of_this_machine())
    check_shared_memory(job, replicas, shared_memory_bytes())
    working_dir = working_dir_of(job, base)
    check_script(job.trainer.command, working_dir)
    check_loopback()
    if ready_fd is None:
        _warn_of_words(order)
    with checkpoint_folder.locked(Path(job.checkpoint.path) if job.checkpoint else None):
        folder = make_run_dir(job.name, order.run_dir)
        result = asyncio.run(_run(job, folder, working_dir, faults, order, ready_fd))
    if order.output is not None:
        print_data(LocalJobs().status(str(folder)), order.output)
    if result.removed:
        shutil.rmtree(folder, ignore_errors=True)
    return _exit_code(result)


def _check_nodes(order: Order) -> None:
    """Check that the command line asks for this machine only.

    Raises:
        UnrunnableScriptError: It asks for more machines.
    """
    if order.nodes not in ("1", "1:1"):
        raise UnrunnableScriptError(
            f"--nnodes {order.nodes}: `paceline run` runs a job on one machine",
            hint="leave it out; `paceline submit` runs a job in a cluster, and "
            "docs/how-to/several-machines.md says what else there is",
        )


def _warn_of_words(order: Order) -> None:
    """Warn of options of Paceline that a script gets, since they stand after it.

    Args:
        order: The arguments of the command.
    """
    _warn_of_one_rank(order)
    _warn_of_misread_values(order)


def _warn_of_one_rank(order: Order) -> None:
    """Tell a user whose script has one rank how to start more.

    Args:
        order: The arguments of the command.
    """
    program = order.program
    chosen = any("replicas" in change.lower() for change in order.overrides)
    if order.is_size_given or chosen or not program.is_script:
        return
    if misread := misread_options(program, LATE_SIZES):
        say(
            f"warning: {misread[0]} stands after {program.file}, so the script gets it\n"
            f"hint: options of Paceline come before the script: paceline run {misread[0]} ... "
            f"{program.file}",
            to_stderr=True,
        )
    elif not order.quiet:
        say(
            "hint: one rank, as torchrun without options; --replicas N before the script for more",
            to_stderr=True,
        )


def _warn_of_misread_values(order: Order) -> None:
    """Warn of a mode, a fault or a field after a script, which the job would run without.

    Args:
        order: The arguments of the command.
    """
    program = order.program
    if not program.is_script:
        return
    for option, value in misread_values(program):
        if any(f"collective.{option[2:]}=" in change for change in order.overrides):
            continue  # given before the script, too
        say(
            f"warning: {option} {value} stands after {program.file}, so the script gets it, and "
            f"the job runs without it\n"
            f"hint: options of Paceline come before the script: paceline run {option} {value} "
            f"{program.file}",
            to_stderr=True,
        )


async def _run(
    job: ResolvedJob,
    folder: Path,
    working_dir: Path,
    faults: tuple[Fault, ...],
    order: Order,
    ready_fd: int | None,
) -> RunResult:
    def listening(entry: index.RunEntry) -> None:
        if ready_fd is not None:
            detached.listening(ready_fd, entry)

    loop = asyncio.get_running_loop()
    screen = Screen(quiet=order.quiet, raw=order.raw, data=order.output is not None)
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
    """Check that the faults fit the job.

    Args:
        job: The job.
        faults: The faults to inject.

    Returns:
        The number of replicas, including those that join through a fault.

    Raises:
        FaultError: More replicas would join than `maxReplicas` allows.
    """
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


def _beside(job: ResolvedJob, base: Path) -> ResolvedJob:
    """Return the job with relative paths of spec.checkpoint and spec.logging made absolute.

    A second run of the same file then finds the checkpoints of the first one.

    Args:
        job: The job.
        base: Folder of its job file, or the folder in which its script was started.

    Returns:
        The job.
    """
    if job.tensor_board:
        job = replace(job, tensor_board=str((base / job.tensor_board).resolve()))
    if job.checkpoint is None:
        return job
    path = (base / job.checkpoint.path).resolve()
    return replace(job, checkpoint=replace(job.checkpoint, path=str(path)))


def working_dir_of(job: ResolvedJob, base: Path) -> Path:
    """Return the folder in which the ranks run on this machine.

    Args:
        job: The job.
        base: Folder of its job file, or the folder in which its script was started.

    Returns:
        The container's workingDir, resolved against `base`, which is the default.

    Raises:
        SpecError: There is no such folder.
    """
    given = job.trainer.working_dir
    folder = (base / (given or ".")).resolve()
    if not folder.is_dir():
        raise SpecError(
            "spec.template.spec.containers[trainer].workingDir",
            given,
            "is not a folder on this machine",
            hint="on a laptop it is relative to the job file; leave it out for that file's folder",
        )
    return folder
