"""The level of pod security that each namespace asks for, by its label; asked for now and then."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from paceline_operator.cluster.api import Api, ApiError
from paceline_operator.core.pods.security import Level, level_of

FRESH_S: Final = 30.0
"""A level is known for so long. The API server has its own eye on the label at each creation."""
KEPT_MAX: Final = 10_000
"""Namespaces that are remembered."""


class Levels:
    def __init__(self, api: Api, clock: Callable[[], float]) -> None:
        self._api, self._clock = api, clock
        self._known: dict[str, tuple[float, Level]] = {}

    async def of(self, namespace: str) -> Level:
        """Return the level of a namespace. Raises ApiError, also without the right to look: nobody
        gets pods by hiding what they are held to."""
        known = self._known.get(namespace)
        if known is not None and self._clock() - known[0] < FRESH_S:
            return known[1]
        try:
            body = await self._api.get("namespaces", "", namespace)
        except ApiError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                raise
            body = {}  # then nothing can be made in it either
        level = level_of((body.get("metadata") or {}).get("labels") or {})
        if len(self._known) >= KEPT_MAX:
            self._known.clear()
        self._known[namespace] = self._clock(), level
        return level
