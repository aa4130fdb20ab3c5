"""`paceline report` after a run with injected faults of known size.

The reference is what the faults themselves measured: each one sleeps and records for how long. They
are large compared with the noise of a busy machine. The first step is left out because ranks are
still starting then.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from paceline.core.anatomy.dissect import Part
from paceline.core.anatomy.job import JobAnatomy, analyse
from paceline.local import steps
from paceline.local.rundir import LOCK
from paceline.report.page import advice_lines
from paceline.telemetry.anatomy import gauges

from testing.processes.runs import forked_paceline

pytestmark = pytest.mark.processes

ERROR_MAX = 0.05
LATE_S, LATE = 1.2, "2.0"
JOB = """\
apiVersion: paceline.dev/v1alpha1
kind: TrainingJob
metadata: {name: truth}
spec:
  replicas: 3
  collective: {backend: gloo, mode: Full}
  template:
    spec:
      containers: [{name: trainer, image: none, command: [python, train.py]}]
"""
SCRIPT = """\
import json, time, pathlib
import paceline as pl
import paceline.worker.engine as engine
import torch
from paceline.transport.base import Transport
from urllib.request import urlopen

torch.set_num_threads(1)
torch.manual_seed(1)
durations = {"loading": [], "link": []}
make_transport = engine.make_transport

def pause(kind, seconds):
    begun = time.monotonic()
    time.sleep(seconds)
    durations[kind].append(time.monotonic() - begun)

def slow_link(*args, **options):
    transport = make_transport(*args, **options)
    allreduce = transport.allreduce
    def slow(buffers, *rest):
        begun = time.monotonic()
        done = allreduce(buffers, *rest)
        pause("link", sum(x.nbytes for x in buffers) / 4e6 - (time.monotonic() - begun))
        durations["link"][-1] += time.monotonic() - begun - durations["link"][-1]
        return done
    transport.allreduce = slow
    transport.allreduce_in_turn = Transport.allreduce_in_turn.__get__(transport)  # by the one above
    return transport

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 3 * 8
    def __getitem__(self, _):
        pause("loading", 0.6)
        return torch.ones(1000)

engine.make_transport = slow_link
pl.init()
model = torch.nn.Linear(1000, 500)
optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model)
loader = pl.DataLoader(Slow(), batch_size=1)
for _ in loader.epochs(1):
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
    place = pl.rank()
    target = next(pathlib.Path(".").glob(f"runs/*/targets/{place}.json"))
    address = json.loads(target.read_text())[0]["targets"][0]
    page = urlopen(f"http://{address}/metrics").read().decode()
    pathlib.Path(f"page-{place}").write_text(page)
pathlib.Path(f"durations-{place}").write_text(json.dumps(durations))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that has ended."""
    folder = tmp_path_factory.mktemp("truth")
    (folder / "job.yaml").write_text(JOB)
    (folder / "train.py").write_text(SCRIPT)
    trained(folder, "--inject", f"slow:rank=2,ms={1000 * LATE_S:g}")
    return folder


def trained(folder: Path, *words: str) -> None:
    """Run the job in `folder` to its end, with private user folders."""
    own = {"XDG_RUNTIME_DIR": str(folder / "user"), "XDG_STATE_HOME": "", "HOME": str(folder)}
    (folder / "user").mkdir()
    code, output = forked_paceline(folder, "run", "job.yaml", *words, **own)
    assert code == 0, output


def measured(run: Path, kind: str) -> float:
    """Return the mean pause per step that the fault measured, without the first step."""
    means = []
    for path in sorted(run.glob("durations-*")):
        pauses = json.loads(path.read_text())[kind][-7:]
        means.append(sum(pauses) / len(pauses))
    return float(sum(means) / len(means))


@pytest.fixture(scope="module")
def analysis(run: Path) -> JobAnatomy:
    pods, _ = steps.of_run(run / "runs/truth-1")
    assert [len(rank.steps) for pod in pods for rank in pod.ranks] == [8, 8, 8]
    later = [
        replace(
            pod,
            ranks=tuple(replace(r, steps=r.steps[1:], rounds=r.rounds[1:]) for r in pod.ranks),
        )
        for pod in pods
    ]
    return analyse(later)


def rows(run: Path, analysis: JobAnatomy) -> dict[str, tuple[float, float]]:
    """Return the injected and the reported delay of each fault, in seconds per step."""
    worst = analysis.blame[0]
    return {
        "rank 2 is late": (LATE_S, worst.per_step_s),
        "slow loader": (measured(run, "loading"), analysis.parts[Part.LOADING]),
        "slow link": (measured(run, "link"), analysis.parts[Part.REDUCTION]),
    }


@pytest.mark.parametrize("fault", ["rank 2 is late", "slow loader", "slow link"])
def test_the_report_measures_the_injected_delay(
    run: Path, analysis: JobAnatomy, fault: str
) -> None:
    injected_s, shown_s = rows(run, analysis)[fault]
    row = f"{fault}: injected {injected_s:.3f} s, shown {shown_s:.3f} s per step"
    assert shown_s == pytest.approx(injected_s, rel=ERROR_MAX), row


def test_the_report_blames_the_late_rank_and_estimates_the_saving(analysis: JobAnatomy) -> None:
    assert analysis.blame[0].worker == LATE
    assert any(f"worker {LATE}" in line for line in advice_lines(analysis))
    solo = next(saving for saving in analysis.savings if saving.mode == "Solo")
    waited_s = 2 / 3 * LATE_S  # the late one of the three ranks does not wait
    assert solo.saved_s == pytest.approx(waited_s, rel=ERROR_MAX)


def test_the_metrics_page_agrees_with_the_report(run: Path) -> None:
    """Compare the page that an agent served during the run with the samples that it left."""
    pods, silent = steps.of_run(run / "runs/truth-1")
    assert not silent
    for pod in pods:
        anatomy = analyse([pod]).ranks[0].anatomy
        page = (run / f"page-{pod.slot}").read_text()
        for name, labels, value in gauges(anatomy):
            if name == "paceline_anatomy_step_seconds":
                match = re.search(rf'{name}{{part="{labels[0]}",worker="\S+"}} (\S+)', page)
                assert match is not None, (name, labels)
                assert float(match[1]) == pytest.approx(value, rel=ERROR_MAX, abs=0.01)


def test_the_blame_counter_of_the_dashboard_agrees_with_the_report(run: Path) -> None:
    """The panel "For whom did others wait" is drawn from this counter."""
    page = (run / "page-2").read_text()
    match = re.search(r"paceline_blamed_seconds_total\{worker=\S+\} (\S+)", page)
    assert match is not None
    in_all_s = 8 * 2 * LATE_S
    assert float(match[1]) == pytest.approx(in_all_s, rel=2 * ERROR_MAX), "the first step as well"


def test_report_writes_a_self_contained_page_and_a_trace(run: Path) -> None:
    code, output = forked_paceline(run, "report", "runs/truth-1", "--rounds", "2:5")
    assert code == 0, output
    assert f"mostly worker {LATE}" in output
    page = (run / "runs/truth-1/report.html").read_text()
    assert not re.search(r"(src|href)=|@import|<script", page), "it needs nothing but itself"
    events = json.loads((run / "runs/truth-1/trace.json").read_text())["traceEvents"]
    late = [e for e in events if e["name"] == "blocked" and LATE in e["args"]["what"]]
    assert late
    assert all(e["dur"] > 0 for e in events if e["ph"] == "X")


def test_invalid_arguments_of_report_are_refused_with_a_hint(run: Path) -> None:
    bare = run / "runs/bare-1"
    bare.mkdir(exist_ok=True)
    (bare / LOCK).touch()
    for words, hint in (
        (["runs/no-1"], "no job runs/no-1 is running here"),
        (["runs/truth-1", "--rounds", "70:80"], "known are 0 to 7"),
        (["runs/bare-1"], "no steps are known"),
    ):
        code, output = forked_paceline(run, "report", *words, KUBECONFIG=str(run / "none"))
        assert code == 2, output
        assert hint in output
        assert "Traceback" not in output
