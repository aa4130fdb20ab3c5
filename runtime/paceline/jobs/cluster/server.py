"""Requests to an API server by path; every rejection becomes an error that a user can act on.

The module uses paths and plain data instead of the generated classes of `kubernetes`. The verbs
need four kinds of objects only, and messages of the server are passed on unchanged.
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
from paceline_api.times import NS_PER_S

from paceline.clock import now_ns, pause
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
"""Least duration in seconds of a watch; limits the rate of repeated watches."""
CHUNK: Final = 64 * 1024
MERGE: Final = "application/merge-patch+json"
NO_HEADERS: Final[Mapping[str, str]] = {}
Query = Mapping[str, str | int | bool]
_AWAY: Final = (urllib3.exceptions.HTTPError, OSError)


class NotFoundError(JobsError):
    """Raised for status 404 with the server's message; the caller knows what is missing."""


class SlowError(AwayError):
    """Raised when the answer of the API server times out."""


class ApiServer:
    """One API server, used as one user; threads may share it."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._client = access.client()
        self.url = access.server
        self.namespace = access.namespace
        """Namespace of the kubeconfig's context."""

    def get(self, path: str, query: Query | None = None) -> dict[str, Any]:
        """Return the JSON object at `path`."""
        return self._json("GET", path, query)

    def body(
        self, path: str, *, limit_s: float, size_max: int, headers: Mapping[str, str]
    ) -> bytes:
        """Return the body of an answer as raw bytes.

        A broken connection raises AwayError, and an exceeded `limit_s` SlowError.

        Args:
            path: Path of the resource.
            limit_s: Seconds until the answer must begin, and again until it must be complete.
            size_max: Upper bound on the size of the body in bytes.
            headers: Further request headers, for the server behind the API server.

        Returns:
            The whole body.

        Raises:
            RejectedError: The body is larger than `size_max`.
        """
        answer = self._ask("GET", path, None, None, "", limit_s, headers)
        end_ns = now_ns() + round(limit_s * NS_PER_S)
        received = bytearray()
        try:
            with closing(answer):
                for part in answer.stream(CHUNK):
                    received += part
                    if len(received) > size_max:
                        raise RejectedError(
                            f"the answer to {path} is larger than {size_max:,} bytes",
                            hint="see what answers there",
                        )
                    if now_ns() > end_ns:
                        raise self._away(urllib3.exceptions.TimeoutError(f"more than {limit_s} s"))
        except _AWAY as error:
            raise self._away(error) from None
        return bytes(received)

    def create(self, path: str, body: Mapping[str, Any], query: Query | None = None) -> Any:
        """Create the object `body` in the collection `path`; return the stored object."""
        return self._json("POST", path, query, body)

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        """Apply `body` to the object at `path` as a JSON merge patch; return the result."""
        return self._json("PATCH", path, None, body, MERGE)

    def delete(self, path: str, body: Mapping[str, Any]) -> Any:
        """Delete the object at `path`; `body` is a DeleteOptions."""
        return self._json("DELETE", path, None, body)

    def lines(self, path: str, query: Query | None = None, *, silence_s: float) -> Generator[str]:
        """Yield the lines of an answer as they arrive, without their line ends.

        The generator ends without an error if no data arrives for `silence_s`. A broken connection
        raises AwayError.

        Args:
            path: Path of the resource.
            query: Query parameters.
            silence_s: Seconds without data after which reading stops.

        Yields:
            One line; bytes that are not UTF-8 are replaced.
        """
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
        """Yield the changes of a collection until the server ends the watch.

        A watch that ends early takes `REST_S`, so that a caller which repeats it does not send
        requests without a pause. A line that is not a watch event raises JobsError.

        Args:
            path: Path of the collection.
            query: Selectors, and the resource version to start from.
            timeout_s: Seconds after which the server ends the watch.

        Yields:
            (ADDED, MODIFIED, DELETED or ERROR, object); after ERROR nothing follows.
        """
        asked = {**query, "watch": True, "timeoutSeconds": timeout_s}
        begun_ns = now_ns()
        for line in self.lines(path, asked, silence_s=timeout_s + READ_S):
            event = self._parsed(line, path)
            kind, item = event.get("type"), event.get("object")
            if not isinstance(kind, str) or not isinstance(item, dict):
                raise self._nonsense(path)
            yield kind, item
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
            raw = answer.data
        except _AWAY as error:
            raise self._away(error) from None
        return self._parsed(raw, path)

    def _parsed(self, raw: bytes | str, path: str) -> dict[str, Any]:
        """Return a JSON object from the API server; raise JobsError for anything else."""
        try:
            parsed = json.loads(raw)
        except (ValueError, RecursionError):
            raise self._nonsense(path) from None
        if not isinstance(parsed, dict):
            raise self._nonsense(path)
        return parsed

    def _nonsense(self, path: str) -> JobsError:
        return JobsError(
            f"the answer of {self.url} to {path} is not an object in JSON",
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
            answer = self._client.call_api(
                method, asked, headers, body, _request_timeout=(CONNECT_S, silence_s)
            ).response
            if answer.status < 400:
                return answer
            text = answer.data.decode(errors="replace")
        except ApiException as error:  # for example, the server's certificate is not trusted
            raise self._away(error.reason) from None
        except _AWAY as error:
            raise self._away(error) from None
        raise self.refused(answer.status, text, path)

    def _away(self, error: object) -> AwayError:
        why = getattr(error, "reason", None) or error
        reason = " ".join(str(why).split())
        # Cut off the name of the object: "<...HTTPSConnection object at 0x...>: reason".
        reason = reason.rpartition(">: ")[2]
        kind = SlowError if isinstance(why, urllib3.exceptions.TimeoutError) else AwayError
        return kind(
            f"the API server {self.url} does not answer: {reason[:200]}",
            hint="see that the cluster runs and can be reached from here, or choose another one "
            "with --context",
        )

    def refused(self, code: int, text: str, path: str) -> Exception:
        """Return the error to raise for an answer with an error status.

        Args:
            code: HTTP status, 400 or above.
            text: Body of the answer: a Status in JSON, or any text.
            path: Path of the request, for the hint.

        Returns:
            An error whose hint says what the user can do.
        """
        try:
            body = json.loads(text)
            message, reason = str(body["message"]), str(body.get("reason") or "")
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            message, reason = " ".join(text.split())[:200], ""
        if code == 401:
            return self._access.refused()
        if code == 403 and reason == WRONG_TOKEN:  # from a pod's agent, behind the API server
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
