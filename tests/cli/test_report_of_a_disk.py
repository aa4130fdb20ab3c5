"""Reports on a slow disk: data that the script reads from it, and checkpoints.

The kernel throttles the disk. The reference is how long reading a file and syncing one to the disk
really took, measured around the calls.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from paceline.core.anatomy.dissect import Part
from paceline.core.anatomy.job import analyse
from paceline.core.status import Fact
from paceline.jobs import places
from paceline.report.page import advice_lines

from testing.slow_disk import slow_disk, write_and_forget
from tests.cli.test_report import ERROR_MAX, trained

pytestmark = pytest.mark.processes

STEPS, RANKS = 8, 2
FILE_BYTES = 2_400_000
READ_BPS, WRITE_BPS = 8_000_000, 500_000
"""Two ranks read at once, so a file takes 0.6 s. A checkpoint has 2 MB."""
JOB = """\
apiVersion: paceline.dev/v1alpha1
kind: TrainingJob
metadata: {name: disk}
spec:
  replicas: 2
  collective: {backend: gloo, mode: Full}
  checkpoint: {path: disk/saved, everyRounds: 3}
  template:
    spec:
      containers: [{name: trainer, image: none, command: [python, train.py]}]
"""
SCRIPT = """\
import json, os, pathlib, re, time
import paceline as pl
import torch
from urllib.request import urlopen

torch.set_num_threads(1)
durations = {"reading": [], "writing": []}

def timed(kind, work, *words):
    begun = time.monotonic()
    result = work(*words)
    durations[kind].append(time.monotonic() - begun)
    return result

sync = os.fsync
os.fsync = lambda fd: timed("writing", sync, fd)
pathlib.Path(GROUP).write_text(str(os.getpid()))

class OnDisk(torch.utils.data.Dataset):
    def __len__(self):
        return FILES
    def __getitem__(self, number):
        data = timed("reading", pathlib.Path(f"disk/{number}").read_bytes)
        return torch.frombuffer(bytearray(data[:4000]), dtype=torch.float32)

pl.init()
model = torch.nn.Linear(1000, 500)
optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model)
loader = pl.DataLoader(OnDisk(), batch_size=1)
for _ in loader.epochs(1):
    for x in loader:
        model(x).sum().backward()
        optimizer.step()

def page():
    target = next(pathlib.Path(".").glob(f"runs/*/targets/{pl.rank()}.json"))
    address = json.loads(target.read_text())[0]["targets"][0]
    return urlopen(f"http://{address}/metrics").read().decode()

if pl.is_publisher():
    while True:
        text = page()
        if re.search('checkpoints_total.result="written"\\\\S+ 2.0', text):
            break
        time.sleep(0.2)
    pathlib.Path("page").write_text(text)
    pathlib.Path("publisher").write_text(str(pl.rank()))
pathlib.Path(f"durations-{pl.rank()}").write_text(json.dumps(durations))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that has ended and whose disk is unmounted."""
    folder = tmp_path_factory.mktemp("disk")
    (folder / "job.yaml").write_text(JOB)
    with slow_disk(folder / "disk", read_bps=READ_BPS, write_bps=WRITE_BPS) as group:
        for number in range(RANKS * STEPS):
            write_and_forget(folder / f"disk/{number}", bytes(FILE_BYTES))
        known = f"GROUP, FILES = {str(group)!r}, {RANKS * STEPS}\n"
        (folder / "train.py").write_text(known + SCRIPT)
        trained(folder)
    return folder


def measured(run: Path, rank: int | str, kind: str) -> list[float]:
    durations: list[float] = json.loads((run / f"durations-{rank}").read_text())[kind]
    return durations


@pytest.mark.exhaustive
def test_the_report_measures_how_long_data_is_read_from_a_slow_disk(run: Path) -> None:
    job = analyse(places.local(run).samples("disk").pods)
    for rank in job.ranks:
        assert rank.anatomy.steps == STEPS
        injected_s = sum(measured(run, rank.worker[0], "reading")) / STEPS
        assert injected_s > 0.8 * FILE_BYTES / READ_BPS, "the disk is slow"
        shown_s = rank.anatomy.parts[Part.LOADING]
        row = f"read from a slow disk: {injected_s:.3f} s, shown {shown_s:.3f} s per step"
        assert shown_s == pytest.approx(injected_s, rel=ERROR_MAX), row
    first = advice_lines(job)[0]
    assert "loading data" in first
    assert "faster storage" in first


def test_status_and_metrics_measure_how_long_checkpoints_take(run: Path) -> None:
    """Checkpoints are written in the background: only copying the state delays the loop."""
    publisher = (run / "publisher").read_text()
    injected_s = sum(measured(run, publisher, "writing"))
    assert injected_s > 2 * 0.8 * 2_000_000 / WRITE_BPS, "the disk is slow"
    match = re.search(r"paceline_checkpoint_hidden_seconds_total\{\S+\} (\S+)", _page(run))
    assert match is not None
    status = places.local(run).status("disk")
    assert status.detail is not None
    facts = [rank.facts for rank in status.detail.ranks if Fact.SAVED in rank.facts]
    for shown_s in (float(match[1]), facts[0][Fact.SAVE_HIDDEN_S] or 0.0):
        row = f"checkpoints to a slow disk: {injected_s:.3f} s, shown {shown_s:.3f} s in all"
        assert shown_s == pytest.approx(injected_s, rel=ERROR_MAX), row
    assert (facts[0][Fact.SAVE_EXPOSED_S] or 0.0) < ERROR_MAX * injected_s


def _page(run: Path) -> str:
    return (run / "page").read_text()
