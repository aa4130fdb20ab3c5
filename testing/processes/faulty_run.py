"""Run a plan of `testing.processes.faulty` and compare the result with what is expected."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from testing import left_files
from testing.processes.faulty import TRAINS, Expected, Plan, expected, options_of, script_of
from testing.processes.history import called, descendants
from testing.processes.runs import ForkedRun, forked_paceline
from testing.temporary import temporary_folder

GONE_S = 60.0
COMMAND = "[python, train.py]"


@dataclass(frozen=True)
class Ended:
    """The result of a run."""

    code: int | None
    output: str
    explained: str
    """Output of `paceline explain`."""
    wrong: tuple[str, ...]
    """Differences from what is expected."""

    def __str__(self) -> str:
        wrong = "\n".join(self.wrong)
        return f"{wrong}\nexit code {self.code}\n{self.output}\nexplain: {self.explained}"


def carry_out(folder: Path, plan: Plan) -> Ended:
    """Run the job of a plan in an empty folder; check its output and what it leaves behind."""
    (folder / "train.py").write_text(script_of(plan))
    # Loader workers listen on sockets in this folder, so its path must be short.
    with temporary_folder(Path("/tmp")) as temporary:
        own = left_files.OwnFiles(lambda: descendants(os.getpid()), temporary)
        with own:
            code, output = _outcome(folder, plan, os.environ | {"TMPDIR": str(temporary)})
        _, explained = forked_paceline(folder, "explain", str(next((folder / "runs").iterdir())))
        wrong = list(_differences(expected(plan), code, output, explained))
        wrong += [f"left: {each}" for each in _left_behind(folder, temporary, own)]
    return Ended(code, output, explained, tuple(wrong))


def _outcome(folder: Path, plan: Plan, env: dict[str, str]) -> tuple[int | None, str]:
    """Run the job and return its exit code and output; none of its processes lives afterwards."""
    outside = plan.outside
    with ForkedRun(folder, COMMAND, *options_of(plan), env=env) as run:
        if outside is None:
            return run.wait()
        run.until(TRAINS)
        os.kill(_target_of(run, outside.target), outside.signal)
        if outside.target == "runner" and outside.signal is signal.SIGKILL:
            output, _ = run.process.communicate(timeout=GONE_S)
            run.until_gone()
            return None, output
        return run.wait()


def _target_of(run: ForkedRun, target: str) -> int:
    """Return the pid of the named process of a run, of several agents the highest."""
    if target == "runner":
        return run.process.pid
    return max(called(target, run.process.living()))


def _differences(wanted: Expected, code: int | None, output: str, explained: str) -> Iterator[str]:
    if wanted.code is not None and code != wanted.code:
        yield f"exit code {code}, not {wanted.code}"
    if not any(verdict in output for verdict in wanted.verdicts):
        yield f"none of {wanted.verdicts} in the output"
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    for part in wanted.first:
        choices = part.split("|")
        if not errors or not any(choice in errors[-1] for choice in choices):
            yield f"{part!r} is not in the line of the error"
        if not any(choice in explained.splitlines()[0] for choice in choices):
            yield f"{part!r} is not in the first line of explain"
    if wanted.warns and not any(part in output for part in wanted.warns):
        yield f"none of {wanted.warns} in the output"


def _left_behind(folder: Path, temporary: Path, own: left_files.OwnFiles) -> list[str]:
    until = time.monotonic() + left_files.PATIENCE_S
    while (left := left_files.processes_of(folder)) and time.monotonic() < until:
        time.sleep(0.1)
    return [*left, *left_files.folders_of(temporary), *own.left()]
