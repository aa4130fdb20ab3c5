"""The level of pod security that each namespace enforces by its label, cached for a short time."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from paceline_api.pods.security import Level, level_of

from paceline_operator.cluster.api import Api, ApiError

FRESH_S: Final = 30.0
"""Seconds that a level is cached. Admission checks the label itself at each creation."""
KEPT_MAX: Final = 10_000
"""Upper bound on the number of cached namespaces."""


class Levels:
    """Cache of the levels of namespaces."""

    def __init__(self, api: Api, clock: Callable[[], float]) -> None:
        self._api, self._clock = api, clock
        self._known: dict[str, tuple[float, Level]] = {}

    async def of(self, namespace: str) -> Level:
        """Return the level of a namespace.

        Args:
            namespace: Name of the namespace.

        Returns:
            The level; that of a namespace without a label if it does not exist.

        Raises:
            ApiError: The level is not known. This includes a missing right to read the label: a
                namespace must not get pods by hiding its level.
        """
        known = self._known.get(namespace)
        if known is not None and self._clock() - known[0] < FRESH_S:
            return known[1]
        try:
            body = await self._api.get("namespaces", "", namespace)
        except ApiError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                raise
            body = {}  # without the namespace no pod can be created either
        level = level_of((body.get("metadata") or {}).get("labels") or {})
        if len(self._known) >= KEPT_MAX:
            self._known.clear()
        self._known[namespace] = self._clock(), level
        return level
