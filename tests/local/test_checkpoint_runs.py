"""Checkpoints of real jobs: all ranks die, the whole run dies, the disk is torn, full or slow."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testing.processes.runs import ForkedRun
from testing.small_disk import small_disk

pytestmark = pytest.mark.processes

WAIT_S = 120.0
SAMPLES, EPOCHS = 320, 2
SCRIPT = f"""\
import os, time, torch
from pathlib import Path
import paceline as pl

if Path("slow-disk").exists():
    sync = os.fsync
    os.fsync = lambda fd: (time.sleep(0.4), sync(fd))
torch.set_num_threads(1)
pl.init()
Path(f"pid-{{os.getpid()}}").touch()
torch.manual_seed(pl.rank())
layers = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2)
model = torch.nn.Sequential(*layers)
optimizer = pl.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=1e-3),
    model,
    scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 30),
)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn({SAMPLES}, 8), torch.randn({SAMPLES}, 2))
loader = pl.DataLoader(data, batch_size=2, seed=1)
slowest, before = 0.0, None
for epoch in loader.epochs(EPOCHS):
    for x, y in loader:
        time.sleep(0.06 if Path("brake").exists() else 0.005)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        now = time.monotonic()
        slowest = max(slowest, now - before) if before else 0.0
        before = now
print(f"SLOWEST {{slowest}}", flush=True)
"""


class Job(ForkedRun):
    """A run whose job writes checkpoints."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        path: str = "saved",
        every: int = 5,
        epochs: int = EPOCHS,
    ) -> None:
        (folder / "script.py").write_text(SCRIPT.replace("epochs(EPOCHS)", f"epochs({epochs})"))
        checkpoint = json.dumps({"path": path, "everyRounds": every, "keep": 2})
        super().__init__(
            folder, '["python", "script.py"]', "--set", f"spec.checkpoint={checkpoint}", *words
        )

    def kill(self) -> None:
        """Send SIGKILL to all processes at once, like a power failure."""
        self.process.kill()
        self.process.close()


def with_kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def wait_until(what: Callable[[], bool], name: str) -> None:
    until = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < until, f"never: {name}"
        time.sleep(0.02)


def newest(folder: Path) -> int:
    names = [p.name[1:] for p in (folder / "saved").glob("v*")]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def kill_ranks(folder: Path) -> int:
    pids = [int(p.name.removeprefix("pid-")) for p in folder.glob("pid-*")]
    for path in folder.glob("pid-*"):
        path.unlink()
    for pid in pids:
        with_kill(pid)
    return len(pids)


def figure(output: str, name: str) -> str:
    match = re.search(rf"^  {name} +(.*)$", output, re.MULTILINE)
    assert match, output
    return match.group(1)


def test_a_job_resumes_from_its_checkpoint_until_it_is_finished(tmp_path: Path) -> None:
    """Kill all ranks, then the whole run, and tear its newest checkpoint.

    The job then resumes with another number of ranks and completes; running it again changes
    nothing.
    """
    (tmp_path / "brake").touch()
    first = Job(tmp_path)
    wait_until(lambda: newest(tmp_path) >= 10, "a second checkpoint")
    assert kill_ranks(tmp_path) == 2
    first.until("ResumedFromCheckpoint")
    before = newest(tmp_path)
    wait_until(lambda: newest(tmp_path) >= before + 10, "checkpoints after all ranks had died")
    first.kill()
    version = newest(tmp_path)
    tensors = tmp_path / "saved" / f"v{version}" / "model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-10])
    (tmp_path / "brake").unlink()
    code, output = Job(tmp_path).wait()
    assert code == 1, output
    assert "CheckpointUnusable" in output
    assert f"v{version} is damaged: model.safetensors has" in output
    assert f"hint: remove {tensors.parent} to go on from the one before it" in output
    shutil.rmtree(tensors.parent)
    code, output = Job(tmp_path, "--replicas", "3").wait()
    assert code == 0, output
    assert f"goes on from the checkpoint of version {newest_below(version)}" in output
    assert figure(output, "samples applied").startswith(f"{SAMPLES * EPOCHS}, ")
    assert figure(output, "epochs") == f"{EPOCHS} with each sample applied exactly once"
    assert "written, the last of version" in figure(output, "checkpoints")
    code, output = Job(tmp_path).wait()
    assert code == 0, output
    assert "is the end of the job; nothing is left to do" in output
    longer = EPOCHS + 1
    code, output = Job(tmp_path, epochs=longer).wait()
    assert code == 0, output
    assert figure(output, "samples applied").startswith(f"{SAMPLES * longer}, ")
    assert figure(output, "epochs") == f"{longer} with each sample applied exactly once"
    code, output = Job(tmp_path, epochs=EPOCHS).wait()
    assert code == 1, output
    assert f"epochs: {longer} -> {EPOCHS}" in output


def newest_below(version: int) -> int:
    return version - 5


@pytest.fixture
def disk_at(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "64k") as folder:
        yield folder


@pytest.mark.exhaustive
def test_a_full_disk_is_reported_and_training_continues(tmp_path: Path, disk_at: Path) -> None:
    code, output = Job(tmp_path, path=str(disk_at / "saved"), every=50).wait()
    assert code == 0, output
    assert "CheckpointFailed: rank 0.0#0 could not write the checkpoint of version 50" in output
    assert "are free; training goes on" in output
    assert "failed" in figure(output, "checkpoints")


@pytest.mark.exhaustive
def test_a_slow_disk_delays_no_round(tmp_path: Path) -> None:
    """Let a checkpoint take seconds to reach the disk; those due meanwhile are skipped."""
    (tmp_path / "slow-disk").touch()
    (tmp_path / "brake").touch()
    code, output = Job(tmp_path).wait()
    assert code == 0, output
    assert "skipped" in figure(output, "checkpoints")
    slowest = [float(x) for x in re.findall(r"SLOWEST (\S+)", output)]
    assert len(slowest) == 2
    log = json.loads(next((tmp_path / "runs").glob("*/status.json")).read_text())
    hidden = max(r["facts"].get("checkpoint_hidden_seconds", 0.0) for r in log["ranks"])
    assert hidden > 2 * max(slowest), (hidden, slowest)
