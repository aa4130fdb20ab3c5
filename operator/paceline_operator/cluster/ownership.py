"""Writes of objects beside the pods, only where these are the operator's own (C20).

A name may be taken. Server-side apply would merge the operator's fields into another owner's
object, by force, or silently if no field conflicts. The object is therefore read first. `force` is
only for objects that this operator has made; other owners' objects stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from paceline_operator.cluster.api import MANAGER, Api, ApiError

MANAGERS_MAX: Final = 3
"""Upper bound on the number of field managers that a message names."""


class TakenError(ApiError):
    """Raised if another owner's object has the name of one that the operator needs."""

    def __init__(self, kind: str, namespace: str, body: Mapping[str, Any]) -> None:
        name = body["metadata"]["name"]
        others = [who for who in _managers(body) if who != MANAGER]
        by = f" (made by {', '.join(others[:MANAGERS_MAX])})" if others else ""
        super().__init__(
            HTTPStatus.CONFLICT,
            "NameTaken",
            f"{name} of {kind} in namespace {namespace} is somebody else's{by}: the operator does "
            f"not touch it; delete it with `kubectl delete {kind} {name} -n {namespace}`, or make "
            "it anew under another name",
        )


async def apply_own(
    api: Api, kind: str, namespace: str, manifest: Mapping[str, Any], *, owner: str = ""
) -> Mapping[str, Any]:
    """Create an object, or change the one that this operator has made.

    The ApiError of a refused request passes to the caller.

    Args:
        api: The API server.
        kind: Plural name of its resource.
        namespace: Namespace of the object.
        manifest: All fields that the operator sets.
        owner: Uid of the job that it belongs to; empty for one that all jobs share.

    Returns:
        The object as it is now.

    Raises:
        TakenError: Another owner has made an object of this name.
    """
    existing = await _find(api, kind, namespace, manifest["metadata"]["name"])
    if existing is not None and not is_own(existing, owner):
        raise TakenError(kind, namespace, existing)
    # Without force, an object that somebody has created since the read conflicts.
    return await api.apply(kind, namespace, manifest, force=existing is not None)


async def delete_own(api: Api, kind: str, namespace: str, name: str, *, owner: str = "") -> None:
    """Delete the object of this name if this operator has made it.

    Args:
        api: The API server.
        kind: Plural name of its resource.
        namespace: Namespace of the object.
        name: Name of the object.
        owner: Uid of the job that it belongs to; empty for one that all jobs share.

    Raises:
        ApiError: The API server refuses a request.
    """
    existing = await _find(api, kind, namespace, name)
    if existing is None or not is_own(existing, owner):
        return
    try:
        await api.delete(kind, namespace, name, uid=existing["metadata"]["uid"])
    except ApiError as error:
        if error.code not in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):  # gone, or recreated
            raise


def is_own(body: Mapping[str, Any], owner: str) -> bool:
    """Return True if this operator has written the object and `owner` is its only controller."""
    controllers = [
        each.get("uid")
        for each in body["metadata"].get("ownerReferences") or ()
        if each.get("controller")
    ]
    return MANAGER in _managers(body) and controllers == ([owner] if owner else [])


def _managers(body: Mapping[str, Any]) -> list[str]:
    """Return the field managers of an object, without those that only wrote its status."""
    fields = body["metadata"].get("managedFields") or ()
    return [str(each.get("manager")) for each in fields if not each.get("subresource")]


async def _find(api: Api, kind: str, namespace: str, name: str) -> Mapping[str, Any] | None:
    try:
        return await api.get(kind, namespace, name)
    except ApiError as error:
        if error.code == HTTPStatus.NOT_FOUND:
            return None
        raise
