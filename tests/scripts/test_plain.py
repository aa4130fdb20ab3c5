"""A plain run gives the ranks of a script what torchrun gives them, and ends as torchrun does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testing.scripts.compare import compare
from testing.scripts.plain import ENVIRONMENT, NotOverError, Rank, Result, run_plain
from testing.scripts.table import PROGRAMS

pytestmark = pytest.mark.processes

TORCHRUN = Path(sys.executable).with_name("torchrun")
TORCHRUN_S = 240.0
DIFFERENT = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
"""Variables with another value in each run."""
SURROUNDINGS = """\
import json, os, random, runpy, sys
import numpy, torch

seen = {
    "argv": sys.argv,
    "path": sys.path[0],
    "name": __name__,
    "file": __file__,
    "main": sys.modules["__main__"].__name__,
    "threads": torch.get_num_threads(),
    "environment": dict(os.environ),
    "drawn": [random.random(), numpy.random.random(), torch.rand(1).item()],
}
print(json.dumps(seen))
print("a warning", file=sys.stderr)
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Script that prints what a rank sees, and then runs another script."""
PROGRAM = [str(PROGRAMS / "imagenet.py"), "--epochs", "2"]


def written(tmp_path: Path, text: str) -> Path:
    script = tmp_path / "script.py"
    script.write_text(text)
    return script


def run_torchrun(script: Path, ranks: int, out: Path, logs: Path) -> Result:
    """Run a script under the real torchrun."""
    out.mkdir()
    size = ["--standalone", "--nproc-per-node", str(ranks)]
    streams = ["--redirects", "3", "--log-dir", str(logs)]
    done = subprocess.run(
        [TORCHRUN, *size, *streams, script, *PROGRAM, "--out", out],
        env=dict(os.environ),  # without the variables that readline adds behind Python's back
        timeout=TORCHRUN_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [attempt] = logs.glob("*/attempt_0")
    texts = [
        [(attempt / str(rank) / f"{name}.log").read_text() for name in ("stdout", "stderr")]
        for rank in range(ranks)
    ]
    return Result(tuple(Rank(0, *both) for both in texts), out)


def apart(result: Result) -> tuple[list[dict[str, Any]], Result]:
    """Return what each rank saw, and the result without that."""
    texts = [rank.stdout.split("\n", 1) for rank in result.ranks]
    ranks = (Rank(0, rest, "") for _, rest in texts)
    return [json.loads(printed) for printed, _ in texts], Result(tuple(ranks), result.out)


@pytest.mark.exhaustive  # three processes that import torch: 15 s of CPU time
def test_a_plain_run_equals_one_of_torchrun(tmp_path: Path) -> None:
    script = written(tmp_path, SURROUNDINGS)
    real = run_torchrun(script, 2, tmp_path / "real", tmp_path / "logs")
    plain = run_plain(script, 2, PROGRAM, tmp_path / "plain")
    assert plain.codes == real.codes, plain.story
    assert all("a warning\n" in rank.stderr for rank in (*plain.ranks, *real.ranks))
    (before, of_torchrun), (here, of_plain) = apart(real), apart(plain)
    assert compare(of_torchrun, of_plain) == []
    draws: list[list[float]] = []
    for theirs, ours in zip(before, here, strict=True):
        variables, own = theirs.pop("environment"), ours.pop("environment")
        assert variables.keys() == own.keys()
        assert {name for name in own if own[name] != variables[name]} <= DIFFERENT
        assert set(ENVIRONMENT) <= variables.keys()
        draws.append([*theirs.pop("drawn"), *ours.pop("drawn")])
        assert theirs.pop("argv")[:-1] == ours.pop("argv")[:-1]
        assert theirs == ours
    drawn = [number for both in draws for number in both]
    assert len(set(drawn)) == len(drawn), "each process starts from a seed of its own"


def test_a_rank_that_fails_ends_the_others_as_under_torchrun(tmp_path: Path) -> None:
    text = "import os, time\nprint('begun', flush=True)\nif os.environ['RANK'] == '1':\n"
    text += "    raise ValueError('no data')\ntime.sleep(1000)\n"
    result = run_plain(written(tmp_path, text), 2, [], tmp_path / "out")
    assert result.codes == (-15, 1)
    assert "ValueError: no data" in result.ranks[1].stderr
    assert result.ranks[1].stdout == "begun\n"


def test_exit_codes_of_sys_exit_are_kept(tmp_path: Path) -> None:
    text = "import sys\nsys.exit(7)\n"
    assert run_plain(written(tmp_path, text), 1, [], tmp_path / "out").codes == (7,)


def test_a_run_that_hangs_ends_at_its_deadline_without_processes(tmp_path: Path) -> None:
    text = "import os, signal, time\nprint(os.getpid(), flush=True)\n"
    text += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1000)\n"
    with pytest.raises(NotOverError, match="not over after 2 s"):
        run_plain(written(tmp_path, text), 2, [], tmp_path / "out", limit_s=2.0)
    pids = [int((tmp_path / f"out.logs/{rank}.stdout").read_text()) for rank in range(2)]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
