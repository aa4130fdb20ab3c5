"""A small blocking client of the API server, for set-up and assertions of tests.

Paths instead of classes: `api.get("/api/v1/nodes/node1")`. It reads a kubeconfig, so that it can
act as any user. Tests of the operator use the operator's own client; this shares nothing with it.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import yaml

REQUEST_TIMEOUT_S = 30.0
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
Json = dict[str, Any]
Found = TypeVar("Found")


class ApiError(Exception):
    """The API server refused; `status` is the HTTP status, the message is the server's own."""

    def __init__(self, status: int, method: str, path: str, body: str) -> None:
        self.status = status
        try:
            self.reason: str = json.loads(body).get("message", body)
        except ValueError:
            self.reason = body
        super().__init__(f"{method} {path}: {status} {self.reason}")


class Api:
    """Speaks to one API server as one user; safe to share among threads."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self._address = urlsplit(cluster["server"]).netloc
        self._tls = ssl.create_default_context(cafile=cluster["certificate-authority"])
        if "client-certificate" in user:
            self._tls.load_cert_chain(user["client-certificate"], user["client-key"])
        token = {"Authorization": f"Bearer {user['token']}"} if "token" in user else {}
        self._headers = {"Accept": "application/json", **token}

    def get(self, path: str) -> Json:
        return self._json("GET", path)

    def items(self, path: str, *, labels: str = "") -> list[Json]:
        """The objects of a collection."""
        selector = f"?labelSelector={quote(labels)}" if labels else ""
        found: list[Json] = self.get(path + selector)["items"]
        return found

    def text(self, path: str) -> str:
        """A body that is not JSON, such as a pod's log."""
        return self.request("GET", path)

    def create(self, path: str, body: Json) -> Json:
        return self._json("POST", path, body)

    def replace(self, path: str, body: Json) -> Json:
        return self._json("PUT", path, body)

    def patch(self, path: str, body: Json | list[Json], kind: str = MERGE) -> Json:
        return self._json("PATCH", path, body, kind)

    def apply(self, path: str, body: Json, manager: str = "paceline-tests") -> Json:
        return self._json("PATCH", f"{path}?fieldManager={manager}&force=true", body, APPLY)

    def delete(self, path: str, body: Json | None = None) -> None:
        """Gone already counts as deleted."""
        try:
            self.request("DELETE", path, body)
        except ApiError as error:
            if error.status != http.HTTPStatus.NOT_FOUND:
                raise

    def wait(
        self, path: str, ready: Callable[[Json], bool], timeout_s: float, what: str = "ready"
    ) -> Json:
        """Ask until the object is there and `ready` says yes; the error shows the last answer."""
        last: object = "nothing"

        def asked() -> Json | None:
            nonlocal last
            try:
                last = found = self.get(path)
                # Who set which field is a page long and has never explained a failure.
                found["metadata"].pop("managedFields", None)
            except ApiError as error:
                if error.status != http.HTTPStatus.NOT_FOUND:
                    raise
                last = error
                return None
            return found if ready(found) else None

        return _until(asked, timeout_s, lambda: f"{path} not {what} after {timeout_s} s: {last}")

    def wait_gone(self, path: str, timeout_s: float) -> None:
        last: Json = {}

        def gone() -> bool | None:
            nonlocal last
            try:
                last = self.get(path)
            except ApiError as error:
                if error.status != http.HTTPStatus.NOT_FOUND:
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
        content = None if body is None else json.dumps(body).encode()
        # One for each request costs 2 ms, and is never one that a stopped server left behind.
        connection = http.client.HTTPSConnection(
            self._address, context=self._tls, timeout=REQUEST_TIMEOUT_S
        )
        with closing(connection):
            connection.request(method, path, content, self._headers | {"Content-Type": kind})
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        if answer.status >= http.HTTPStatus.BAD_REQUEST:
            raise ApiError(answer.status, method, path, text)
        return text

    def _json(
        self,
        method: str,
        path: str,
        body: Json | list[Json] | None = None,
        kind: str = "application/json",
    ) -> Json:
        found: Json = json.loads(self.request(method, path, body, kind))
        return found


def _until(ask: Callable[[], Found | None], timeout_s: float, message: Callable[[], str]) -> Found:
    deadline = time.monotonic() + timeout_s
    while True:
        found = ask()
        if found is not None:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(message())
        time.sleep(0.1)
