"""A small blocking client of the API server, for set-up and assertions of tests.

It wraps the package `kubernetes` and uses paths instead of classes: `api.get("/api/v1/nodes/x")`.
It reads a kubeconfig, so it can act as any user. The operator's hot paths have a client of their
own, so this client checks it independently.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import urllib3
from kubernetes import client, config

REQUEST_TIMEOUT_S = 30.0
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
Json = dict[str, Any]
Found = TypeVar("Found")


class ApiError(Exception):
    """Refusal by the API server; `status` is the HTTP status, `reason` the server's message."""

    def __init__(self, status: int, method: str, path: str, body: str) -> None:
        self.status = status
        try:
            self.reason: str = json.loads(body).get("message", body)
        except ValueError:
            self.reason = body
        super().__init__(f"{method} {path}: {status} {self.reason}")


class Api:
    """Blocking client of one API server as one user; safe to share among threads."""

    def __init__(self, kubeconfig: Path) -> None:
        settings = client.Configuration()
        config.load_kube_config(
            str(kubeconfig), client_configuration=settings, persist_config=False
        )
        settings.retries = False
        self._client = client.ApiClient(settings)

    def get(self, path: str) -> Json:
        """Return the decoded JSON object at a path."""
        return self._json("GET", path)

    def items(self, path: str, *, labels: str = "") -> list[Json]:
        """Return the objects of a collection, optionally only those that match a label selector."""
        selector = f"?labelSelector={quote(labels)}" if labels else ""
        objects: list[Json] = self.get(path + selector)["items"]
        return objects

    def text(self, path: str) -> str:
        """Return a body that is not JSON, such as a pod's log."""
        return self.request("GET", path)

    def create(self, path: str, body: Json) -> Json:
        """Create an object with POST and return it as the server stored it."""
        return self._json("POST", path, body)

    def replace(self, path: str, body: Json) -> Json:
        """Replace an object with PUT and return it as the server stored it."""
        return self._json("PUT", path, body)

    def patch(self, path: str, body: Json | list[Json], kind: str = MERGE) -> Json:
        """Patch an object and return it; `kind` is the content type of the patch."""
        return self._json("PATCH", path, body, kind)

    def apply(self, path: str, body: Json, manager: str = "paceline-tests") -> Json:
        """Apply an object on the server side with `force`, as the field manager `manager`."""
        return self._json("PATCH", f"{path}?fieldManager={manager}&force=true", body, APPLY)

    def delete(self, path: str, body: Json | None = None) -> None:
        """Delete an object; one that does not exist counts as deleted."""
        try:
            self.request("DELETE", path, body)
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise

    def wait(
        self, path: str, ready: Callable[[Json], bool], timeout_s: float, what: str = "ready"
    ) -> Json:
        """Poll until the object exists and `ready` accepts it; a timeout shows the last answer."""
        last: object = "nothing"

        def asked() -> Json | None:
            nonlocal last
            try:
                last = body = self.get(path)
                # The owners of the fields fill a page and have never explained a failure.
                body["metadata"].pop("managedFields", None)
            except ApiError as error:
                if error.status != HTTPStatus.NOT_FOUND:
                    raise
                last = error
                return None
            return body if ready(body) else None

        return _until(asked, timeout_s, lambda: f"{path} not {what} after {timeout_s} s: {last}")

    def wait_gone(self, path: str, timeout_s: float) -> None:
        """Poll until the object does not exist; a timeout shows the last answer."""
        last: Json = {}

        def gone() -> bool | None:
            nonlocal last
            try:
                last = self.get(path)
            except ApiError as error:
                if error.status != HTTPStatus.NOT_FOUND:
                    raise
                return True
            return None

        _until(gone, timeout_s, lambda: f"{path} still there after {timeout_s} s: {last}")

    def request(
        self,
        method: str,
        path: str,
        body: Json | list[Json] | None = None,
        kind: str = "application/json",
    ) -> str:
        """Send one request and return the body; raise ApiError for a status of 400 or higher."""
        # A connection for each request costs 2 ms, and is never a stale one of a stopped server.
        headers = {"Accept": "application/json", "Content-Type": kind, "Connection": "close"}
        made = self._client.param_serialize(
            method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        try:
            answer = self._client.call_api(*made, _request_timeout=REQUEST_TIMEOUT_S)
            data = answer.read()
        except urllib3.exceptions.HTTPError as error:
            raise ConnectionError(f"{method} {path}: {error}") from error
        text: str = data.decode(errors="replace")
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise ApiError(answer.status, method, path, text)
        return text

    def _json(
        self,
        method: str,
        path: str,
        body: Json | list[Json] | None = None,
        kind: str = "application/json",
    ) -> Json:
        answer: Json = json.loads(self.request(method, path, body, kind))
        return answer


def _until(ask: Callable[[], Found | None], timeout_s: float, message: Callable[[], str]) -> Found:
    deadline = time.monotonic() + timeout_s
    while True:
        result = ask()
        if result is not None:
            return result
        if time.monotonic() > deadline:
            raise TimeoutError(message())
        time.sleep(0.1)
