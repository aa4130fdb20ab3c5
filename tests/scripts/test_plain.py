"""A plain run gives the ranks of a script what torchrun gives them, and ends as torchrun does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testing.scripts.compare import compare
from testing.scripts.plain import ENVIRONMENT, NotOverError, Rank, Result, run_plain

pytestmark = pytest.mark.processes

TORCHRUN = Path(sys.executable).with_name("torchrun")
TORCHRUN_S = 240.0
DIFFERENT = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
"""Variables with another value in each run."""
SURROUNDINGS = """\
import json, os, random, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
mine = torch.rand(3) + dist.get_rank()
dist.all_reduce(mine)
seen = {
    "argv": sys.argv,
    "path": sys.path[0],
    "name": __name__,
    "file": __file__,
    "main": sys.modules["__main__"].__name__,
    "threads": torch.get_num_threads(),
    "seed": torch.initial_seed(),
    "mean": [value.hex() for value in mine.tolist()],
    "environment": dict(os.environ),
    "drawn": random.random(),
}
print(json.dumps(seen))
with open(f"{sys.argv[-1]}/rank-{dist.get_rank()}.txt", "w") as file:
    file.write(f"{mine.sum().item().hex()}\\n")
print("a warning", file=sys.stderr)
dist.destroy_process_group()
"""


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
        [TORCHRUN, *size, *streams, script, "--steps", "2", "--out", out],
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


def test_ranks_of_a_plain_run_see_what_those_of_torchrun_see(tmp_path: Path) -> None:
    script = written(tmp_path, SURROUNDINGS)
    real = run_torchrun(script, 2, tmp_path / "real", tmp_path / "logs")
    plain = run_plain(script, 2, ["--steps", "2"], tmp_path / "plain")
    assert plain.codes == real.codes, plain.story
    assert [rank.stderr.splitlines()[-1] for rank in plain.ranks] == ["a warning"] * 2
    for one, other in zip(real.ranks, plain.ranks, strict=True):
        seen, ours = json.loads(one.stdout), json.loads(other.stdout)
        before, here = seen.pop("environment"), ours.pop("environment")
        assert before.keys() == here.keys()
        changed = {name for name in before if before[name] != here[name]}
        assert changed <= DIFFERENT
        assert set(ENVIRONMENT) <= before.keys()
        assert seen.pop("drawn") != ours.pop("drawn"), "Python draws a seed of its own"
        assert seen.pop("argv")[:-1] == ours.pop("argv")[:-1]
        assert seen == ours
    assert compare(real, plain)[0].startswith("stdout"), "the files are the same"
    assert not [line for line in compare(real, plain) if not line.startswith("stdout")]


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
