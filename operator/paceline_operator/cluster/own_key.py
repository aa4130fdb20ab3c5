"""The operator's own keys: one is made at the first start and survives reinstallations (C2).

They are in the only Secret that the operator ever reads: in its own namespace, by name. The field
`key` is used for jobs that have no pods yet; any other field for jobs whose pods were made with it.
A key is replaced by moving it to another field, which disturbs no running job.

The Secret is checked every five minutes. If it was deleted, an operator that has the keys in memory
creates it again with the same content.
"""

from __future__ import annotations

import base64
import binascii
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final

from paceline_api.errors import EXIT_BAD_INPUT, PacelineError

from paceline_operator.cluster.api import Api, ApiError
from paceline_operator.cluster.kube import pause
from paceline_operator.cluster.rights import describe
from paceline_operator.core.keys import OPERATOR_KEY_BYTES, key_id

log = logging.getLogger("paceline.operator")

NAME: Final = "paceline-operator-key"
"""Name of the Secret."""
FIELD: Final = "key"
"""Field with the key for new jobs."""
LOOK_S: Final = 300.0
"""Seconds between two checks of the Secret."""


class OwnKeys:
    """The operator's keys. `changed` is called after they have been replaced."""

    def __init__(self, api: Api, changed: Callable[[], None]) -> None:
        self._api, self._changed = api, changed
        self._namespace = ""
        self._fields: Mapping[str, bytes] = {}
        self._known: dict[str, bytes] = {}

    @property
    def newest(self) -> str:
        """Id of the key for new jobs."""
        return key_id(self._fields[FIELD])

    def of(self, wanted: str) -> bytes | None:
        """Return the key with this id; None if it is lost."""
        return self._known.get(wanted)

    async def load(self, namespace: str) -> None:
        """Read the keys, or make the first one.

        Two operators that start at the same time get the same key, since one of the creations
        conflicts. The ApiError of a failed request passes to the caller.

        Args:
            namespace: Namespace of the Secret.

        Raises:
            PacelineError: The Secret cannot be read or made, or it holds no usable keys.
        """
        self._namespace = namespace
        for _ in range(3):
            fields = await self._read()
            if fields is not None:
                self._take(fields)
                return
            made = {FIELD: secrets.token_bytes(OPERATOR_KEY_BYTES)}
            if await self._create(made):
                log.info("made the operator's key %s", key_id(made[FIELD]))
                self._take(made)
                return
        raise PacelineError(
            f"the Secret {NAME} of namespace {namespace} can be neither read nor made",
            hint="see who deletes it again and again",
        )

    async def run(self, leads: Callable[[], bool]) -> None:
        """Check the Secret forever; failures are logged."""
        while True:
            await pause(LOOK_S)
            try:
                await self.look(leads())
            except ApiError as error:
                log.warning("the operator's key: %s", describe(error))
            except PacelineError as error:
                log.warning("the operator's key: %s", error)

    async def look(self, may_write: bool) -> None:
        """Check the Secret once, and create it again if it is gone and `may_write` is True."""
        fields = await self._read()
        if fields is None:
            if may_write and await self._create(self._fields):
                log.error(
                    "the Secret %s was deleted, and is made again with the same keys; without it "
                    "the next operator could speak to no job that runs",
                    NAME,
                )
        elif fields != self._fields:
            self._take(fields)

    def _take(self, fields: Mapping[str, bytes]) -> None:
        before, self._fields = self._fields, fields
        self._known = {key_id(key): key for key in fields.values()}
        if before:
            log.info("the operator's keys are now %s, the newest %s", [*self._known], self.newest)
            self._changed()

    async def _create(self, fields: Mapping[str, bytes]) -> bool:
        """Create the Secret; return False if another operator has created it first."""
        manifest = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "immutable": True,
            "metadata": {
                "name": NAME,
                "namespace": self._namespace,
                "labels": {"app.kubernetes.io/name": "paceline"},
            },
            "data": {name: base64.b64encode(key).decode() for name, key in fields.items()},
        }
        try:
            await self._api.create("secrets", self._namespace, manifest)
        except ApiError as error:
            if error.code != 409:
                raise
            return False
        return True

    async def _read(self) -> dict[str, bytes] | None:
        try:
            body = await self._api.get("secrets", self._namespace, NAME)
        except ApiError as error:
            if error.code != 404:
                raise
            return None
        return _fields_of(body)


def _fields_of(body: Mapping[str, Any]) -> dict[str, bytes]:
    data = body.get("data") or {}
    try:
        fields = {name: base64.b64decode(text, validate=True) for name, text in data.items()}
    except binascii.Error:
        fields = {}
    short = [name for name, key in fields.items() if len(key) < OPERATOR_KEY_BYTES]
    if FIELD not in fields or short:
        raise PacelineError(
            f"the Secret {NAME} holds no usable keys: "
            f"{', '.join(short) or FIELD} must have {OPERATOR_KEY_BYTES} bytes",
            hint=f"the field {FIELD} is the key for new jobs, other fields are earlier ones",
            exit_code=EXIT_BAD_INPUT,
        )
    return fields
