"""Access control of the operator's /metrics by TLS, in the manner of kube-rbac-proxy.

The API server returns the user of a token (TokenReview), and whether that user may get the path
/metrics (SubjectAccessReview). The verdict is cached for a minute, so a Prometheus costs two
requests a minute. An unknown token also costs two requests, no matter who sends it. Unknown tokens
therefore share a token bucket: a flood of them is answered with 429 and costs the API server
nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

from paceline_operator.cluster.api import ApiError
from paceline_operator.core.shares import Bucket, Rate

TOKEN_REVIEWS: Final = "/apis/authentication.k8s.io/v1/tokenreviews"
ACCESS_REVIEWS: Final = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
PATH: Final = "/metrics"
REMEMBERED_S: Final = 60.0
"""Seconds that a verdict is cached."""
REMEMBERED_MAX: Final = 256
"""Upper bound on the number of cached verdicts; the oldest is dropped."""
TOKEN_BYTES_MAX: Final = 16 * 1024
"""Upper bound on the length of a token."""
ASKED: Final = Rate(per_s=2.0, burst=20.0)
"""Limit of the checks of tokens that are not cached."""

Create = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Function that posts an object to a path of the API server and returns the answer; raises
ApiError."""


class Scrapers:
    """Verdicts on Authorization headers, one unknown token at a time, on one event loop."""

    def __init__(self, create: Create, clock: Callable[[], float]) -> None:
        """Start with an empty cache.

        Args:
            create: Posts objects with the operator's own client.
            clock: Returns seconds of a monotonic clock.
        """
        self._create, self._clock = create, clock
        self._bucket = Bucket(ASKED, ASKED.burst, clock())
        self._known: dict[bytes, tuple[HTTPStatus, float]] = {}
        """Verdict and the end of its validity, by hash of the token; the oldest first."""
        self._turn = asyncio.Lock()

    async def verdict(self, authorization: str) -> HTTPStatus:
        """Return OK, or the HTTP status for the caller.

        Args:
            authorization: The header as received; empty if there is none.

        Returns:
            OK; UNAUTHORIZED without a token that the API server knows; FORBIDDEN for a user who may
            not get /metrics; TOO_MANY_REQUESTS when too many unknown tokens were sent;
            SERVICE_UNAVAILABLE when the API server does not answer.
        """
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token or len(token) > TOKEN_BYTES_MAX:
            return HTTPStatus.UNAUTHORIZED
        if not token.isascii():
            return HTTPStatus.UNAUTHORIZED
        key = hashlib.sha256(token.encode("ascii")).digest()
        known = self._recall(key)
        if known is not None:
            return known
        async with self._turn:  # if several requests send the same token, the first one asks
            known = self._recall(key)
            if known is not None:
                return known
            self._bucket.fill(ASKED, self._clock())
            if self._bucket.missing_s(1.0):
                return HTTPStatus.TOO_MANY_REQUESTS
            self._bucket.level -= 1.0
            try:
                verdict = await self._ask(token)
            except ApiError:
                return HTTPStatus.SERVICE_UNAVAILABLE
            self._known.pop(key, None)
            self._known[key] = verdict, self._clock() + REMEMBERED_S
            if len(self._known) > REMEMBERED_MAX:
                del self._known[next(iter(self._known))]
            return verdict

    def _recall(self, key: bytes) -> HTTPStatus | None:
        verdict, until_s = self._known.get(key, (None, 0.0))
        return verdict if until_s > self._clock() else None

    async def _ask(self, token: str) -> HTTPStatus:
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview"}
        answer = (await self._create(TOKEN_REVIEWS, {**review, "spec": {"token": token}}))["status"]
        if not answer.get("authenticated"):
            return HTTPStatus.UNAUTHORIZED
        user = answer["user"]
        spec = {
            "user": user.get("username", ""),
            "uid": user.get("uid", ""),
            "groups": user.get("groups", []),
            "extra": user.get("extra", {}),
            "nonResourceAttributes": {"path": PATH, "verb": "get"},
        }
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview"}
        answer = (await self._create(ACCESS_REVIEWS, {**review, "spec": spec}))["status"]
        return HTTPStatus.OK if answer.get("allowed") else HTTPStatus.FORBIDDEN
