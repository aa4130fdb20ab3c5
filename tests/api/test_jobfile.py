"""The file that a resolved job is frozen in: its text, and the errors for other files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from paceline_api.errors import EXIT_BAD_INPUT, JobFileError
from paceline_api.jobfile import CheckpointSpec, JobFile, read_job_file, read_resolved_job
from paceline_api.reading.load import parse_job
from paceline_api.resolve import resolve

GOLDEN = Path(__file__).parent / "golden/job.json"
JOB = """
apiVersion: paceline.dev/v1alpha1
kind: TrainingJob
metadata: {name: job}
spec:
  replicas: 4
  procsPerReplica: 2
  elasticity: {allowedSizes: [2, 4]}
  collective: {mode: Quorum, quorum: 75%, maxAgePolicy: Decay, grace: 3ms, benchAfter: 5s}
  checkpoint: {path: /checkpoints, everyRounds: 50}
  failurePolicy: {rules: [{action: FailJob, onExitCodes: [42]}]}
  template:
    spec:
      containers:
        - name: trainer
          image: none
          command: [python, train.py]
          args: ["--lr=$(LR)", "--out=$(WHERE)"]
          env: [{name: LR, value: "0.1"}]
"""
RESOLVED = resolve(parse_job(JOB))


def test_the_frozen_job_file_matches_the_golden_file() -> None:
    """Check the text itself, because agents and ranks of other releases read it too."""
    trainer = RESOLVED.trainer
    made = JobFile.of(
        RESOLVED,
        command=trainer.command,
        env=trainer.env.items(),
        working_dir="/w",
        record=True,
    )
    assert made.to_json() + "\n" == GOLDEN.read_text()


def test_the_golden_file_is_read_back() -> None:
    file = read_job_file(GOLDEN)
    assert file.command == ("python", "train.py", "--lr=0.1", "--out=$(WHERE)")
    assert file.env == (("LR", "0.1"),)
    assert (file.replicas, file.procs, file.record) == (4, 2, True)
    assert file.checkpoint == CheckpointSpec("/checkpoints", 50, 3)
    assert read_resolved_job(GOLDEN) == RESOLVED


def test_an_agent_ignores_values_that_only_a_newer_coordinator_understands(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    content = json.loads(GOLDEN.read_text())
    content["job"]["collective"]["mode"] = "Telepathy"
    file.write_text(json.dumps(content | {"new": 1}))
    assert read_job_file(file).procs == 2
    with pytest.raises(JobFileError, match=r"not a resolved job: .*Telepathy"):
        read_resolved_job(file)


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (None, "cannot be read: no such file"),
        ("[]", "is not the file of a frozen job: Expected `object`"),
        ('{"command": ["x"]}', "is not the file of a frozen job: Object missing required field"),
        (GOLDEN.read_text().replace('"command": [', '"command": [], "old": [', 1), "no command"),
    ],
)
def test_an_invalid_job_file_is_rejected_and_named(
    tmp_path: Path, content: str | None, wrong: str
) -> None:
    file = tmp_path / "job.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(JobFileError, match=wrong) as refused:
        read_job_file(file)
    assert str(file) in refused.value.message
    assert "PACELINE_SPEC" in refused.value.hint
    assert refused.value.exit_code == EXIT_BAD_INPUT
