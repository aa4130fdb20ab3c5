"""The command line without processes: version, validate, and errors before a run starts."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import pytest
from paceline.cli.main import main

JOB = """\
apiVersion: paceline.dev/v1alpha1
kind: TrainingJob
metadata: {name: digits}
spec:
  replicas: 4
  maxReplicas: 5
  collective: {mode: Quorum, quorum: 3}
  template:
    spec:
      containers: [{name: trainer, image: none, command: [python, train.py]}]
"""


class Said(str):
    """The output of a command, with its exit code."""

    code: int


@pytest.fixture
def paceline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> object:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    def call(*words: str, job: str = JOB) -> Said:
        (tmp_path / "job.yaml").write_text(job)
        monkeypatch.setattr(sys, "argv", ["paceline", *words])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        output = Said(out + err)
        output.code = int(end.value.code or 0)
        assert "Traceback" not in output
        assert not (tmp_path / "runs").exists(), "a run folder was made for nothing"
        return output

    return call


def test_the_version_command_prints_the_installed_version(paceline: Any) -> None:
    output = paceline("version")
    assert output == f"paceline {importlib.metadata.version('paceline')}\n"
    assert output.code == 0


def test_validate_accepts_a_valid_job(paceline: Any) -> None:
    output = paceline("validate", "job.yaml", "--set", "spec.collective.mode=Full")
    assert output == "job.yaml: job digits is valid\n"
    assert output.code == 0


CLAIM = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: data}\nspec: {}\n"
RUNTIME = (
    "apiVersion: paceline.dev/v1alpha1\nkind: TrainingRuntime\nmetadata: {name: r}\nspec: {}\n"
)


def test_validate_checks_each_job_of_a_file_and_leaves_other_kinds_out(paceline: Any) -> None:
    wrong = JOB.replace("replicas: 4", "replcas: 4").replace("name: digits", "name: other")
    text = f"{CLAIM}---\n{JOB}---\n{RUNTIME}---\n{wrong}"
    output = paceline("validate", "job.yaml", job=text)
    assert output.code == 2
    assert "job.yaml: job digits is valid" in output
    line = text.split("\n").index("  replcas: 4") + 1
    assert f"line {line}" in output
    assert "PersistentVolumeClaim" not in output
    assert paceline("validate", "job.yaml", job=f"{CLAIM}---\n{JOB}").code == 0


def test_validate_accepts_a_generated_name_and_checks_its_length(paceline: Any) -> None:
    """`kubectl create` takes such a file; the API server adds five letters to the prefix."""
    for prefix, code in (("digits-", 0), ("d" * 40, 0), ("d" * 41, 2), ("Digits-", 2)):
        text = JOB.replace("name: digits", f"generateName: {prefix}")
        assert paceline("validate", "job.yaml", job=text).code == code, prefix


@pytest.mark.parametrize("command", ["validate", "run"])
@pytest.mark.parametrize(
    ("job", "parts"),
    [
        (JOB.replace("replicas: 4", "replcas: 4"), ["spec.replcas", "replicas", "line 5"]),
        (JOB.replace("quorum: 3", "quorum: 9"), ["spec.collective.quorum", "9", "hint: "]),
        (JOB.replace("maxReplicas: 5", "minReplicas: 5"), ["spec.minReplicas", "5", "4", "hint: "]),
        (JOB.replace("kind: TrainingJob", "kind: Job"), ["kind", "Job", "TrainingJob"]),
        (JOB.replace("name: trainer", "name: worker"), ["trainer", "hint: "]),
        ("a: [", ["job.yaml", "hint: "]),
        ("", ["job.yaml", "hint: "]),
        ("- 1\n- 2\n", ["job.yaml", "hint: "]),
    ],
    ids=["misspelt", "quorum", "minimum", "kind", "container", "no-yaml", "empty", "list"],
)
def test_an_invalid_job_file_is_explained_with_field_and_hint(
    paceline: Any, command: str, job: str, parts: list[str]
) -> None:
    output = paceline(command, "job.yaml", job=job)
    assert output.code == 2
    assert output.startswith("error: ")
    for part in parts:
        assert part in output, output


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["nothing.yaml"], ["nothing.yaml", "no such file", "hint: "]),
        (["job.yaml", "--set", "spec.collective.mode=Fast"], ["spec.collective.mode", "Fast"]),
        (["job.yaml", "--set", "mode"], ["mode", "hint: "]),
        (["job.yaml", "--replicas", "9"], ["spec.replicas", "9", "5"]),
        (["job.yaml", "--replicas", "0"], ["--replicas", "greater than or equal to 1"]),
        (["job.yaml", "--replicas", "many"], ["--replicas", "integer"]),
        (["job.yaml", "--inject", "kil:rank=1"], ["kil", "known: "]),
        (["job.yaml", "--inject", "kill:rank=7,at=round:5"], ["the job has 4 ranks", "0 to 3"]),
        (["job.yaml", "--inject", "join:at=round:5,n=2"], ["spec.maxReplicas = 5", "hint: "]),
        (["job.yaml", "--set", "spec.suspend=true"], ["spec.suspend", "spec.suspend=false"]),
        (["job.yaml", "--run-dir", "job.yaml"], ["run folder job.yaml", "is a file"]),
        (["job.yaml", "--fast"], ["--fast"]),
        ([], ["JOB.YAML"]),
    ],
)
def test_an_invalid_command_line_is_explained(
    paceline: Any, words: list[str], parts: list[str]
) -> None:
    output = paceline("run", *words)
    assert output.code == 2
    for part in parts:
        assert part.lower() in output.lower(), output


def test_a_working_dir_that_does_not_exist_is_reported(paceline: Any) -> None:
    job = JOB.replace("image: none", "image: none, workingDir: /app/nowhere")
    output = paceline("run", "job.yaml", job=job)
    assert output.code == 2
    assert "workingDir" in output
    assert "/app/nowhere" in output
