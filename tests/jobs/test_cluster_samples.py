"""Collecting samples from the agents of a cluster job for its report."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from paceline.cli.choice import Where
from paceline.cli.report import report
from paceline.core.anatomy.steps_token import STEPS_HEADER, WRONG_TOKEN, steps_token
from paceline.jobs import places
from paceline.jobs.cluster import samples
from paceline.jobs.cluster.jobs import ClusterJobs
from paceline.jobs.core.sampled import procs
from paceline.jobs.errors import AwayError, NoSamplesError, NotAllowedError
from paceline_api.errors import PacelineError

from testing.anatomy_samples import pods as sampled
from testing.jobs.scripted_server import JOBS, ScriptedServer
from tests.jobs.test_cluster_logs import PODS, listed
from tests.jobs.test_cluster_logs import pod as logged

PORT = 9999
TOKEN_FROM = {
    "name": "PACELINE_TOKEN",
    "valueFrom": {"secretKeyRef": {"name": "job-u-1-key", "key": "token"}},
}
SECRET = "/api/v1/namespaces/team/secrets/job-u-1-key"
REFUSED = "error trying to reach service: dial tcp 10.1.2.3:9999: connect: connection refused"


def job(state: str) -> dict[str, Any]:
    meta = {"name": "job", "namespace": "team", "uid": "u-1", "resourceVersion": "1"}
    spec = {"replicas": 3, "suspend": state == "Suspended"}
    return {"metadata": meta, "spec": spec, "status": {"state": state}}


def pod(slot: int, phase: str = "Running") -> dict[str, Any]:
    body = logged(slot, phase, "running")
    env = [{"name": "PACELINE_METRICS_PORT", "value": str(PORT)}, TOKEN_FROM]
    body["spec"]["containers"] = [{"name": "sidecar"}, {"name": "trainer", "env": env}]
    return body


def steps_of(slot: int) -> str:
    return f"{PODS}/job-{slot}-0:{PORT}/proxy/steps"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """Yield a server with a job of three workers that all answer."""
    made = ScriptedServer()
    made.answers["GET", f"{JOBS}/job"] = 200, job("Training")
    made.answers["GET", PODS] = listed(*map(pod, range(3)))
    token = base64.b64encode(b"token-of-the-ranks").decode()
    made.answers["GET", SECRET] = 200, {"data": {"token": token}}
    for own in sampled():
        made.answers["GET", steps_of(own.slot)] = 200, msgspec.json.encode(own).decode()
    yield made
    made.close()


@pytest.fixture
def jobs(server: ScriptedServer, tmp_path: Path) -> ClusterJobs:
    return places.cluster(server.kubeconfig(tmp_path))


def test_samples_are_requested_from_each_running_worker(
    server: ScriptedServer, jobs: ClusterJobs
) -> None:
    """Requests go to the metrics port in the pod's environment.

    Pods that are pending or have ended are not asked.
    """
    server.answers["GET", PODS] = listed(pod(0), pod(1, "Pending"), pod(2), pod(3, "Failed"))
    result = jobs.samples("job")
    assert [own.slot for own in result.pods] == [0, 2]
    assert not result.silent
    assert not result.folder


@pytest.mark.long
def test_workers_that_do_not_answer_are_named_with_the_reason(
    server: ScriptedServer, jobs: ClusterJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "LIMIT_S", 0.5)
    server.answers["GET", PODS] = listed(*map(pod, range(5)))
    server.refuses("GET", steps_of(1), 503, "ServiceUnavailable", REFUSED)
    server.hangs.add(steps_of(2))
    server.answers["GET", steps_of(3)] = 404, "404: Not Found"
    server.answers["GET", steps_of(4)] = 200, "<html>welcome</html>"
    result = jobs.samples("job")
    assert [own.slot for own in result.pods] == [0]
    reasons = {one.pod: one.why for one in result.silent}
    assert reasons.pop("job-4-0").startswith("it answers with something else: JSON is malformed")
    assert reasons == {
        "job-1-0": "dial tcp 10.1.2.3:9999: connect: connection refused",
        "job-2-0": "no answer within 0.5 s",
        "job-3-0": "404: Not Found",
    }


def test_an_answer_over_the_size_limit_is_rejected(
    server: ScriptedServer, jobs: ClusterJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "bytes_max", lambda _: 1000)
    server.answers["GET", PODS] = listed(pod(0))
    with pytest.raises(AwayError, match=r"none of the 1 workers .* larger than 1,000 bytes") as no:
        jobs.samples("job")
    assert "spec.metrics.port" in no.value.hint


def test_samples_that_claim_ranks_of_another_pod_are_rejected(
    server: ScriptedServer, jobs: ClusterJobs
) -> None:
    """The pods that answer wrongly are named, and the others are still used."""
    first, second, third = sampled()
    claimed = replace(third, slot=1, ranks=(replace(third.ranks[0], member="1.0#0"),))
    hostile = replace(second, ranks=(replace(second.ranks[0], member="<img src=x onerror=y>"),))
    server.answers["GET", steps_of(1)] = 200, msgspec.json.encode(hostile).decode()
    server.answers["GET", steps_of(2)] = 200, msgspec.json.encode(claimed).decode()
    result = jobs.samples("job")
    assert result.pods == (first,)
    reasons = {one.pod: one.why for one in result.silent}
    assert "member" in reasons["job-1-0"]
    assert "slot 1, and it is slot 2" in reasons["job-2-0"]


@pytest.mark.parametrize(("value", "bound"), [("4", 4), ("", 1), ("x", 1), ("9" * 5000, 1)])
def test_the_process_count_of_a_pod_is_read_from_its_environment(value: str, bound: int) -> None:
    body = pod(0)
    body["spec"]["containers"][1]["env"].append({"name": "PACELINE_PROCS", "value": value})
    assert procs(body) == bound


def test_an_invented_round_number_does_not_exhaust_memory(
    server: ScriptedServer, jobs: ClusterJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (own,) = sampled()[0].ranks
    last = replace(own.rounds[-1], round=2**62)
    liar = replace(sampled()[0], ranks=(replace(own, rounds=(*own.rounds, last)),))
    server.answers["GET", steps_of(0)] = 200, msgspec.json.encode(liar).decode()
    where = Where("team", None, server.kubeconfig(tmp_path))
    report("job", where, "2:3", None)
    assert "Rounds 2 to 3" in (tmp_path / "job-report/report.html").read_text()
    with pytest.raises(PacelineError, match="known are 0 to"):
        report("job", where, "-5:-1", None)


def test_missing_permission_for_pods_proxy_names_the_role_that_has_it(
    server: ScriptedServer, jobs: ClusterJobs
) -> None:
    message = 'pods "job-0-0" is forbidden: User "guest" cannot get resource "pods/proxy"'
    server.refuses("GET", steps_of(0), 403, "Forbidden", message)
    with pytest.raises(NotAllowedError, match="pods/proxy") as no:
        jobs.samples("job")
    assert "role `edit` in the namespace team" in no.value.hint


def test_each_request_carries_the_steps_token_derived_from_the_secret(
    server: ScriptedServer, jobs: ClusterJobs
) -> None:
    """The secret's own token is never sent.

    Anyone who reads the plain HTTP traffic could use it to connect to the coordinator.
    """
    jobs.samples("job")
    for slot in range(3):
        (headers,) = server.headers["GET", steps_of(slot)]
        assert headers[STEPS_HEADER] == steps_token("token-of-the-ranks")
        assert "token-of-the-ranks" not in str(headers)


def test_missing_permission_for_secrets_names_the_role_that_has_it(
    server: ScriptedServer, jobs: ClusterJobs
) -> None:
    server.refuses("GET", SECRET, 403, "Forbidden", 'secrets "job-u-1-key" is forbidden')
    with pytest.raises(NotAllowedError, match="secrets") as no:
        jobs.samples("job")
    assert "role `edit` in the namespace team" in no.value.hint


def test_an_agent_that_rejects_the_token_is_named_and_the_others_are_read(
    server: ScriptedServer, jobs: ClusterJobs
) -> None:
    refusal = {"message": f"the header {STEPS_HEADER} is missing or wrong", "reason": WRONG_TOKEN}
    server.answers["GET", steps_of(1)] = 403, refusal
    result = jobs.samples("job")
    assert [own.slot for own in result.pods] == [0, 2]
    assert [(one.pod, one.why) for one in result.silent] == [("job-1-0", refusal["message"])]


@pytest.mark.parametrize("data", [{}, {"token": "%%%"}, {"token": "//79"}, None])
def test_a_secret_without_a_token_does_not_fail_the_command(
    server: ScriptedServer, jobs: ClusterJobs, data: object
) -> None:
    """The agents decide whether to answer; old agents require no token."""
    server.answers["GET", SECRET] = 200, {"data": data} if data is not None else {}
    assert [own.slot for own in jobs.samples("job").pods] == [0, 1, 2]
    (headers,) = server.headers["GET", steps_of(0)]
    assert headers.get(STEPS_HEADER, "") == ""


@pytest.mark.parametrize(
    ("state", "words", "hint"),
    [
        ("Complete", "is Complete, and what was known .* went with its pods", "while it trains"),
        ("Failed", "is Failed", "while it trains"),
        ("Suspended", "is Suspended and has no pods", "`paceline resume job -n team`"),
        ("Starting", r"no worker of job job runs \(Starting\)", "--for training"),
    ],
)
def test_a_job_without_running_pods_fails_with_a_hint(
    server: ScriptedServer, jobs: ClusterJobs, state: str, words: str, hint: str
) -> None:
    server.answers["GET", f"{JOBS}/job"] = 200, job(state)
    server.answers["GET", PODS] = listed(pod(0, "Succeeded"))
    with pytest.raises(NoSamplesError, match=words) as no:
        jobs.samples("job")
    assert hint in no.value.hint


def test_a_job_without_samples_says_that_no_step_was_made(
    server: ScriptedServer, jobs: ClusterJobs
) -> None:
    for own in sampled():
        (rank,) = own.ranks
        empty = replace(own, ranks=(replace(rank, steps=(), rounds=()),))
        server.answers["GET", steps_of(own.slot)] = 200, msgspec.json.encode(empty).decode()
    with pytest.raises(NoSamplesError, match="no rank of job job has made a step yet"):
        jobs.samples("job")


def test_the_report_of_a_cluster_job_names_missing_pods_in_output_and_page(
    server: ScriptedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    server.refuses("GET", steps_of(1), 503, "ServiceUnavailable", REFUSED)
    where = Where("team", None, server.kubeconfig(tmp_path))
    report("job", where, "2:3", None)
    output = capsys.readouterr().out
    assert output.startswith("job job: 2 ranks, mode unknown, 100.0 ms per step\n")
    assert "mostly worker 2.0" in output
    missing = "without job-1-0: dial tcp 10.1.2.3:9999: connect: connection refused"
    assert f"  {missing}\n" in output
    assert "page: job-report/report.html\n" in output
    page = (tmp_path / "job-report/report.html").read_text()
    assert missing in page
    assert "Rounds 2 to 3" in page
    events = json.loads((tmp_path / "job-report/trace.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "worker 0.0#0",
        "worker 2.0#0",
    }
