"""A script's own error ends its job with the exception and its place, and no rank hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from testing.processes.runs import forked_paceline
from tests.layers import exhaustive_except

pytestmark = pytest.mark.processes

SCRIPT = """\
import argparse
import os
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
{top}
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
for step in range({steps}):
    if step == 3 and rank == {rank}:
        {error}
    optimizer.zero_grad()
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""
LINE = 18
"""Line of the error in the loop."""
IN_THE_LOOP = {
    "an exception": (1, 'raise ValueError("bad labels")', "ValueError: bad labels"),
    "an exit code": (1, "sys.exit(3)", "SystemExit: 3"),
    "an exit with a message": (1, 'sys.exit("no data")', "SystemExit: no data"),
    "an end without a word": (1, "os._exit(4)", "exit code 4"),
    "a crash": (1, "os.abort()", "signal 6 (SIGABRT)"),
    "no memory": (1, "raise MemoryError", "MemoryError"),
    "an evaluation on rank 0": (0, "{}['accuracy']", "KeyError: 'accuracy'"),
}
CASES = [
    pytest.param(*case, id=name, marks=[pytest.mark.exhaustive] * (name != "an exception"))
    for name, case in IN_THE_LOOP.items()
]


def run(
    folder: Path, *words: str, top: str = "", rank: int = 1, error: str = "pass", steps: int = 6
) -> str:
    """Run the script on two ranks, and return what a failed job printed."""
    text = SCRIPT.format(top=top, rank=rank, error=error, steps=steps)
    (folder / "train.py").write_text(text)
    code, printed = forked_paceline(folder, "run", "--replicas", "2", "--quiet", "train.py", *words)
    assert code == 1, printed
    assert "(ScriptFailed)" in printed
    assert "<frozen" not in printed
    return printed


@pytest.mark.parametrize(("rank", "error", "cause"), CASES)
def test_an_error_on_one_rank_fails_the_job_and_is_its_reason(
    tmp_path: Path, rank: int, error: str, cause: str
) -> None:
    printed = run(tmp_path, rank=rank, error=error)
    place = "" if "_exit" in error else f" ({tmp_path / 'train.py'}, line {LINE})"
    # A job needs rank 0 to its end, and its replacement cannot join this script.
    then = "in its place rank 0.0#1" if rank == 0 else "the other ranks went on"
    assert f"error: {cause}{place} on rank {rank}.0#0; {then}" in printed


def test_an_error_on_one_rank_ends_a_long_job_if_no_rank_can_come_in_its_place(
    tmp_path: Path,
) -> None:
    printed = run(tmp_path, error='raise ValueError("bad labels")', steps=1_000_000_000)
    cause = f"error: ValueError: bad labels ({tmp_path / 'train.py'}, line {LINE}) on rank 1.0#0; "
    assert f"{cause}a rank that was started in its place cannot join" in printed


def test_a_rank_whose_script_ends_first_is_named_by_those_that_go_on(tmp_path: Path) -> None:
    text = SCRIPT.format(top="", rank=1, error="sys.exit(0)", steps=6)
    (tmp_path / "train.py").write_text(text)
    code, printed = forked_paceline(tmp_path, "run", "--replicas", "2", "train.py")
    assert code == 0, printed
    assert (
        printed.count("the script of rank 1.0#0 has ended with exit code 0, and others make") == 1
    )
    assert "job train: Complete" in printed


ONCE = """\
import pathlib
import paceline as pl
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
failed = pathlib.Path(__file__).with_name("failed")
while (step := pl.step()) < 6:
    dist.all_reduce(torch.ones(1))
    if step == 3 and dist.get_rank() == 1 and not failed.exists():
        failed.touch()
        raise ValueError("a bad sector")
    optimizer.zero_grad()
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
"""


def test_a_job_is_complete_if_a_rank_came_in_the_place_of_one_that_failed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ONCE)
    code, printed = forked_paceline(tmp_path, "run", "--replicas", "2", "train.py")
    assert code == 0, printed
    assert "the script failed once on the way: ValueError: a bad sector" in printed


@pytest.mark.exhaustive
def test_an_import_that_fails_on_all_ranks_ends_the_job_at_once(tmp_path: Path) -> None:
    printed = run(tmp_path, top="import not_there_at_all")
    cause = "ModuleNotFoundError: No module named 'not_there_at_all'"
    assert f"{cause} ({tmp_path / 'train.py'}, line 7); last lines:" in printed


@pytest.mark.exhaustive
def test_a_wrong_argument_of_the_script_is_reported_as_argparse_prints_it(tmp_path: Path) -> None:
    printed = run(tmp_path, "--nonsense")
    assert f"SystemExit: 2 ({tmp_path / 'train.py'}, line 10); last lines:\nusage: tr" in printed
    assert "train.py: error: unrecognized arguments: --nonsense" in printed


SURROUNDINGS = """\
import atexit
import multiprocessing
import pickle
import sys


class Point:
    pass


def loaded():
    return pickle.loads(pickle.dumps(Point)) is Point


def work(queue):
    queue.put([__name__, Point.__module__, sys.path[0]])


def main():
    shown = {name: value for name, value in globals().items() if name.startswith("__")}
    shown["__builtins__"] = type(__builtins__)
    shown["__loader__"] = type(__loader__)
    shown["__spec__"] = __spec__ and [__spec__.name, __spec__.origin, __spec__.parent]
    print(sorted(shown.items()), sys.argv, sys.path)
    print(sys.modules["__main__"].__dict__ is globals(), loaded())
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    process.join()
    print(process.exitcode, queue.get() if process.exitcode == 0 else "")
    atexit.register(lambda: print("at the end", loaded()))
    {}["missing"]


if __name__ == "__main__":
    main()
"""
"""Script that prints what it sees around it, and fails."""


def printed_by(folder: Path, *words: str) -> list[str]:
    """Run Python without frames of the interpreter in the traceback, and return its output."""
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    frames = [line for line in done.stderr.splitlines() if 'File "<frozen' not in line]
    return [*done.stdout.splitlines(), *frames]


@pytest.mark.parametrize(
    "program",
    [
        ["sub/show.py"],
        pytest.param(["-m", "sub.show"], marks=pytest.mark.exhaustive),
        pytest.param(["-m", "sub"], marks=pytest.mark.exhaustive),
    ],
)
def test_a_script_sees_what_python_alone_shows_it(tmp_path: Path, program: list[str]) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("show.py", "__main__.py"):
        (tmp_path / "sub" / name).write_text(SURROUNDINGS)
    words = [*program, "-x", "a b"]
    expected = printed_by(tmp_path, *words)
    assert expected[-1] == "KeyError: 'missing'"
    assert "at the end True" in expected
    assert printed_by(tmp_path, "-m", "paceline", *words) == expected


STATES = {
    "spread": (
        "from torch.distributed.optim import ZeroRedundancyOptimizer",
        "ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=args.lr)",
        "the state of ZeroRedundancyOptimizer(0.weight+2) #1 is spread over the ranks",
    ),
    "broken": (
        "class Mine(torch.optim.SGD):\n    def state_dict(self):\n        return {}['mine']\n",
        "Mine(model.parameters(), lr=args.lr)",
        "the state of Mine(0.weight+2) #1 cannot be read for a rank that joins: KeyError: 'mine'",
    ),
}


@pytest.mark.parametrize("kind", exhaustive_except(["spread"], STATES))
def test_an_optimizer_that_gives_no_state_fails_the_job_when_a_rank_is_lost(
    tmp_path: Path, kind: str
) -> None:
    """Until then it trains, as under torchrun."""
    top, optimizer, error = STATES[kind]
    text = SCRIPT.format(top=top, rank=-1, error="pass", steps=100_000)
    plain = "torch.optim.SGD(model.parameters(), lr=args.lr)"
    assert plain in text
    text = text.replace(plain, optimizer)
    (tmp_path / "train.py").write_text(text)
    words = ("run", "--replicas", "2", "--quiet", "--inject", "kill:rank=1,at=round:9", "train.py")
    code, printed = forked_paceline(tmp_path, *words)
    assert code == 1, printed
    assert "(ScriptFailed)" in printed
    assert error in printed
    assert "hint: " in printed
