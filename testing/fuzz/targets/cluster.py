"""Input from a cluster: objects, and answers of coordinators, agents and the API server."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, cast
from unittest import mock

import msgspec
import yaml
from paceline.core.anatomy.samples import PodSamples
from paceline.jobs.cluster import samples, server
from paceline.jobs.cluster.server import ApiServer
from paceline.jobs.errors import JobsError
from paceline_api.decoding import UNDECODABLE
from paceline_api.errors import InvalidJobError
from paceline_api.names import (
    ENV_METRICS_PORT,
    ENV_PROCS,
    ENV_TOKEN,
    LABEL_ATTEMPT,
    LABEL_JOB,
    LABEL_ROLE,
    LABEL_SLOT,
)
from paceline_api.reading.load import job_from_mapping
from paceline_api.status import Status
from paceline_api.types.template import TRAINER
from paceline_operator.cluster import observe
from paceline_operator.cluster.api import ApiError
from paceline_operator.cluster.rights import words_of
from paceline_operator.cluster.store import Store
from paceline_operator.cluster.wire import FabricObject, NodeObject, PodObject
from paceline_operator.core.coordinator_status import (
    AnswerError,
    StatusLimits,
    read_coordinator_status,
)
from paceline_operator.metrics import OperatorMetrics

from testing.bad_specs import GOOD
from testing.fuzz.samples import json_samples
from testing.fuzz.target import Form, Reader, Target, pure

NOW_S: Final = 1_800_000_000.0

# ---- the operator's watches ----------------------------------------------------------------------


def _watch(source: Any) -> Reader:
    """Return a reader for the line of a watch or the page of a list; both end in the store."""
    watch: observe.Watch[Any] = observe.Watch(
        cast("Any", None), source, lambda: NOW_S, OperatorMetrics()
    )

    def reader(data: bytes) -> object:
        if data.startswith(b'{"items"'):
            page = watch.read_page(data)
            source.listed(page.items)
            return page
        watch.take(data)
        return None

    return reader


def _pods(_stack: ExitStack, _folder: Path) -> Reader:
    return _watch(observe.pod_source(_store(), lambda: NOW_S, ""))


def _nodes(_stack: ExitStack, _folder: Path) -> Reader:
    return _watch(observe.node_source(_store(), lambda: NOW_S))


def _fabrics(_stack: ExitStack, _folder: Path) -> Reader:
    return _watch(observe.fabric_source(_store()))


def _store() -> Store:
    return Store(lambda _key: None)


def _events(kind: Any, **fields: object) -> tuple[bytes, ...]:
    """Return the line of a watch and a page of a list, with one object each."""
    body = msgspec.json.decode(json_samples(kind)[0])
    body["metadata"] = {**body["metadata"], **fields}
    event = msgspec.json.encode({"type": "MODIFIED", "object": body})
    page = msgspec.json.encode({"items": [body], "metadata": {"resourceVersion": "7"}})
    return event, page


_LABELS: Final = {LABEL_JOB: "digits", LABEL_ROLE: "worker", LABEL_SLOT: "1", LABEL_ATTEMPT: "2"}
_TIMES: Final = {"creationTimestamp": "2026-11-27T10:00:00Z", "resourceVersion": "7"}

# ---- answers -------------------------------------------------------------------------------------


def _coordinator(data: bytes) -> object:
    return read_coordinator_status(data, StatusLimits.of(pods=4, procs=2))


class _OneAnswer:
    """A server whose only answer is the input."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def get(self, _path: str) -> dict[str, Any]:
        """Return the Secret of the job."""
        return {"data": {"token": "dG9rZW4="}}

    def body(self, _path: str, **_: object) -> bytes:
        """Return the input."""
        return self._data


def _steps(data: bytes) -> object:
    secret = {"secretKeyRef": {"name": "digits-1-a", "key": "token"}}
    environment = [
        {"name": ENV_METRICS_PORT, "value": "9000"},
        {"name": ENV_PROCS, "value": "2"},
        {"name": ENV_TOKEN, "valueFrom": secret},
    ]
    pod: dict[str, Any] = {
        "metadata": {"name": "digits-0-0", "labels": _LABELS},
        "spec": {"containers": [{"name": TRAINER, "env": environment}]},
    }
    return samples.ask(cast("ApiServer", _OneAnswer(data)), "/api/v1/namespaces/team", [pod])


class _Lines(ApiServer):
    """A server that sends the lines of the input."""

    def __init__(self, data: bytes) -> None:
        self.url = "https://here"
        self._lines = data

    def lines(self, path: str, query: Any = None, *, silence_s: float) -> Any:  # noqa: ARG002
        """Yield the lines of the input."""
        yield from self._lines.decode(errors="replace").split("\n")


def _laptops_watch(stack: ExitStack, _folder: Path) -> Reader:
    stack.enter_context(mock.patch.object(server, "pause"))
    return lambda data: list(_Lines(data).watch("/jobs", {}, timeout_s=1))


def _refusal(data: bytes) -> object:
    return _Lines(data).refused(409, data.decode(errors="replace"), "/api/v1/namespaces/a/pods")


def _job_of_the_api_server(data: bytes) -> object:
    value = msgspec.json.decode(data)
    return job_from_mapping(value if isinstance(value, dict) else {})


TARGETS: Final = (
    Target(
        name="operator-pod",
        start=_pods,
        errors=(msgspec.MsgspecError, ApiError),
        seeds=_events(PodObject, labels=_LABELS, **_TIMES),
        form=Form.JSON,
        words=(b"0001-01-01T00:00:00Z", b"9" * 5000, b'{"type":"ERROR","object":{}}'),
    ),
    Target(
        name="operator-node",
        start=_nodes,
        errors=(msgspec.MsgspecError, ApiError),
        seeds=tuple(
            one.replace(b'"allocatable":{"1":"1"}', b'"allocatable":{"nvidia.com/gpu":"8"}')
            for one in _events(NodeObject, **_TIMES)
        ),
        form=Form.JSON,
        words=(b"9" * 5000, b"8k", b'"nvidia.com/gpu":"\xd9\xa3"'),
    ),
    Target(
        name="operator-fabric",
        start=_fabrics,
        errors=(msgspec.MsgspecError, ApiError),
        seeds=_events(FabricObject, **_TIMES),
        form=Form.JSON,
    ),
    Target(
        name="operator-refusal",
        start=pure(words_of),
        errors=(),
        seeds=(b'{"kind":"Status","reason":"Forbidden","message":"no"}', b"<html>no</html>"),
    ),
    Target(
        name="operator-job",
        start=pure(_job_of_the_api_server),
        errors=(InvalidJobError, *UNDECODABLE),
        seeds=(msgspec.json.encode(yaml.safe_load(GOOD)),),
        form=Form.JSON,
        bytes_max=16 * 1024,
    ),
    Target(
        name="coordinator-answer",
        start=pure(_coordinator),
        errors=(AnswerError,),
        seeds=json_samples(Status),
        form=Form.JSON,
    ),
    Target(
        name="steps-answer",
        start=pure(_steps),
        errors=(),
        seeds=json_samples(PodSamples),
        form=Form.JSON,
    ),
    Target(
        name="laptops-watch",
        start=_laptops_watch,
        errors=(JobsError,),
        seeds=(b'{"type":"ADDED","object":{"metadata":{}}}',),
        form=Form.JSON,
    ),
    Target(
        name="laptops-refusal",
        start=pure(_refusal),
        errors=(),
        seeds=(b'{"message":"no","reason":"AlreadyExists"}', b"<html>no</html>"),
    ),
)
