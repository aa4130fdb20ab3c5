"""What the operator asks of an API server, as an interface with one real and one fake side.

Every write goes through here, so that it can be counted, refused to a deposed leader, and tried
against a cluster of a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

from paceline_api.crdgen import PLURAL
from paceline_api.types.job import API_VERSION

from paceline_operator.core.pods.companions import BUDGETS
from paceline_operator.core.providers.choice import GROUP_APIS

MANAGER: Final = "paceline-operator"

PATHS: Final = {
    "namespaces": "/api/v1/namespaces",
    "pods": "/api/v1/namespaces/{namespace}/pods",
    "secrets": "/api/v1/namespaces/{namespace}/secrets",
    "services": "/api/v1/namespaces/{namespace}/services",
    "events": "/api/v1/namespaces/{namespace}/events",
    "leases": "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases",
    BUDGETS: f"/apis/policy/v1/namespaces/{{namespace}}/{BUDGETS}",
    **{
        api.resource: f"/apis/{api.version}/namespaces/{{namespace}}/podgroups"
        for api in GROUP_APIS
    },
    PLURAL: f"/apis/{API_VERSION}/namespaces/{{namespace}}/{PLURAL}",
}


class ApiError(Exception):
    """An answer of the API server that is no success, or none at all (code 0)."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        retry_after_s: float = 0.0,
        *,
        denied: str = "",
    ) -> None:
        """`denied`: what was asked, in the words of a role, where the right to it is missing."""
        super().__init__(f"{code} {reason}: {message}")
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.denied = denied

    @property
    def transient(self) -> bool:
        """Another try may succeed without anybody doing anything; after 401, with another login."""
        return self.code in (0, 401, 408, 429) or self.code >= 500


class Api(Protocol):
    """`kind` is the plural of a resource in PATHS. All methods raise ApiError."""

    async def create(
        self, kind: str, namespace: str, manifest: Mapping[str, Any], *, strict: bool = False
    ) -> Mapping[str, Any]:
        """POST; `strict`: an unknown field is an error."""
        ...

    async def get(self, kind: str, namespace: str, name: str) -> Mapping[str, Any]: ...

    async def namespaces_of(self, kind: str, name: str, *, within: str) -> list[str]:
        """Namespaces in which there is an object of this name. `within`: look at this namespace
        only; empty for all."""
        ...

    async def delete(
        self, kind: str, namespace: str, name: str, *, uid: str = ""
    ) -> Mapping[str, Any]:
        """`uid`: only the object that has it."""
        ...

    async def apply(
        self,
        kind: str,
        namespace: str,
        manifest: Mapping[str, Any],
        *,
        force: bool,
        subresource: str = "",
    ) -> Mapping[str, Any]:
        """Server-side apply. `force`: fields that somebody else has set become the operator's; for
        what it has made itself (cluster.ownership) and for its own status."""
        ...
