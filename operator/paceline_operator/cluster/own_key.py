"""The operator's own key: made at its first start, kept over reinstallations (C2).

The only Secret that the operator ever reads, in its own namespace, by name.
"""

from __future__ import annotations

import base64
import logging
import secrets
from typing import Final

from paceline_operator.cluster.api import Api, ApiError
from paceline_operator.core.keys import OPERATOR_KEY_BYTES, key_id

log = logging.getLogger("paceline.operator")

NAME: Final = "paceline-operator-key"
FIELD: Final = "key"


async def operator_key(api: Api, namespace: str) -> bytes:
    """Two operators that start together end with the same key: one of the creations conflicts."""
    for _ in range(3):
        try:
            return await _read(api, namespace)
        except ApiError as error:
            if error.code != 404:
                raise
        key = secrets.token_bytes(OPERATOR_KEY_BYTES)
        manifest = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "immutable": True,
            "metadata": {
                "name": NAME,
                "namespace": namespace,
                "labels": {"app.kubernetes.io/name": "paceline"},
                "annotations": {"paceline.dev/key-id": key_id(key)},
            },
            "data": {FIELD: base64.b64encode(key).decode()},
        }
        try:
            await api.create("secrets", namespace, manifest)
        except ApiError as error:
            if error.code != 409:
                raise
        else:
            log.info("made the operator's key %s", key_id(key))
            return key
    return await _read(api, namespace)


async def _read(api: Api, namespace: str) -> bytes:
    body = await api.get("secrets", namespace, NAME)
    return base64.b64decode(body["data"][FIELD])
