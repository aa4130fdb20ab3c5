"""`paceline plan` for a cluster job: rows come from its agents and are kept for its next size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from paceline.cli.choice import Where
from paceline.cli.output import Output
from paceline.cli.plan import PlanArguments, plan
from paceline.jobs.errors import NoSamplesError
from paceline_api.errors import PacelineError

from testing.forecast_samples import pods as sampled
from testing.forecast_samples import rank
from testing.jobs.scripted_server import JOBS, ScriptedServer
from tests.jobs.test_cluster_logs import PODS, listed
from tests.jobs.test_cluster_samples import REFUSED, pod, steps_of


def job(replicas: int, state: str = "Training") -> dict[str, Any]:
    container = {"name": "trainer", "image": "mine", "command": ["python", "train.py"]}
    return {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "job", "namespace": "team", "uid": "u-1", "resourceVersion": "1"},
        "spec": {
            "replicas": replicas,
            "maxReplicas": 8,
            "collective": {"mode": "Quorum", "quorum": "50%"},
            "template": {"spec": {"containers": [container]}},
        },
        "status": {"state": state, "membershipGeneration": f"1.{replicas}"},
    }


def train(server: ScriptedServer, replicas: int) -> None:
    """Let every rank compute for 40 ms in a step of 100 ms."""
    server.answers["GET", f"{JOBS}/job"] = 200, job(replicas)
    server.answers["GET", PODS] = listed(*map(pod, range(replicas)))
    for own in sampled(*(rank(slot, 40, 10) for slot in range(replicas))):
        server.answers["GET", steps_of(own.slot)] = 200, msgspec.json.encode(own).decode()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ScriptedServer]:
    monkeypatch.chdir(tmp_path)
    made = ScriptedServer()
    yield made
    made.close()


def wanted(server: ScriptedServer, *, measure: bool = False) -> PlanArguments:
    return PlanArguments(
        job="job",
        where=Where("team", None, server.kubeconfig(Path())),
        measure=measure,
        ranks="2,4",
        model=None,
        batch=None,
        speedups=(),
        timeout="1m",
        overrides=(),
    )


def planned(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert plan(wanted(server), Output.JSON) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_plan_of_a_scaled_job_compares_with_the_earlier_forecast(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    train(server, 2)
    (two,) = planned(server, capsys)["compared"]
    assert (two["source"], two["setting"]["members"], two["setting"]["quorum"]) == (
        "job, 1.2",
        2,
        1,
    )
    assert two["step_s"] == pytest.approx(0.1)
    train(server, 4)
    result = planned(server, capsys)
    assert [one["source"] for one in result["compared"]] == ["job, 1.2", "job, 1.4"]
    assert result["compared"][1]["by"] == "plan before"
    assert [line["own"] for line in result["lines"] if line["mode"] == "Quorum 2"] == [True]
    # Measurements of this cluster do not apply to the same job file on this machine.
    (book,) = Path("runs").iterdir()
    Path("job.yaml").write_text(json.dumps(job(4)))
    with pytest.raises(PacelineError, match="too little was measured"):
        plan(replace(wanted(server), job="job.yaml", where=Where()), Output.JSON)
    assert list(Path("runs").iterdir()) == [book]


def test_plan_of_an_ended_job_uses_the_stored_measurements(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    train(server, 2)
    before = planned(server, capsys)
    server.answers["GET", f"{JOBS}/job"] = 200, job(2, "Complete")
    server.answers["GET", PODS] = listed(pod(0, "Succeeded"))
    assert plan(wanted(server), Output.JSON) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["lines"] == before["lines"]
    assert "only what was measured before is used" in captured.err


def test_plan_of_a_job_that_never_trained_reports_that_no_worker_runs(
    server: ScriptedServer,
) -> None:
    server.answers["GET", f"{JOBS}/job"] = 200, job(2, "Starting")
    server.answers["GET", PODS] = listed(pod(0, "Pending"))
    with pytest.raises(NoSamplesError, match="no worker of job job runs"):
        plan(wanted(server), None)


def test_plan_fails_if_a_worker_does_not_answer(server: ScriptedServer) -> None:
    """A row without that worker would describe a job of another size."""
    train(server, 2)
    server.refuses("GET", steps_of(1), 503, "ServiceUnavailable", REFUSED)
    with pytest.raises(NoSamplesError, match=r"1 of the 2 workers .* job-1-0: dial tcp"):
        plan(wanted(server), None)


def test_plan_refuses_to_measure_a_cluster_job_on_this_machine(server: ScriptedServer) -> None:
    train(server, 2)
    with pytest.raises(PacelineError, match="on this machine, and job is a job") as no:
        plan(wanted(server, measure=True), None)
    assert "paceline scale" in no.value.hint
