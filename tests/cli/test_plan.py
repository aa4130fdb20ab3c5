"""`paceline plan`: measuring a job, running and resizing it, and comparing the forecasts."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from testing.processes.forked_call import ForkedCall
from testing.processes.runs import end_of, forked_paceline

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]

JOB = """\
apiVersion: paceline.dev/v1alpha1
kind: TrainingJob
metadata: {name: job}
spec:
  replicas: 2
  collective: {backend: gloo, mode: Full}
  checkpoint: {path: saved, everyRounds: 1}
  template:
    spec:
      containers: [{name: trainer, image: none, command: [python, train.py]}]
"""
PAUSE_S = 0.02
SCRIPT = f"""\
import os, time, torch
import paceline as pl
torch.set_num_threads(1)
torch.manual_seed(0)
pl.init()
x = torch.randn(256, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Linear(4, 1)
sgd = torch.optim.SGD(model.parameters(), lr=1e-5)
optimizer = pl.DistributedOptimizer(sgd, model)
loader = pl.DataLoader(data, batch_size=16)
for _ in loader.epochs(int(os.environ.get("EPOCHS", "5000"))):
    for x, y in loader:
        time.sleep({PAUSE_S})
        (model(x) - y).square().mean().backward()
        optimizer.step()
open("behind-the-loop", "w").close()
"""
SHORT = SCRIPT.replace("5000", "1").replace("batch_size=16", "batch_size=64")
FAILS = "import paceline as pl\npl.init()\nraise ValueError('no such thing')\n"


def own(folder: Path) -> dict[str, str]:
    """Return the environment of a user who has no other runs."""
    (folder / "user").mkdir(exist_ok=True)
    return {"XDG_RUNTIME_DIR": str(folder / "user"), "XDG_STATE_HOME": "", "HOME": str(folder)}


def call(folder: Path, *words: str, code: int = 0, **env: str) -> str:
    ended, output = forked_paceline(folder, *words, **own(folder), **env)
    assert ended == code, output
    return output


def plan(folder: Path, *words: str, name: str = "job.yaml") -> dict[str, Any]:
    output = call(folder, "plan", name, "--ranks", "1,2,3", "-o", "json", *words)
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_plan_measures_a_job_and_compares_its_forecast_with_later_runs(job: Path) -> None:
    result = plan(job, "--measure")
    assert [(one["source"], one["setting"]["members"]) for one in result["compared"]] == [
        ("--measure", 1),
        ("--measure", 2),
    ]
    assert all(PAUSE_S < one["step_s"] < 100 * PAUSE_S for one in result["compared"])
    assert {one["by"] for one in result["compared"]} == {"other rows"}
    assert all(one["error"] is not None for one in result["compared"])
    assert result["noise_scale"] >= 1
    forecasts = {
        (line["forecast"]["setting"]["members"], line["mode"]): line["forecast"]
        for line in result["lines"]
    }
    assert forecasts[2, "Full"]["efficiency"] < forecasts[1, "Full"]["efficiency"] < 1
    assert not (job / "saved").exists(), "no checkpoint is made of it"
    assert not (job / "behind-the-loop").exists()
    (kept,) = (job / "runs").iterdir()
    assert kept.name.startswith("job.plan-")

    call(job, "run", "job.yaml", "--quiet", "--inject", "join:at=round:60", EPOCHS="60")
    later = plan(job)
    runs = [one for one in later["compared"] if one["source"].startswith("job-1, ")]
    assert [one["setting"]["members"] for one in runs] == [2, 3]
    assert [one["by"] for one in runs] == ["plan before"] * 2
    assert [one["predicted_s"] for one in runs] == [
        forecasts[2, "Full"]["step_s"],
        forecasts[3, "Full"]["step_s"],
    ]
    assert all(abs(one["error"]) < 0.9 for one in runs)
    shown = call(job, "plan", "job.yaml")
    assert "the job as it is" in shown
    assert "job-1, 1.2" in shown
    # The job can be addressed by its name until its file changes.
    assert plan(job, name="job")["compared"] == later["compared"]
    for words in (["--measure"], ["--set", "spec.replicas=3"]):
        assert "job is a job" in call(job, "plan", "job", *words, code=2)
    # A job with another command has no measurements.
    other = (job / "job.yaml").read_text().replace("train.py]", "train.py, more]")
    (job / "job.yaml").write_text(other)
    assert "too little was measured" in call(job, "plan", "job.yaml", code=2)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "--measure"),
        (["-n", "team"], "is a file, and a cluster's job"),
        (["--ranks", "4", "--model", "3"], "use multiples of 3, such as 6"),
        (["--ranks", "four"], "--ranks 1,2,4"),
        (["--batch", "-1"], "not a list of numbers above 0"),
        (["--speedup", "1.6"], "--speedup 2=1.6"),
        (["--measure", "--timeout", "soon"], "is not a duration"),
        (["--set", "spec.replcas=2"], "spec.replcas"),
    ],
)
def test_invalid_arguments_of_plan_are_refused_with_a_hint(
    job: Path, words: list[str], part: str
) -> None:
    error = call(job, "plan", "job.yaml", *words, code=2)
    assert error.startswith("error: ")
    assert "\nhint: " in error
    assert part in error
    assert not (job / "runs").exists()


@pytest.mark.parametrize(
    ("script", "limit", "message", "hint"),
    [
        (SHORT, "2m", "was over after 4 rounds, too early", "more epochs"),
        (FAILS, "2m", "failed while it was measured", "hint: "),
        ("import time\ntime.sleep(600)\n", "6s", "made 0 rounds in 6 s", "--timeout"),
    ],
    ids=["too short", "fails", "too slow"],
)
def test_a_job_that_cannot_be_measured_is_reported_and_leaves_no_run_folder(
    job: Path, script: str, limit: str, message: str, hint: str
) -> None:
    (job / "train.py").write_text(script)
    error = call(job, "plan", "job.yaml", "--measure", "--timeout", limit, code=1)
    assert "measuring 1 rank\n" in error
    assert message in error
    assert hint in error
    assert "paceline/local/" not in error, "no frame of our own"
    assert not (job / "runs").exists()


def test_a_working_dir_of_the_image_is_reported_as_missing_on_this_machine(job: Path) -> None:
    (job / "job.yaml").write_text(JOB.replace("image: none", "image: none, workingDir: /workspace"))
    error = call(job, "plan", "job.yaml", "--measure", code=2)
    assert "is not a folder on this machine" in error


@pytest.mark.exhaustive
@pytest.mark.timeout(660)
def test_plan_measures_replica_groups_and_single_ranks(tmp_path: Path) -> None:
    """Four jobs run one after another, which takes 90 seconds alone."""
    for name in ("job.yaml", "train.py"):
        shutil.copy(ROOT / "examples" / "tensor-parallel" / name, tmp_path)
    words = ("plan", "job.yaml", "--measure", "--ranks", "2,4", "-o", "json")
    code, output = end_of(ForkedCall(words, tmp_path, os.environ | own(tmp_path)), limit_s=600)
    assert code == 0, output
    result = json.loads(output.splitlines()[-1])
    settings = [(s["members"], s["model"]) for s in (one["setting"] for one in result["compared"])]
    assert settings == [(1, 2), (2, 2), (1, 1), (2, 1)]
    assert all(one["error"] is not None for one in result["compared"])
    assert result["noise_scale"] >= 1, "two ranks with the whole model tell it"
    (contest,) = result["contests"]
    assert contest["model"] == 2
    assert contest["speedup"] > 0
    assert [each["groups"] for each in contest["needed"]] == [1, 4, 16]
    (present,) = [line["forecast"]["setting"] for line in result["lines"] if line["own"]]
    assert (present["members"], present["model"]) == (2, 2)
