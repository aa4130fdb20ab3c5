"""Cluster verbs against a scripted API server: each mistake gives one error and one hint."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from paceline.cli.main import main
from paceline.jobs.cluster import server as access_to_server

from testing.jobs.scripted_server import JOBS, TOKEN, ScriptedServer

JOB = """\
apiVersion: paceline.dev/v1alpha1
kind: TrainingJob
metadata: {name: digits}
spec:
  replicas: 4
  template:
    spec:
      containers: [{name: trainer, image: none, command: [python, train.py]}]
"""


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    made = ScriptedServer()
    yield made
    made.close()


Call = Callable[..., tuple[int, str]]


@pytest.fixture
def paceline(
    tmp_path: Path,
    server: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Call:
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    # The pause between two watches; this server ends each watch at once.
    monkeypatch.setattr(access_to_server, "REST_S", 0.001)

    def call(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", *words])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert TOKEN not in out + err
        return int(end.value.code or 0), out + err

    return call


def error_and_hint(output: str) -> tuple[str, str]:
    """Return the error line and the hint line of an output that consists of both."""
    error, hint = output.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    return error, hint


def test_shell_completion_offers_verbs_jobs_and_contexts(
    paceline: Call, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_PACELINE_COMPLETE", "complete_bash")

    def offered(*words: str) -> list[str]:
        monkeypatch.setenv("COMP_WORDS", " ".join(["paceline", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        return paceline()[1].split()

    body = {"metadata": {"name": "digits", "namespace": "team"}, "spec": {"replicas": 1}}
    server.answers["GET", JOBS] = 200, {"items": [body]}
    assert offered("expl") == ["explain"]
    assert offered("logs", "dig") == ["digits"]
    assert offered("logs", "--context", "h") == ["here"]
    server.close()
    assert offered("logs", "dig") == []


def body(state: str, version: str, **status: Any) -> dict[str, Any]:
    meta = {"name": "digits", "namespace": "team", "uid": "u", "resourceVersion": version}
    return {"metadata": meta, "spec": {"replicas": 1}, "status": {"state": state, **status}}


def lists(*bodies: dict[str, Any], version: str = "7") -> tuple[int, Any]:
    return 200, {"metadata": {"resourceVersion": version}, "items": list(bodies)}


def event(kind: str, content: dict[str, Any]) -> str:
    return json.dumps({"type": kind, "object": content}) + "\n"


PODS = "/api/v1/namespaces/team/pods"
VERBS = ("status", "logs", "wait", "suspend", "delete", "events", "explain", "report")


@pytest.mark.parametrize(("state", "code"), [("Complete", 0), ("Failed", 1)])
def test_wait_restarts_interrupted_watches_until_the_job_ends(
    paceline: Call, server: ScriptedServer, state: str, code: int
) -> None:
    """The first watch expires (410), the server ends the second, the third reports the end."""
    server.answers["GET", f"{JOBS}/digits"] = 200, body("Starting", "5")
    server.answers["GET", JOBS] = [lists(body("Starting", "5")), lists(body("Training", "6"))]
    gone = event("ERROR", {"kind": "Status", "code": 410})
    events = event("MODIFIED", body("Training", "8")) + event("MODIFIED", body(state, "9"))
    server.answers["WATCH", JOBS] = [(200, gone), (200, ""), (200, events)]
    server.answers["GET", PODS] = lists()
    got, output = paceline("wait", "digits")
    assert (got, output) == (code, f"job digits: {state}\n")


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.long
def test_watching_requests_frequent_metrics_once(
    paceline: Call, server: ScriptedServer, allowed: bool
) -> None:
    """The job is annotated once.

    A user who may not patch the job still sees the status, with the metrics of each minute.
    """
    server.answers["GET", f"{JOBS}/digits"] = 200, body("Training", "5")
    server.answers["GET", JOBS] = lists(body("Training", "5"))
    server.answers["GET", PODS] = lists()
    events = event("MODIFIED", body("Training", "8")) + event("MODIFIED", body("Complete", "9"))
    server.answers["WATCH", JOBS] = 200, events
    server.refuses("PATCH", f"{JOBS}/digits", 403, "Forbidden", "cannot patch")
    if allowed:
        server.answers["PATCH", f"{JOBS}/digits"] = 200, {}
    code, output = paceline("status", "digits", "--watch")
    assert code == 0
    assert "cannot" not in output
    (asked,) = server.bodies["PATCH", f"{JOBS}/digits"]
    assert list(asked["metadata"]["annotations"]) == ["paceline.dev/watched-until"]


@pytest.mark.long
def test_wait_times_out_with_exit_code_3(paceline: Call, server: ScriptedServer) -> None:
    server.answers["GET", f"{JOBS}/digits"] = 200, body("Starting", "5")
    server.answers["GET", JOBS] = lists(body("Starting", "5"))
    server.answers["WATCH", JOBS] = 200, ""
    code, output = paceline("wait", "digits", "--timeout", "1s")
    error, hint = error_and_hint(output)
    assert code == 3
    assert "job digits is Starting after 1 s, and not yet ended" in error
    assert "paceline explain digits" in hint


@pytest.mark.long
def test_waiting_for_suspended_ends_when_the_last_pod_is_gone(
    paceline: Call, server: ScriptedServer
) -> None:
    """The operator sets the state Suspended before it deletes the pods."""
    suspended = body("Suspended", "5")
    suspended["spec"]["suspend"] = True
    server.answers["GET", f"{JOBS}/digits"] = 200, suspended
    server.answers["GET", JOBS] = lists(suspended)
    own = {"metadata": {"name": "digits-0-1", "ownerReferences": [{"uid": "u"}]}}
    server.answers["GET", PODS] = lists(own)
    server.answers["WATCH", PODS] = 200, ""
    code, output = paceline("wait", "digits", "--for", "suspended", "--timeout", "1s")
    assert code == 3, output
    server.answers["GET", PODS] = [lists(own), lists()]
    server.answers["WATCH", PODS] = 200, event("DELETED", own)
    code, output = paceline("wait", "digits", "--for", "suspended")
    assert (code, output) == (0, "job digits: Suspended\n")


def test_wait_ends_with_an_error_when_the_job_is_deleted(
    paceline: Call, server: ScriptedServer
) -> None:
    server.answers["GET", f"{JOBS}/digits"] = 200, body("Training", "5")
    server.answers["GET", JOBS] = lists(body("Training", "5"))
    server.answers["WATCH", JOBS] = 200, event("DELETED", body("Training", "8"))
    code, output = paceline("wait", "digits")
    error, _ = error_and_hint(output)
    assert code == 2
    assert "deleted while it was waited for" in error


def test_submit_sends_the_job_file_with_its_overrides(
    paceline: Call, server: ScriptedServer
) -> None:
    server.answers["POST", JOBS] = 201, body("", "5")
    code, output = paceline("submit", "job.yaml", "--set", "spec.replicas=3")
    assert code == 0, output
    assert "digits" in output
    (sent,) = server.bodies["POST", JOBS]
    assert (sent["kind"], sent["metadata"]["name"]) == ("TrainingJob", "digits")
    assert sent["spec"]["replicas"] == 3
    assert sent["spec"]["template"]["spec"]["containers"][0]["command"] == ["python", "train.py"]


@pytest.mark.parametrize(
    ("words", "spec"),
    [
        (("scale", "digits", "--replicas", "6"), {"replicas": 6}),
        (("suspend", "digits"), {"suspend": True}),
        (("resume", "digits"), {"suspend": False}),
    ],
)
def test_scale_suspend_and_resume_each_patch_one_field(
    paceline: Call, server: ScriptedServer, words: tuple[str, ...], spec: dict[str, Any]
) -> None:
    job = body("Training", "5")
    job["spec"] |= {"replicas": 4, "suspend": not spec.get("suspend", True)}
    server.answers["GET", f"{JOBS}/digits"] = 200, job
    for path in (f"{JOBS}/digits", f"{JOBS}/digits/scale"):
        server.answers["PATCH", path] = 200, job
    code, output = paceline(*words)
    assert code == 0, output
    sent = [
        what
        for (method, _), all_of in server.bodies.items()
        if method == "PATCH"
        for what in all_of
    ]
    assert [what["spec"] for what in sent] == [spec]


def test_delete_waits_until_the_last_pod_is_gone(paceline: Call, server: ScriptedServer) -> None:
    """The job object is already gone while one of its pods still terminates.

    A pod of a newer job with the same name is ignored.
    """
    missing = {"reason": "NotFound", "message": 'trainingjobs.paceline.dev "digits" not found'}
    server.answers["GET", f"{JOBS}/digits"] = [(200, body("Training", "5")), (404, missing)]
    server.answers["DELETE", f"{JOBS}/digits"] = 200, {"status": "Success"}
    own, other = (
        {"metadata": {"name": name, "ownerReferences": [{"kind": "TrainingJob", "uid": uid}]}}
        for name, uid in (("digits-0-1", "u"), ("digits-0-2", "new"))
    )
    server.answers["GET", PODS] = [lists(own, other), lists(other)]
    server.answers["WATCH", PODS] = 200, event("DELETED", own)
    code, output = paceline("delete", "digits")
    assert (code, output) == (0, f"job digits of namespace team of {server.url} is deleted\n")


def test_a_missing_kubeconfig_is_reported(
    paceline: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBECONFIG")
    code, output = paceline("submit", "job.yaml")
    error, hint = error_and_hint(output)
    assert code == 2
    assert "there is no kubeconfig" in error
    assert "--kubeconfig" in hint
    code, output = paceline("status", "digits")
    error, _ = error_and_hint(output)
    assert code == 2
    assert "no job digits is running here" in error
    assert "no kubeconfig" in error


def test_a_kubeconfig_path_that_does_not_exist_is_reported(paceline: Call) -> None:
    code, output = paceline("status", "digits", "--kubeconfig", "nothing")
    error, _ = error_and_hint(output)
    assert code == 2
    assert "nothing is unusable: No such file" in error


def test_an_unknown_context_is_reported_with_the_known_ones(paceline: Call) -> None:
    code, output = paceline("logs", "digits", "--context", "there")
    error, hint = error_and_hint(output)
    assert code == 2
    assert "there is no context 'there'" in error
    assert "use one of: here" in hint


def test_an_unreachable_api_server_is_reported(paceline: Call, server: ScriptedServer) -> None:
    server.close()
    code, output = paceline("wait", "digits", "-n", "team", "--timeout", "1s")
    error, hint = error_and_hint(output)
    assert code == 1
    assert f"the API server {server.url} does not answer" in error
    assert "refused" in error
    assert "0x" not in error
    assert "--context" in hint


def test_a_refused_login_is_reported(paceline: Call, server: ScriptedServer) -> None:
    server.refuses("GET", f"{JOBS}/digits", 401, "Unauthorized", "Unauthorized")
    code, output = paceline("status", "digits")
    error, hint = error_and_hint(output)
    assert code == 2
    assert "does not accept the login of context 'here'" in error
    assert "log in again" in hint


def test_missing_rights_are_reported_with_the_role_to_ask_for(
    paceline: Call, server: ScriptedServer
) -> None:
    message = 'trainingjobs.paceline.dev "digits" is forbidden: User "me" cannot delete it'
    server.refuses("GET", f"{JOBS}/digits", 403, "Forbidden", message)
    code, output = paceline("delete", "digits")
    error, hint = error_and_hint(output)
    assert code == 2
    assert message in error
    assert "role `edit` in the namespace team" in hint


def test_a_cluster_without_the_crd_is_reported_as_not_installed(paceline: Call) -> None:
    for words in (["submit", "job.yaml"], ["status", "digits"], ["status", "-n", "team"]):
        code, output = paceline(*words)
        error, hint = error_and_hint(output)
        assert code == 2
        assert "does not know TrainingJobs: Paceline is not installed" in error
        assert "paceline-crds" in hint


def test_a_crd_of_another_version_is_reported(paceline: Call, server: ScriptedServer) -> None:
    server.answers["GET", "/apis/paceline.dev"] = 200, {"versions": [{"version": "v1alpha0"}]}
    code, output = paceline("submit", "job.yaml")
    error, hint = error_and_hint(output)
    assert code == 2
    assert "has TrainingJobs of paceline.dev/v1alpha0" in error
    assert "this paceline supports v1alpha1" in error
    assert "upgrade the charts" in hint


def test_a_crd_without_a_known_field_is_reported_as_another_release(
    paceline: Call, server: ScriptedServer
) -> None:
    message = 'strict decoding error: unknown field "spec.collective.wire"'
    server.refuses("POST", JOBS, 400, "BadRequest", message)
    code, output = paceline("submit", "job.yaml", "--set", "spec.collective.wire=BFloat16")
    error, hint = error_and_hint(output)
    assert code == 2
    assert "another release of Paceline" in error
    assert "spec.collective.wire" in error
    assert "paceline-crds" in hint


def test_a_job_name_that_is_taken_is_reported(paceline: Call, server: ScriptedServer) -> None:
    message = 'trainingjobs.paceline.dev "digits" already exists'
    server.refuses("POST", JOBS, 409, "AlreadyExists", message)
    code, output = paceline("submit", "job.yaml")
    error, hint = error_and_hint(output)
    assert code == 2
    assert "there is already a job digits in the namespace team" in error
    assert "paceline delete digits" in hint


def test_every_verb_reports_an_unknown_job(paceline: Call, server: ScriptedServer) -> None:
    message = 'trainingjobs.paceline.dev "digits" not found'
    server.refuses("GET", f"{JOBS}/digits", 404, "NotFound", message)
    for verb in VERBS:
        if verb == "suspend":
            server.refuses("PATCH", f"{JOBS}/digits", 404, "NotFound", message)
        code, output = paceline(verb, "digits")
        error, hint = error_and_hint(output)
        assert code == 2
        assert "there is no job digits in the namespace team" in error
        assert "-n names another namespace" in hint


def test_an_unknown_namespace_is_reported(paceline: Call, server: ScriptedServer) -> None:
    server.refuses("POST", JOBS, 404, "NotFound", 'namespaces "team" not found')
    code, output = paceline("submit", "job.yaml")
    error, _ = error_and_hint(output)
    assert code == 2
    assert "there is no namespace team in the cluster" in error


def test_a_namespace_that_contradicts_the_job_file_is_refused(
    paceline: Call, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(JOB.replace("name: digits", "name: digits, namespace: a"))
    code, output = paceline("submit", "job.yaml", "-n", "team")
    error, hint = error_and_hint(output)
    assert code == 2
    assert "metadata.namespace a, and not team" in error
    assert "-n a" in hint


@pytest.mark.parametrize("rank", ["4", "-1"])
def test_a_rank_out_of_range_is_refused_with_the_valid_range(
    paceline: Call, server: ScriptedServer, rank: str
) -> None:
    body = {"metadata": {"name": "digits", "uid": "u"}, "spec": {"replicas": 4}}
    server.answers["GET", f"{JOBS}/digits"] = 200, body
    server.answers["GET", "/api/v1/namespaces/team/pods"] = 200, {"items": []}
    code, output = paceline("logs", "digits", "--rank", rank)
    error, hint = error_and_hint(output)
    assert code == 2
    assert f"job digits has no rank {rank}" in error
    assert "use 0 to 3" in hint


def test_a_malformed_timeout_is_refused(paceline: Call) -> None:
    code, output = paceline("wait", "digits", "--timeout", "soon")
    error, hint = error_and_hint(output)
    assert code == 2
    assert '"soon" is not a duration' in error
    assert "90s" in hint


def test_a_server_that_is_not_kubernetes_is_reported(
    paceline: Call, server: ScriptedServer
) -> None:
    server.answers["GET", f"{JOBS}/digits"] = 200, "<html>welcome</html>"
    code, output = paceline("status", "digits")
    error, hint = error_and_hint(output)
    assert code == 2
    assert "is not an object in JSON" in error
    assert "API server" in hint


def test_an_unavailable_api_server_is_reported(paceline: Call, server: ScriptedServer) -> None:
    server.refuses("GET", f"{JOBS}/digits", 503, "ServiceUnavailable", "etcd has no leader")
    code, output = paceline("status", "digits")
    error, _ = error_and_hint(output)
    assert code == 1
    assert "cannot answer now (503): etcd has no leader" in error


def test_a_missing_kubernetes_package_is_reported_with_the_extra_to_install(
    paceline: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "kubernetes"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("paceline_api.access.access", "paceline.jobs.cluster.jobs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    code, output = paceline("submit", "job.yaml")
    error, hint = error_and_hint(output)
    assert code == 2
    assert "needs the package kubernetes" in error
    assert "paceline[kubernetes]" in hint
