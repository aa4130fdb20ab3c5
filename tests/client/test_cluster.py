"""The requests of `train` to an API server, and the errors when a request fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from paceline.client import JobClient
from paceline.function.errors import FunctionError
from paceline.jobs.errors import (
    AwayError,
    NameTakenError,
    NotAllowedError,
    NotInstalledError,
)
from paceline_api.access.errors import ContextError, KubeconfigError, RefusedError
from paceline_api.errors import PacelineError

from testing.jobs.scripted_server import JOBS, TOKEN, ScriptedServer

CONFIG_MAPS = "/api/v1/namespaces/team/configmaps"
STORED = {
    "metadata": {"name": "job", "namespace": "team", "uid": "u-1"},
    "spec": {"replicas": 2},
}


def train() -> None: ...


def closing_over(word: str) -> Callable[[], str]:
    def inner() -> str:
        return word

    return inner


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    made = ScriptedServer()
    yield made
    made.close()


@pytest.fixture
def kubeconfig(server: ScriptedServer, tmp_path: Path) -> Path:
    return server.kubeconfig(tmp_path)


@pytest.fixture
def client(kubeconfig: Path) -> JobClient:
    return JobClient.from_kubeconfig(kubeconfig)


def refused(call: Any, kind: type[PacelineError], words: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert words in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint
    assert TOKEN not in str(caught.value)


def test_the_client_shows_its_namespace_and_server(
    client: JobClient, server: ScriptedServer
) -> None:
    assert repr(client) == f"<JobClient of namespace team of {server.url}>"


def test_a_function_goes_into_a_config_map(client: JobClient, server: ScriptedServer) -> None:
    server.answers["POST", JOBS] = 201, STORED
    server.answers["POST", CONFIG_MAPS] = 201, {}
    assert client.train(train, name="job").name == "job"


def test_a_job_whose_config_map_is_refused_reports_the_missing_right(
    client: JobClient, server: ScriptedServer
) -> None:
    server.answers["POST", JOBS] = 201, STORED
    server.refuses("POST", CONFIG_MAPS, 403, "Forbidden", "configmaps is forbidden: User me")
    server.answers["DELETE", f"{JOBS}/job"] = 200, {}
    refused(lambda: client.train(train, name="job"), NotAllowedError, "configmaps is forbidden")


def test_a_missing_kubeconfig_is_reported(tmp_path: Path) -> None:
    refused(lambda: JobClient.from_kubeconfig(tmp_path / "none"), KubeconfigError, "none")


def test_an_unknown_context_is_reported(kubeconfig: Path) -> None:
    refused(lambda: JobClient.from_kubeconfig(kubeconfig, context="there"), ContextError, "there")


def test_a_job_name_that_is_taken_is_reported(client: JobClient, server: ScriptedServer) -> None:
    server.refuses("POST", JOBS, 409, "AlreadyExists", "trainingjobs job already exists")
    refused(lambda: client.train(train, name="job"), NameTakenError, "already a job job")


def test_missing_rights_are_reported(client: JobClient, server: ScriptedServer) -> None:
    server.refuses("POST", JOBS, 403, "Forbidden", "trainingjobs is forbidden: User me")
    refused(lambda: client.train(train, name="job"), NotAllowedError, "forbidden")


def test_a_refused_login_is_reported(client: JobClient, server: ScriptedServer) -> None:
    server.refuses("POST", JOBS, 401, "Unauthorized", "Unauthorized")
    refused(lambda: client.train(train, name="job"), RefusedError, "does not accept the login")


def test_a_cluster_without_the_crd_is_reported_as_not_installed(client: JobClient) -> None:
    words = "does not know TrainingJobs: Paceline is not installed"
    refused(lambda: client.train(train, name="job"), NotInstalledError, words)


def test_a_crd_of_another_release_is_reported(client: JobClient, server: ScriptedServer) -> None:
    message = 'strict decoding error: unknown field "spec.collective.wire"'
    server.refuses("POST", JOBS, 400, "BadRequest", message)
    words = "are of another release of Paceline"
    refused(lambda: client.train(train, name="job"), NotInstalledError, words)


@pytest.mark.parametrize(
    ("function", "words"),
    [(lambda: None, "lambda"), (closing_over("x"), "closes over word")],
    ids=["a lambda", "a closure"],
)
def test_a_function_that_cannot_be_sent_is_refused_before_any_request(
    client: JobClient, function: Callable[[], Any], words: str
) -> None:
    refused(lambda: client.train(function, name="job"), FunctionError, words)


def test_an_unreachable_api_server_is_reported(client: JobClient, server: ScriptedServer) -> None:
    server.close()
    words = f"the API server {server.url} does not answer"
    refused(lambda: client.train(train, name="job"), AwayError, words)
    refused(lambda: client.list_jobs(), AwayError, words)


def test_an_unavailable_api_server_is_reported(client: JobClient, server: ScriptedServer) -> None:
    server.refuses("POST", JOBS, 503, "ServiceUnavailable", "later")
    refused(lambda: client.train(train, name="job"), AwayError, "cannot answer now")
