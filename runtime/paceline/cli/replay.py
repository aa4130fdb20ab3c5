"""`paceline replay`: a recorded run again, in one process, to compare the weights (I15)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
from paceline_api.bounded import read_file
from paceline_api.decoding import UNDECODABLE
from paceline_api.errors import EXIT_BAD_INPUT, EXIT_FAILURE, JobFileError, PacelineError
from paceline_api.jobfile import JOB_FILE, JobFile, read_job_file
from paceline_api.types.enums import Wire

from paceline import private_files
from paceline.agent.launch import expand, group_of_one
from paceline.core.protocol.ids import MemberId
from paceline.core.replay.sequence import RESULT, ReplayResult
from paceline.environment import ENV_REPLAY, PREFIX
from paceline.local.rundir import check
from paceline.worker.journals import not_replayable, read_journals

SAID: Final = "replay.log"
"""In the run folder: the traceback of a script that failed in the replay."""
TRACEBACK: Final = "Traceback (most recent call last)"
EXPLAINED: Final = "error: "
"""As a script says a mistake that needs no traceback."""
TELLS: Final = (TRACEBACK, "hint:")
"""Lines that do not say which error it was."""
STDERR: Final = 2
RESULT_BYTES_MAX: Final = 64 * 1024
LEFT_S: Final = 5.0
"""How long a process that the script has left behind may hold its stderr open."""


def replay(run_dir: Path) -> int:
    """The exit code: 0 if the weights are the same, 1 if they differ."""
    try:
        run_dir = check(run_dir).resolve()
        spec = read_job_file(run_dir / JOB_FILE)
    except (JobFileError, FileNotFoundError) as error:
        why = error.message if isinstance(error, JobFileError) else "there is no such folder"
        raise PacelineError(
            f"{run_dir} is no run folder: {why}",
            hint="name the folder of a run that was made with `paceline run --record`",
            exit_code=EXIT_BAD_INPUT,
        ) from None
    if spec.wire is not Wire.FLOAT32:
        raise not_replayable(run_dir, spec.wire)
    read_journals(run_dir)  # what is missing is said before the script imports torch
    (run_dir / RESULT).unlink(missing_ok=True)
    env = _environment(spec) | {ENV_REPLAY: str(run_dir)}
    command = [expand(part, env) for part in spec.command]
    folder = Path(spec.working_dir or ".")
    if not folder.is_dir():
        raise PacelineError(
            f"{folder}, in which the ranks of the run were started, is no folder any more",
            hint="replay with the files and the environment of the run",
        )
    code, fault = _run(command, env, folder, run_dir / SAID)
    if code or not (run_dir / RESULT).exists():
        if not fault.startswith(EXPLAINED):  # else it has been said
            print(f"error: the replay of {run_dir} did not come to its end{fault}", file=sys.stderr)
        return EXIT_FAILURE
    return _tell(_read_result(run_dir / RESULT))


def _run(command: list[str], env: dict[str, str], folder: Path, log: Path) -> tuple[int, str]:
    """Return the script's exit code, and the error that ended it, as far as it has said it.

    A traceback is written to `log` instead of the terminal; all else is passed on as it comes."""
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
    said = [line.strip() for line in lines if line.strip() and not line.startswith((" ", *TELLS))]
    told = f": {said[-1]}" if said else ""
    return code, (
        f"{told}\nhint: run it with the arguments, files and environment of the run; the traceback "
        f"is in {log}"
    )


@contextmanager
def _stderr_read(explained: list[bytes], held: list[bytes]) -> Iterator[None]:
    """Inside, what this process and its children write to stderr is passed on up to the first
    traceback; from there on it comes into `held`, line by line. Errors that were passed on are in
    `explained`, too."""
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
    """As that of a rank, which belongs to no job."""
    outer = {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)}
    own_bin = str(Path(sys.executable).parent)
    env = outer | group_of_one(MemberId(0, 0, 0))
    env["PATH"] = os.pathsep.join([own_bin, outer.get("PATH", os.defpath)])
    env.setdefault("OMP_NUM_THREADS", "1")
    for name, text in spec.env:
        env[name] = expand(text, env)
    return env


def _read_result(path: Path) -> ReplayResult:
    """Return what the replay has left, in a process of the script. Raises PacelineError."""
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
