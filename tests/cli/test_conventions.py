"""What users of kubectl and torchrun expect of a command line: --version, -h, -o json."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from paceline.cli.main import app, main

from testing.processes.forked_call import ForkedCall
from testing.processes.runs import LIMIT_S, end_of

JOB = """\
apiVersion: paceline.dev/v1alpha1
kind: TrainingJob
metadata: {name: digits}
spec:
  replicas: 1
  template:
    spec:
      containers: [{name: trainer, image: none, command: [python, train.py]}]
"""
SCRIPT = """\
import paceline as pl
import torch
from torch import nn

pl.init()
model = nn.Linear(2, 1)
optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
for _ in pl.steps(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("a line of the script")
"""
COMMANDS = [str(command.name or command.callback.__name__) for command in app.registered_commands]  # type: ignore[union-attr]


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["paceline", *words])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


@pytest.mark.parametrize("word", ["--version", "version"])
def test_the_version_is_printed(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    version = importlib.metadata.version("paceline")
    assert call(monkeypatch, capsys, word) == (0, f"paceline {version}\n", "")


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_command_has_a_short_option_for_help(
    flag: str,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = call(monkeypatch, capsys, *command, flag)
    assert code == 0
    assert "Usage:" in out


@pytest.mark.parametrize(("word", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_validate_prints_data(
    word: str,
    read: Any,
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = call(monkeypatch, capsys, "validate", "job.yaml", "-o", word)
    right = {"file": "job.yaml", "valid": True, "job": "digits", "errors": [], "warnings": []}
    assert (code, read(out), err) == (0, right, "")

    (job.parent / "train.py").unlink()
    code, out, err = call(monkeypatch, capsys, "validate", "job.yaml", "-o", word)
    [warning] = read(out)["warnings"]
    assert code == 0
    assert "train.py is not in" in warning["message"]
    assert err == ""


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (JOB.replace("replicas: 1", "replicas: 0"), ["spec.replicas"]),
        (
            JOB.replace("replicas: 1", "replicas: 0\n  minReplicas: -1"),
            ["spec.replicas", "spec.minReplicas"],
        ),
        ("a: [", [""]),
        ("", [""]),
        ("- 1", [""]),
    ],
)
def test_validate_prints_each_error_as_data(
    text: str,
    fields: list[str],
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job.write_text(text)
    code, out, err = call(monkeypatch, capsys, "validate", "job.yaml", "--output", "json")
    result = json.loads(out)
    assert (code, err, result["valid"], result["job"]) == (2, "", False, "")
    assert sorted(each["field"] for each in result["errors"]) == sorted(fields)
    assert all(each["message"] and each["hint"] for each in result["errors"])


@pytest.mark.processes
def test_a_module_runs_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "--version"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout.split()[0]) == (0, "paceline")


@pytest.mark.processes
def test_a_run_prints_its_last_status_as_data_and_everything_else_to_stderr(job: Path) -> None:
    output, errors = job.with_name("output"), job.with_name("errors")
    words = ["run", str(job), "-o", "json"]
    with output.open("wb") as out, errors.open("wb") as err_file:
        files = out.fileno(), err_file.fileno()
        code, _ = end_of(ForkedCall(words, job.parent, os.environ, files=files))
    err = errors.read_text()
    assert code == 0, err
    status = json.loads(output.read_text())
    assert (status["name"], status["state"]) == ("digits", "Complete")
    assert "a line of the script" in err
    assert "job digits: Complete" in err
