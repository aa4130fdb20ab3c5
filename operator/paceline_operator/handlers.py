"""kopf's part: it watches TrainingJobs and hands each of their events to the store.

Nothing else of kopf is used (C11): no handlers of changes, no daemons, no timers, no peering, no
finalizers, no annotations on the user's object, no Events. What a decision needs is in the store,
and a lost or repeated event makes no difference.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import kopf
from paceline_api.crdgen import PLURAL
from paceline_api.types.job import GROUP, VERSION

from paceline_operator.cluster.store import Store


def make_registry(store: Store) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**given: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_kubeconfig(**given) or kopf.login_with_service_account(**given)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def seen(type: str | None, body: Mapping[str, Any], **_: Any) -> None:  # noqa: A002
        plain = _plain(body)
        metadata = plain["metadata"]
        if type == "DELETED":
            store.drop_job((metadata["namespace"], metadata["name"]), metadata["uid"])
        else:
            store.put_job(plain)

    return registry


def make_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    # A watch that dies silently: the server ends it, or the silence does.
    settings.watching.server_timeout = 600
    settings.watching.connect_timeout = 5
    settings.networking.request_timeout = 15
    settings.queueing.idle_timeout = 5
    # kopf says at INFO what it does for each object.
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    return settings


def _plain(value: Any) -> Any:
    """kopf's views of an object as ordinary mappings, without the bookkeeping of field owners."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if key != "managedFields"}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
