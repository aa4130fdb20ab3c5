"""The operator's interface to an API server, with a real and a fake implementation.

Every write goes through it, so that writes can be counted, denied to a deposed leader, and tested
against a simulated cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

from paceline_api.crdgen import PLURAL
from paceline_api.types.enums import RuntimeKind
from paceline_api.types.job import API_VERSION
from paceline_api.types.runtime import PLURALS

from paceline_operator.core.pods.companions import BUDGETS
from paceline_operator.core.providers.choice import GROUP_APIS

MANAGER: Final = "paceline-operator"
"""Field manager of the operator's writes."""

CLAIMS: Final = "persistentvolumeclaims"
PATHS: Final = {
    "namespaces": "/api/v1/namespaces",
    "pods": "/api/v1/namespaces/{namespace}/pods",
    "secrets": "/api/v1/namespaces/{namespace}/secrets",
    "services": "/api/v1/namespaces/{namespace}/services",
    "events": "/api/v1/namespaces/{namespace}/events",
    CLAIMS: "/api/v1/namespaces/{namespace}/persistentvolumeclaims",
    "leases": "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases",
    BUDGETS: f"/apis/policy/v1/namespaces/{{namespace}}/{BUDGETS}",
    **{
        api.resource: f"/apis/{api.version}/namespaces/{{namespace}}/podgroups"
        for api in GROUP_APIS
    },
    PLURAL: f"/apis/{API_VERSION}/namespaces/{{namespace}}/{PLURAL}",
    PLURALS[RuntimeKind.NAMESPACED]: f"/apis/{API_VERSION}/namespaces/{{namespace}}/"
    f"{PLURALS[RuntimeKind.NAMESPACED]}",
    PLURALS[RuntimeKind.CLUSTER]: f"/apis/{API_VERSION}/{PLURALS[RuntimeKind.CLUSTER]}",
}
"""Path of the collection of each resource, by the resource's plural name."""


class ApiError(Exception):
    """Raised for an answer of the API server that is not a success, or for none at all (code 0)."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        retry_after_s: float = 0.0,
        *,
        denied: str = "",
    ) -> None:
        """Describe a failed request.

        Args:
            code: HTTP status; 0 if there was no answer.
            reason: Reason as the API server names it.
            message: Message of the API server, or of the HTTP library.
            retry_after_s: Seconds that the server asks to wait.
            denied: The request in the terms of a role, if the right to it is missing; empty
                otherwise.
        """
        super().__init__(f"{code} {reason}: {message}")
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.denied = denied

    @property
    def transient(self) -> bool:
        """True if another try may succeed without a change; after 401, with a renewed login."""
        return self.code in (0, 401, 408, 429) or self.code >= 500


class Api(Protocol):
    """Requests to an API server.

    `kind` is the plural name of a resource in PATHS. All methods raise ApiError.
    """

    async def create(
        self,
        kind: str,
        namespace: str,
        manifest: Mapping[str, Any],
        *,
        strict: bool = False,
        dry_run: bool = False,
    ) -> Mapping[str, Any]:
        """Create an object by POST.

        Args:
            kind: Plural name of the resource.
            namespace: Namespace of the object.
            manifest: The object.
            strict: True if an unknown field is an error.
            dry_run: True if nothing is to be stored; everything else is as without.

        Returns:
            The object.
        """
        ...

    async def get(self, kind: str, namespace: str, name: str) -> Mapping[str, Any]:
        """Return one object."""

    async def warnings_of(self, namespace: str, uid: str) -> bytes:
        """Return the list of warnings (Events) about the object with this uid as JSON.

        It is cut off at a bound on its length, and then it is no valid JSON.

        Args:
            namespace: Namespace of the object.
            uid: Uid of the object.

        Returns:
            The JSON.
        """
        ...

    async def namespaces_of(self, kind: str, name: str, *, within: str) -> list[str]:
        """Return the namespaces that have an object of this name.

        Args:
            kind: Plural name of the resource.
            name: Name of the object.
            within: The only namespace to look at; empty for all.

        Returns:
            The namespaces.
        """
        ...

    async def delete(
        self, kind: str, namespace: str, name: str, *, uid: str = ""
    ) -> Mapping[str, Any]:
        """Delete an object and return it; if `uid` is given, only the object that has it."""
        ...

    async def apply(
        self,
        kind: str,
        namespace: str,
        manifest: Mapping[str, Any],
        *,
        force: bool,
        subresource: str = "",
        dry_run: bool = False,
    ) -> Mapping[str, Any]:
        """Create or change an object by server-side apply.

        Args:
            kind: Plural name of the resource.
            namespace: Namespace of the object.
            manifest: All fields that the operator sets.
            force: True to take over fields that another manager has set. Use it only for objects
                that the operator has made (cluster.ownership) and for its own status.
            subresource: Subresource to write, such as status; empty for the object itself.
            dry_run: As in `create`.

        Returns:
            The object as it is now.
        """
        ...
