"""Random faults of a job over the command line: the right verdict, its cause first, nothing left.

The faults are those of scripts that hang, raise, exit, crash or ignore signals, on one rank or on
all, at every moment of a script; and signals from outside. docs/faults.md has the table of what
each means, `testing.processes.faulty` has it as code.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from testing import left_files
from testing.processes.faulty import (
    CELLS,
    SEEDS,
    TRAINS,
    Expected,
    How,
    Outside,
    Plan,
    Script,
    When,
    expected,
    options_of,
    plan_of,
    script_of,
)
from testing.processes.runs import ForkedRun, Run, forked_paceline, processes_with

GONE_S = 60.0
COMMAND = "[python, train.py]"
EACH_KIND = {
    "a loop in a batch": Plan(3, "Full", when=When.IN_BATCH, how=How.LOOPS),
    "one sample raises": Plan(2, "Majority", when=When.IN_ITEM, how=How.OS_ERROR),
    "an exit code on all": Plan(2, "Solo", everybody=True, how=How.EXIT_7),
    "deaf after the loop": Plan(2, "Full", when=When.AFTER_LOOP, how=How.IS_DEAF),
    "a crash before the loop": Plan(2, "Full", when=When.BEFORE_LOOP, how=How.CRASHES),
    "SIGTERM, which ranks ignore": Plan(
        2, "Full", outside=Outside("runner", signal.SIGTERM, Script.IGNORES_SIGTERM)
    ),
}


def test_the_seeds_go_through_all_cells_and_repeat_themselves() -> None:
    plans = [plan_of(seed) for seed in range(SEEDS)]
    assert len({plan.outside or (plan.when, plan.how) for plan in plans}) == len(CELLS) >= 60
    assert plans == [plan_of(seed) for seed in range(SEEDS)]
    for plan in plans:
        compile(script_of(plan), "train.py", "exec")
        assert expected(plan).verdicts


@pytest.mark.processes
@pytest.mark.parametrize("name", EACH_KIND)
def test_a_fault_of_each_kind_has_the_right_verdict_and_leaves_nothing(
    tmp_path: Path, name: str
) -> None:
    check(tmp_path, EACH_KIND[name])


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_random_fault_has_the_right_verdict_and_leaves_nothing(tmp_path: Path, seed: int) -> None:
    check(tmp_path, plan_of(seed))


def check(folder: Path, plan: Plan) -> None:
    (folder / "train.py").write_text(script_of(plan))
    before = left_files.files()
    with temporary(folder) as env:
        code, said = outcome(folder, plan, env)
        _, explained = forked_paceline(folder, "explain", str(next((folder / "runs").iterdir())))
    wrong = list(differences(expected(plan), code, said, explained))
    wrong += [f"left: {each}" for each in left_behind(folder, before)]
    assert not wrong, f"{plan}\n{wrong}\nexit code {code}\n{said}\nexplain: {explained}"


@contextmanager
def temporary(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of a run whose temporary files are below `folder`."""
    (folder / "tmp").mkdir()
    yield os.environ | {"TMPDIR": str(folder / "tmp")}


def outcome(folder: Path, plan: Plan, env: dict[str, str]) -> tuple[int | None, str]:
    """Exit code and output of the run. By then nothing of it lives."""
    outside = plan.outside
    if outside is None:
        return ForkedRun(folder, COMMAND, *options_of(plan), env=env).wait()
    # Only of an executed program can anybody see from outside whether it is an agent.
    run = Run(folder, COMMAND, *options_of(plan), env=env)
    try:
        run.until(TRAINS)
        os.kill(target_of(run, outside.target), outside.signal)
        if outside.target == "runner" and outside.signal is signal.SIGKILL:
            said, _ = run.process.communicate(timeout=GONE_S)
            run.until_gone()
            return None, said
        return run.wait()
    finally:
        run.process.kill()


def target_of(run: Run, target: str) -> int:
    """The process of that name; of several agents the last one."""
    if target == "runner":
        return run.process.pid
    module = f"paceline.{target}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            ours = entry.name.isdecimal() and run.mark.encode() in (entry / "environ").read_bytes()
            if ours and module in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # gone, or not ours
    assert found, processes_with(run.mark)
    return max(found)


def differences(wanted: Expected, code: int | None, said: str, explained: str) -> Iterator[str]:
    if wanted.code is not None and code != wanted.code:
        yield f"exit code {code}, not {wanted.code}"
    if not any(verdict in said for verdict in wanted.verdicts):
        yield f"none of {wanted.verdicts} in the output"
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    for part in wanted.first:
        if not errors or part not in errors[-1]:
            yield f"{part!r} is not in the line of the error"
        if part not in explained.splitlines()[0]:
            yield f"{part!r} is not in the first line of explain"
    if wanted.warns and not any(part in said for part in wanted.warns):
        yield f"none of {wanted.warns} in the output"


def left_behind(folder: Path, before: set[str]) -> list[str]:
    until = time.monotonic() + left_files.PATIENCE_S
    while (left := left_files.processes_of(folder)) and time.monotonic() < until:
        time.sleep(0.1)
    return [*left, *left_files.folders_of(folder / "tmp"), *left_files.left_since(before)]
