"""HTTP client of the local runner for its coordinator; each request has a time limit."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self

import aiohttp
import msgspec
from paceline_api.status import Status, decode_status

REQUEST_S: Final = 5.0
"""Timeout of a request in seconds, on top of the time that the request itself may wait."""


class CoordinatorAwayError(Exception):
    """Raised when the coordinator does not answer; after a restart it may answer again."""


class Client:
    """Client of one coordinator; an async context manager that holds the open connections.

    Args:
        url: Base URL of the coordinator.
        token: Bearer token that the coordinator accepts.
    """

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {token}"}

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(self._url, headers=self._headers)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def status(self, *, after: int | None = None, wait_s: float = 0.0) -> Status:
        """Return the status of the job; with `after`, wait until it has changed.

        CoordinatorAwayError is raised if the coordinator does not answer in time.

        Args:
            after: Sequence number of a known status. The answer comes as soon as the number
                differs.
            wait_s: Longest time in seconds that the coordinator waits for a change.

        Returns:
            The present status.
        """
        params = {} if after is None else {"after": str(after), "timeout": f"{wait_s:.3f}s"}
        body = await self._ask("GET", "/v1/status", wait_s=wait_s, params=params)
        return decode_status(body)

    async def post(self, path: str, body: msgspec.Struct | None = None) -> None:
        """Post a request, with its JSON body; CoordinatorAwayError if there is no answer."""
        await self._ask("POST", path, data=b"" if body is None else msgspec.json.encode(body))

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        wait_s: float = 0.0,
        params: dict[str, str] | None = None,
        data: bytes | None = None,
    ) -> bytes:
        limit = aiohttp.ClientTimeout(total=wait_s + REQUEST_S)
        try:
            async with self._session.request(
                method, path, params=params, data=data, timeout=limit
            ) as response:
                body = await response.read()
                if response.status >= 500:
                    raise CoordinatorAwayError(f"{path}: {response.status}")
                assert response.status == 200, (path, response.status, body)
                return body
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise CoordinatorAwayError(f"{path}: {error or type(error).__name__}") from None
