"""Requests to an API server, by path; every refusal is an error that a user can act on.

Paths and plain data instead of the generated classes: a verb needs four kinds of objects, and what
the server says is passed on as it is.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import Any, Final
from urllib.parse import urlencode

import urllib3
from kubernetes.client.exceptions import ApiException
from paceline_api.access.access import Access

from paceline.clock import NS_PER_S, now_ns, pause
from paceline.core.anatomy.steps_token import WRONG_TOKEN
from paceline.jobs.errors import (
    AwayError,
    JobsError,
    NameTakenError,
    NotAllowedError,
    RejectedError,
)

CONNECT_S: Final = 10.0
READ_S: Final = 30.0
REST_S: Final = 1.0
CHUNK: Final = 64 * 1024
MERGE: Final = "application/merge-patch+json"
NO_HEADERS: Final[Mapping[str, str]] = {}
Query = Mapping[str, str | int | bool]
_AWAY: Final = (urllib3.exceptions.HTTPError, OSError)


class NotFoundError(JobsError):
    """404, in the words of the server. Whoever asked knows what is missing."""


class SlowError(AwayError):
    """The answer has not come in time."""


class Server:
    """One API server, as one user; safe to share among threads."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._client = access.client()
        self.url = access.server
        self.namespace = access.namespace
        """The one of the kubeconfig's context."""

    def get(self, path: str, query: Query | None = None) -> dict[str, Any]:
        return self._json("GET", path, query)

    def body(
        self, path: str, *, limit_s: float, size_max: int, headers: Mapping[str, str]
    ) -> bytes:
        """The answer as it is. SlowError if it does not begin within `limit_s`, or has not come
        `limit_s` later; RejectedError if it is larger than `size_max` bytes. `headers`: further
        ones, for whoever answers behind the API server."""
        answer = self._ask("GET", path, None, None, "", limit_s, headers)
        end_ns = now_ns() + round(limit_s * NS_PER_S)
        found = bytearray()
        try:
            with closing(answer):
                for part in answer.stream(CHUNK):
                    found += part
                    if len(found) > size_max:
                        raise RejectedError(
                            f"the answer to {path} is larger than {size_max:,} bytes",
                            hint="see what answers there",
                        )
                    if now_ns() > end_ns:
                        raise self._away(urllib3.exceptions.TimeoutError(f"more than {limit_s} s"))
        except _AWAY as error:
            raise self._away(error) from None
        return bytes(found)

    def create(self, path: str, body: Mapping[str, Any], query: Query | None = None) -> Any:
        return self._json("POST", path, query, body)

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        """A merge patch."""
        return self._json("PATCH", path, None, body, MERGE)

    def delete(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._json("DELETE", path, None, body)

    def lines(self, path: str, query: Query | None = None, *, silence_s: float) -> Generator[str]:
        """The lines of an answer as they come, without their ends; it breaks off where none comes
        for `silence_s`, which is not an error. AwayError if the connection breaks."""
        answer = self._ask("GET", path, query, None, "", silence_s)
        rest = b""
        try:
            with closing(answer):
                for part in answer.stream(CHUNK):
                    *whole, rest = (rest + part).split(b"\n")
                    for line in whole:
                        yield line.decode(errors="replace")
        except urllib3.exceptions.ReadTimeoutError:
            return
        except _AWAY as error:
            raise self._away(error) from None
        if rest:
            yield rest.decode(errors="replace")

    def watch(
        self, path: str, query: Query, *, timeout_s: int
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """(ADDED, MODIFIED, DELETED or ERROR, object), until the server ends it. One that ends at
        once takes REST_S, so that whoever watches again and again does not ask all the time."""
        asked = {**query, "watch": True, "timeoutSeconds": timeout_s}
        begun_ns = now_ns()
        for line in self.lines(path, asked, silence_s=timeout_s + READ_S):
            event = self._parsed(line, path)
            kind, found = event.get("type"), event.get("object")
            if not isinstance(kind, str) or not isinstance(found, dict):
                raise self._nonsense(path)
            yield kind, found
            if kind == "ERROR":
                break
        if now_ns() - begun_ns < REST_S * NS_PER_S:
            pause(REST_S)

    def _json(
        self,
        method: str,
        path: str,
        query: Query | None,
        body: Mapping[str, Any] | None = None,
        kind: str = "application/json",
    ) -> dict[str, Any]:
        answer = self._ask(method, path, query, body, kind, READ_S)
        try:
            said = answer.data
        except _AWAY as error:
            raise self._away(error) from None
        return self._parsed(said, path)

    def _parsed(self, said: bytes | str, path: str) -> dict[str, Any]:
        """Return an object that the API server has sent. Raises JobsError for anything else."""
        try:
            found = json.loads(said)
        except (ValueError, RecursionError):
            raise self._nonsense(path) from None
        if not isinstance(found, dict):
            raise self._nonsense(path)
        return found

    def _nonsense(self, path: str) -> JobsError:
        return JobsError(
            f"the answer of {self.url} to {path} is no object in JSON",
            hint="see that the kubeconfig's server is the API server of a Kubernetes cluster",
        )

    def _ask(
        self,
        method: str,
        path: str,
        query: Query | None,
        body: Mapping[str, Any] | None,
        kind: str,
        silence_s: float,
        more: Mapping[str, str] = NO_HEADERS,
    ) -> Any:
        words = {k: str(v).lower() if isinstance(v, bool) else v for k, v in (query or {}).items()}
        asked = f"{self.url}{path}" + (f"?{urlencode(words)}" if words else "")
        headers = {"Accept": "application/json"} | ({"Content-Type": kind} if kind else {})
        headers |= more
        try:
            found = self._client.call_api(
                method, asked, headers, body, _request_timeout=(CONNECT_S, silence_s)
            ).response
            if found.status < 400:
                return found
            said = found.data.decode(errors="replace")
        except ApiException as error:  # the certificate of the server
            raise self._away(error.reason) from None
        except _AWAY as error:
            raise self._away(error) from None
        raise self.refused(found.status, said, path)

    def _away(self, error: object) -> AwayError:
        why = getattr(error, "reason", None) or error
        said = " ".join(str(why).split())
        # The object in its words says nothing to a user: "<...HTTPSConnection object at 0x...>: x".
        said = said.rpartition(">: ")[2]
        kind = SlowError if isinstance(why, urllib3.exceptions.TimeoutError) else AwayError
        return kind(
            f"the API server {self.url} does not answer: {said[:200]}",
            hint="see that the cluster runs and can be reached from here, or choose another one "
            "with --context",
        )

    def refused(self, code: int, said: str, path: str) -> Exception:
        """Return the error that an answer with this status and these words is for a user."""
        try:
            body = json.loads(said)
            message, reason = str(body["message"]), str(body.get("reason") or "")
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            message, reason = " ".join(said.split())[:200], ""
        if code == 401:
            return self._access.refused()
        if code == 403 and reason == WRONG_TOKEN:  # of one pod's agent, behind the API server
            return RejectedError(message, hint="the job's Secret was replaced; ask again")
        if code == 403 and reason != "Forbidden":
            return NotAllowedError(f"{message}", hint="ask whoever runs the cluster")
        if code == 403 and "exceeded quota" not in message and "admission" not in message:
            return NotAllowedError(message, hint=_rights(path))
        if code == 404:
            return NotFoundError(message, hint="see whether it was deleted")
        if code == 409 and reason == "AlreadyExists":
            return NameTakenError(message, hint="choose another name")
        if code >= 500 or code == 429:
            return AwayError(
                f"the API server {self.url} cannot answer now ({code}): {message}",
                hint="try again in a moment",
            )
        return RejectedError(message, hint="correct what it names")


def _rights(path: str) -> str:
    _, _, after = path.partition("/namespaces/")
    namespace = after.partition("/")[0]
    where = f" in the namespace {namespace}" if namespace else ""
    return (
        f"ask for the role `edit`{where}, which contains Paceline's; or name another namespace "
        "with -n"
    )
