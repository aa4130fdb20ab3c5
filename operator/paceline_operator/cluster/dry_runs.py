"""What the API server would say to an object, and whether one is there, without creating any.

An operator whose roles lack a right learns less here, and makes the pods all the same (C22).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from paceline_api.pods.advice import NO_DRY_RUN
from paceline_api.pods.needed import SECRET, Needed

from paceline_operator.cluster.api import CLAIMS, Api, ApiError


async def refused(
    api: Api, kind: str, namespace: str, manifest: Mapping[str, Any]
) -> ApiError | None:
    """Send an object as a dry run.

    Args:
        api: The API server.
        kind: Plural name of its resource.
        namespace: Namespace of the object.
        manifest: The object.

    Returns:
        The refusal; None if the object would be made, exists already, or cannot be tried.
    """
    try:
        await api.create(kind, namespace, manifest, strict=True, dry_run=True)
    except ApiError as error:
        return _unexpected(error)
    return None


async def refused_apply(
    api: Api, kind: str, namespace: str, manifest: Mapping[str, Any]
) -> ApiError | None:
    """Send an object by server-side apply as a dry run; otherwise like `refused`."""
    try:
        await api.apply(kind, namespace, manifest, force=False, dry_run=True)
    except ApiError as error:
        return _unexpected(error)
    return None


def _unexpected(error: ApiError) -> ApiError | None:
    known = error.code == HTTPStatus.CONFLICT or NO_DRY_RUN in error.message
    return None if known else error


async def missing(api: Api, namespace: str, objects: Iterable[Needed]) -> list[Needed]:
    """Return which of these Secrets and claims a namespace certainly lacks."""
    asked = tuple(objects)
    are_missing = await asyncio.gather(*(_is_missing(api, namespace, each) for each in asked))
    return [each for each, gone in zip(asked, are_missing, strict=True) if gone]


async def _is_missing(api: Api, namespace: str, one: Needed) -> bool:
    """Return True if an object is not there; False if it is, or if nothing is known of it.

    The operator may create Secrets and not read them, and a dry run of a creation tells whether the
    name is taken, and nothing of what is in the Secret.
    """
    try:
        if one.kind == SECRET:
            metadata = {"name": one.name, "namespace": namespace}
            secret = {"apiVersion": "v1", "kind": SECRET, "metadata": metadata}
            await api.create("secrets", namespace, secret, dry_run=True)
            return True
        await api.get(CLAIMS, namespace, one.name)
    except ApiError as error:
        return one.kind != SECRET and error.code == HTTPStatus.NOT_FOUND
    return False
