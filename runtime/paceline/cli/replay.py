"""`paceline replay`: a recorded run again, in one process, to compare the weights (I15)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
from paceline_api.errors import EXIT_BAD_INPUT, EXIT_FAILURE, JobFileError, PacelineError
from paceline_api.jobfile import JOB_FILE, JobFile, read_job_file

from paceline.agent.launch import expand, group_of_one
from paceline.core.protocol.ids import MemberId
from paceline.core.replay.sequence import RESULT, ReplayResult
from paceline.environment import ENV_REPLAY, PREFIX


def replay(run_dir: Path) -> int:
    """The exit code: 0 if the weights are the same, 1 if they differ."""
    run_dir = run_dir.resolve()
    try:
        spec = read_job_file(run_dir / JOB_FILE)
    except JobFileError as error:
        raise PacelineError(
            f"{run_dir} is no run folder: {error.message}",
            hint="name the folder of a run that was made with `paceline run --record`",
            exit_code=EXIT_BAD_INPUT,
        ) from None
    (run_dir / RESULT).unlink(missing_ok=True)
    env = _environment(spec) | {ENV_REPLAY: str(run_dir)}
    command = [expand(part, env) for part in spec.command]
    try:
        code = subprocess.run(
            command, env=env, cwd=spec.working_dir or None, check=False
        ).returncode
    except OSError as error:
        raise PacelineError(f"{command[0]}: {error.strerror}") from None
    if code or not (run_dir / RESULT).exists():
        print(f"error: the replay of {run_dir} did not come to its end", file=sys.stderr)
        return EXIT_FAILURE
    return _tell(msgspec.json.decode((run_dir / RESULT).read_bytes(), type=ReplayResult))


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
