"""`paceline replay`: repeat a recorded run in one process and compare the weights (I15)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from paceline_api.bounded import read_file
from paceline_api.decoding import UNDECODABLE
from paceline_api.errors import EXIT_BAD_INPUT, EXIT_FAILURE, JobFileError, PacelineError
from paceline_api.jobfile import JOB_FILE, JobFile, read_job_file
from paceline_api.types.enums import Wire

from paceline import private_files
from paceline.agent.launch import expand
from paceline.core.replay.sequence import RESULT, ReplayResult
from paceline.environment import ENV_REPLAY, PREFIX
from paceline.local.rundir import check
from paceline.worker.journals import not_replayable, read_journals

SAID: Final = "replay.log"
"""File in the run folder for the traceback of a script that failed in the replay."""
TRACEBACK: Final = "Traceback (most recent call last)"
EXPLAINED: Final = "error: "
"""Beginning of an error that the script explains by itself, without a traceback."""
TELLS: Final = (TRACEBACK, "hint:")
"""Beginnings of lines that do not say which error it was."""
STDERR: Final = 2
RESULT_BYTES_MAX: Final = 64 * 1024
LEFT_S: Final = 5.0
"""Upper bound in seconds on the wait for processes that the script has left behind and that keep
its stderr open."""


def replay(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run made with --record.")],
) -> int:
    """Run a recorded job again in one process and compare the weights."""
    try:
        run_dir = check(run_dir).resolve()
        spec = read_job_file(run_dir / JOB_FILE)
    except (JobFileError, FileNotFoundError) as error:
        why = error.message if isinstance(error, JobFileError) else "there is no such folder"
        raise PacelineError(
            f"{run_dir} is not a run folder: {why}",
            hint="name the folder of a run that was made with `paceline run --record`",
            exit_code=EXIT_BAD_INPUT,
        ) from None
    if spec.wire is not Wire.FLOAT32:
        raise not_replayable(run_dir, spec.wire)
    read_journals(run_dir)  # report missing journals before the script imports torch
    (run_dir / RESULT).unlink(missing_ok=True)
    env = _environment(spec) | {ENV_REPLAY: str(run_dir)}
    command = [expand(part, env) for part in spec.command]
    folder = Path(spec.working_dir or ".")
    if not folder.is_dir():
        raise PacelineError(
            f"{folder}, in which the ranks of the run were started, is not a folder any more",
            hint="replay with the files and the environment of the run",
        )
    code, fault = _run(command, env, folder, run_dir / SAID)
    if code or not (run_dir / RESULT).exists():
        if not fault.startswith(EXPLAINED):  # otherwise the error was printed already
            print(f"error: the replay of {run_dir} did not come to its end{fault}", file=sys.stderr)
        return EXIT_FAILURE
    return _tell(_read_result(run_dir / RESULT))


def _run(command: list[str], env: dict[str, str], folder: Path, log: Path) -> tuple[int, str]:
    """Run the script of the replay, and collect the error that ended it.

    A traceback is written to `log` instead of the terminal. All other output is passed on at once.

    Args:
        command: The command of a rank.
        env: Its environment.
        folder: Its working folder.
        log: File for the traceback.

    Returns:
        The script's exit code, and the error as text; empty if the script printed none.

    Raises:
        PacelineError: The command cannot be started.
    """
    log.unlink(missing_ok=True)
    explained: list[bytes] = []
    held: list[bytes] = []
    with _stderr_read(explained, held):
        try:
            code = subprocess.run(command, env=env, cwd=str(folder), check=False).returncode
        except OSError as error:
            raise PacelineError(f"{command[0]}: {error.strerror}") from None
    if not code or not held:
        os.write(STDERR, b"".join(held))
        return code, explained[-1].decode(errors="replace") if explained else ""
    private_files.write(log, b"".join(held))
    lines = [line.decode(errors="replace") for line in held]
    printed = [
        line.strip() for line in lines if line.strip() and not line.startswith((" ", *TELLS))
    ]
    last = f": {printed[-1]}" if printed else ""
    return code, (
        f"{last}\nhint: run it with the arguments, files and environment of the run; the traceback "
        f"is in {log}"
    )


@contextmanager
def _stderr_read(explained: list[bytes], held: list[bytes]) -> Iterator[None]:
    """Redirect the stderr of this process and its children through a thread.

    Lines up to the first traceback are passed on to the real stderr. Lines from there on are
    collected in `held`.

    Args:
        explained: Receives the lines that were passed on and begin with "error: ".
        held: Receives the lines of the traceback and all after it.

    Yields:
        None; stderr is redirected inside the block.
    """
    outer = os.dup(STDERR)
    reading, writing = os.pipe()
    os.dup2(writing, STDERR)
    os.close(writing)

    def pass_on() -> None:
        with os.fdopen(reading, "rb") as lines:
            for line in lines:
                if held or line.startswith(TRACEBACK.encode()):
                    held.append(line)
                    continue
                if line.startswith(EXPLAINED.encode()):
                    explained.append(line)
                os.write(outer, line)

    reader = threading.Thread(target=pass_on, name="paceline-stderr", daemon=True)
    reader.start()
    try:
        yield
    finally:
        os.dup2(outer, STDERR)
        reader.join(LEFT_S)
        if not reader.is_alive():
            os.close(outer)


def _environment(spec: JobFile) -> dict[str, str]:
    """Return the environment of a rank that belongs to no job."""
    outer = {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)}
    own_bin = str(Path(sys.executable).parent)
    env = outer | {"LOCAL_RANK": "0"}
    env["PATH"] = os.pathsep.join([own_bin, outer.get("PATH", os.defpath)])
    env.setdefault("OMP_NUM_THREADS", "1")
    for name, text in spec.env:
        env[name] = expand(text, env)
    return env


def _read_result(path: Path) -> ReplayResult:
    """Return the result that a process of the script wrote; raise PacelineError if damaged."""
    try:
        return msgspec.json.decode(read_file(path, RESULT_BYTES_MAX), type=ReplayResult)
    except (OSError, *UNDECODABLE) as error:
        raise PacelineError(
            f"{path} does not hold the result of a replay: {error}",
            hint="see that the script does not write to the run folder, and replay it again",
        ) from None


def _tell(result: ReplayResult) -> int:
    print(
        f"replayed {result.rounds} rounds with {result.contributions} contributions of "
        f"{result.ranks} ranks"
    )
    if result.recorded == result.replayed:
        print(f"same: the state of version {result.version} has hash {result.replayed} again")
        return 0
    print(
        f"error: the state of version {result.version} has hash {result.replayed}; in the run it "
        f"was {result.recorded}",
        file=sys.stderr,
    )
    if result.differs_at is not None:
        print(f"  the weights differ from version {result.differs_at} on", file=sys.stderr)
    print(
        "hint: a gradient must depend on weights and batch alone; dropout, random augmentation "
        "and anything that asks for the rank differ from rank to rank",
        file=sys.stderr,
    )
    return EXIT_FAILURE
