"""Objects beside the pods: made, changed and deleted only as long as they are the operator's own.

A name may be taken. Server-side apply would merge the fields of the operator into the object of
somebody else, by force or, where no field conflicts, without a word. So it is looked at first:
`force` is for objects that this operator has made, and one of somebody else is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from paceline_operator.cluster.api import MANAGER, Api, ApiError

MANAGERS_MAX: Final = 3
"""Named in a message."""


class TakenError(ApiError):
    """An object that the operator needs has the name of one that somebody else has made."""

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
    """Make an object, or change the one that this operator has made.

    Args:
        api: The API server.
        kind: The plural of its resource.
        namespace: Where it is.
        manifest: All fields that the operator sets.
        owner: Uid of the job that it belongs to; empty for one that is of all jobs.

    Returns:
        The object as it is now.

    Raises:
        TakenError: Somebody else has made an object of this name.
        ApiError: The API server refuses it.
    """
    found = await _find(api, kind, namespace, manifest["metadata"]["name"])
    if found is not None and not is_own(found, owner):
        raise TakenError(kind, namespace, found)
    # Without force, one that was made by somebody since then conflicts.
    return await api.apply(kind, namespace, manifest, force=found is not None)


async def delete_own(api: Api, kind: str, namespace: str, name: str, *, owner: str = "") -> None:
    """Delete the object that this operator has made under this name, and no other one.

    Raises:
        ApiError: The API server refuses it.
    """
    found = await _find(api, kind, namespace, name)
    if found is None or not is_own(found, owner):
        return
    try:
        await api.delete(kind, namespace, name, uid=found["metadata"]["uid"])
    except ApiError as error:
        if error.code not in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):  # gone, or another one
            raise


def is_own(body: Mapping[str, Any], owner: str) -> bool:
    """Return True if this operator has written the object, and it is controlled by `owner`."""
    controllers = [
        each.get("uid")
        for each in body["metadata"].get("ownerReferences") or ()
        if each.get("controller")
    ]
    return MANAGER in _managers(body) and controllers == ([owner] if owner else [])


def _managers(body: Mapping[str, Any]) -> list[str]:
    """Return who has set fields of it, as the API server tells; writers of a status aside."""
    fields = body["metadata"].get("managedFields") or ()
    return [str(each.get("manager")) for each in fields if not each.get("subresource")]


async def _find(api: Api, kind: str, namespace: str, name: str) -> Mapping[str, Any] | None:
    try:
        return await api.get(kind, namespace, name)
    except ApiError as error:
        if error.code == HTTPStatus.NOT_FOUND:
            return None
        raise
