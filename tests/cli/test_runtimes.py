"""Runtimes on the command line: in a file on a laptop, by name for a cluster."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from paceline.cli.main import main
from paceline.cli.runtimes import changes_of, parsed
from paceline_api.errors import PacelineError

RUNTIME = """\
apiVersion: paceline.dev/v1alpha1
kind: ClusterTrainingRuntime
metadata: {name: torch}
spec:
  collective: {mode: Full}
  template:
    spec:
      nodeSelector: {pool: gpu}
      containers: [{name: trainer, image: base, env: [{name: GREETING, value: hello}]}]
"""
JOB = """\
apiVersion: paceline.dev/v1alpha1
kind: TrainingJob
metadata: {name: brief}
spec:
  runtimeRef: {name: torch}
  replicas: 2
  template:
    spec:
      containers: [{name: trainer, command: [python, train.py]}]
"""


def call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["paceline", *words])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return int(end.value.code or 0), out + err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "runtime.yaml").write_text(RUNTIME)
    (tmp_path / "train.py").write_text("import os; print(os.environ['GREETING'])\n")
    return tmp_path


def test_validate_merges_with_the_runtime_of_a_file(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text = call(capsys, monkeypatch, "validate", "job.yaml", "--runtime", "runtime.yaml")
    assert code == 0
    assert text == "job.yaml: job brief is valid with the runtime of runtime.yaml\n"
    code, text = call(capsys, monkeypatch, "validate", "job.yaml")
    assert code == 0
    assert "warning: spec.runtimeRef: torch is not looked up" in text
    words = ("--runtime", "runtime.yaml", "--set", "spec.collective.mode=Quorum")
    code, text = call(capsys, monkeypatch, "validate", "job.yaml", *words)
    assert code == 2
    assert 'spec.collective.mode: "Quorum" overrides "Full"' in text
    assert "from the command line" in text


def test_a_job_with_a_runtime_is_run_here_only_with_the_file_of_the_runtime(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text = call(capsys, monkeypatch, "run", "job.yaml")
    assert code == 2
    assert 'spec.runtimeRef: "ClusterTrainingRuntime torch" is a runtime of a cluster' in text
    assert "paceline runtimes ClusterTrainingRuntime/torch > runtime.yaml" in text
    assert not (folder / "runs").exists()
    (folder / "runtime.yaml").write_text(RUNTIME.replace("name: torch", "name: other"))
    code, text = call(capsys, monkeypatch, "run", "job.yaml", "--runtime", "runtime.yaml")
    assert code == 2
    assert "is not the runtime that is given, ClusterTrainingRuntime other" in text


def test_init_writes_a_job_that_names_the_runtime_and_no_image(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("init", "--runtime", "trainingruntime/team", "--replicas", "4", "-f", "new.yaml")
    code, _ = call(capsys, monkeypatch, *words, "train.py")
    assert code == 0
    job = yaml.safe_load((folder / "new.yaml").read_text())
    assert job["spec"]["runtimeRef"] == {"kind": "TrainingRuntime", "name": "team"}
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert "image" not in container


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("torch", ("ClusterTrainingRuntime", "torch")),
        ("TrainingRuntime/torch", ("TrainingRuntime", "torch")),
        ("clustertrainingruntime/a.b", ("ClusterTrainingRuntime", "a.b")),
    ],
)
def test_a_runtime_is_named_as_for_kubectl(text: str, expected: tuple[str, str]) -> None:
    assert parsed(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"), [("pod/torch", "names no runtime"), ("runtime.yaml", "is a file")]
)
def test_a_name_that_is_no_runtime_of_a_cluster_is_explained(text: str, reason: str) -> None:
    with pytest.raises(PacelineError, match=reason) as caught:
        changes_of(text)
    assert caught.value.hint
