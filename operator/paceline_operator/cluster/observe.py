"""The watches of pods, nodes, profiles and runtimes, each for the whole scope of the operator.

A watch can die silently: a proxy cuts its connection, or the server stops sending. The server sends
a bookmark about once a minute. A longer silence therefore ends the connection, and the watch
continues from the last version, or from a new list if that version is too old (410).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import aiohttp
import msgspec
from msgspec import Struct
from paceline_api.decoding import UNDECODABLE
from paceline_api.names import LABEL_MANAGER, manager_label
from paceline_api.types.enums import RuntimeKind
from paceline_api.types.fabric import FABRIC_PLURAL
from paceline_api.types.job import API_VERSION
from paceline_api.types.runtime import PLURALS

from paceline_operator.cluster.api import ApiError
from paceline_operator.cluster.kube import Kube, pause
from paceline_operator.cluster.rights import describe
from paceline_operator.cluster.store import Store
from paceline_operator.cluster.wire import (
    FabricObject,
    NodeObject,
    PodObject,
    RuntimeObject,
    fabric_from,
    node_of,
    pod_of,
    runtime_of,
)
from paceline_operator.metrics import OperatorMetrics

log = logging.getLogger("paceline.operator")

SILENCE_S: Final = 100.0
"""Seconds without data after which a watch is reopened; bookmarks come about every 60 s."""
SERVER_S: Final = 3000
"""Seconds after which the server itself ends a watch."""
PAGE: Final = 500
"""Number of objects in one page of a list."""
RETRY_S: Final = 0.2
"""Delay before the first retry in seconds; it doubles up to RETRY_MAX_S."""
RETRY_MAX_S: Final = 15.0
BREAK_S: Final = RETRY_MAX_S + 5
"""Seconds of disconnection that count as an outage. Shorter ones do not: proxies cut connections
regularly."""

Item = TypeVar("Item", PodObject, NodeObject, FabricObject, RuntimeObject)
T = TypeVar("T")


class Listed(Struct, Generic[Item]):
    """A page of a list in the JSON of the API server."""

    items: list[Item]
    metadata: dict[str, Any] = {}


class WatchEvent(Struct, Generic[Item]):
    """One event of a watch in the JSON of the API server."""

    type: str
    object: Item


class Failed(Struct, frozen=True):
    """The Status object in an error of a watch."""

    code: int = 0
    message: str = ""


class Trouble(Struct, frozen=True):
    """An event of the type ERROR."""

    type: str
    object: Failed = Failed()


_TROUBLE: Final = msgspec.json.Decoder(Trouble)


@dataclass(slots=True)
class Source(Generic[Item]):
    """One kind of object, where its objects go, and the state of its watch."""

    kind: str
    path: str
    selector: str
    page: msgspec.json.Decoder[Listed[Item]]
    event: msgspec.json.Decoder[WatchEvent[Item]]
    listed: Callable[[list[Item]], None]
    put: Callable[[Item], None]
    drop: Callable[[Item], None]
    version: str = ""
    """The resourceVersion from which the watch continues; empty: it starts with a list."""
    heard_s: float = 0.0
    """Time of the last sign of life; 0 before the first one."""
    live_s: float = 0.0
    """Time since which the watch has had no outage."""
    lost_s: float | None = None
    """Time since which the connection has been down; None if it is up."""
    synced: bool = False
    denied: str = ""
    """The request to which the operator has no right; empty if it has the right."""
    optional: bool = False
    """True if the API server may not serve this kind; the list is empty then."""


class Watch(Generic[Item]):
    """Watch of one kind of object, which passes each change to its source's callbacks."""

    def __init__(
        self, kube: Kube, source: Source[Item], clock: Callable[[], float], metrics: OperatorMetrics
    ) -> None:
        self._kube, self._clock, self._metrics = kube, clock, metrics
        self.source: Source[Item] = source
        self._asked_s: float | None = None
        """Time of the request that is not answered yet; None if there is none."""

    @property
    def kind(self) -> str:
        """Plural name of the resource."""
        return self.source.kind

    @property
    def age_s(self) -> float:
        """Seconds since the last sign of life; 0 before the first one."""
        return self._clock() - self.source.heard_s if self.source.heard_s else 0.0

    @property
    def denied(self) -> str:
        """The request to which the operator has no right; empty if it has the right."""
        return self.source.denied

    @property
    def fresh(self) -> bool:
        """Return True if the watch has its first list and a recent sign of life."""
        return self.source.synced and self.age_s < SILENCE_S + 20

    @property
    def live_since_s(self) -> float | None:
        """Time since which the watch has had no outage; None if it has one now."""
        return self.source.live_s if self.source.synced and self.source.lost_s is None else None

    def _lose(self, since_s: float) -> None:
        """Record that the connection is down; `since_s` is when it may have been up last."""
        if self.source.lost_s is None:
            self.source.lost_s = since_s

    def _failed_s(self) -> float:
        """Return the time since which a connection that has just failed may have been down."""
        return self._clock() if self._asked_s is None else self._asked_s

    def _regain(self) -> None:
        """Record that the API server answers a list or a watch."""
        source, now_s = self.source, self._clock()
        self._asked_s = None
        if not source.live_s or (source.lost_s is not None and now_s - source.lost_s >= BREAK_S):
            source.live_s = now_s
        source.heard_s, source.lost_s = now_s, None

    async def run(self) -> None:
        """Follow the objects forever; the watch is reopened after any failure."""
        delay_s = RETRY_S
        while True:
            cause = "ended"
            self._asked_s = self._clock()
            try:
                if not self.source.version:
                    await self._list()
                await self._follow()
                delay_s = RETRY_S
            except ApiError as error:
                cause = str(error.code or error.reason)
                if error.code == 410:
                    self.source.version, delay_s = "", RETRY_S
                else:
                    self._lose(self._failed_s())
                    self.source.version = "" if error.code else self.source.version
                missing = self.source.optional and error.code in (403, 404)
                if missing:
                    self._none()
                else:
                    self.source.denied = error.denied
                log.log(
                    logging.INFO if missing or error.code == 410 else logging.WARNING,
                    "watch of %s: %s",
                    self.source.kind,
                    error if missing else describe(error),
                )
            except (TimeoutError, aiohttp.SocketTimeoutError):
                cause = "silent"
                self._lose(self.source.heard_s)
                log.warning("watch of %s was silent for %g s", self.source.kind, SILENCE_S)
            except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
                cause = type(error).__name__
                self._lose(self._failed_s())
                log.warning("watch of %s: %s: %s", self.source.kind, cause, error)
            self._metrics.watch_restarts.labels(self.source.kind, cause).inc()
            await pause(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, RETRY_MAX_S)

    async def _list(self) -> None:
        """Read all objects, in pages, as of one version."""
        query = {"limit": str(PAGE), "labelSelector": self.source.selector}
        items: list[Item] = []
        token = ""
        while True:
            asked = query | ({"continue": token} if token else {})
            async with self._kube.stream(self.source.path, asked, silence_s=30.0) as stream:
                page = self.read_page(await stream.read())
            items += page.items
            token = str(page.metadata.get("continue") or "")
            if not token:
                break
        self.source.listed(items)
        self.source.version = str(page.metadata.get("resourceVersion") or "")
        self.source.synced = True
        self._regain()

    def _none(self) -> None:
        self.source.listed([])
        self.source.synced = True
        self._regain()

    async def _follow(self) -> None:
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self.source.version,
            "timeoutSeconds": str(SERVER_S),
            "labelSelector": self.source.selector,
        }
        async with self._kube.stream(self.source.path, query, silence_s=SILENCE_S) as stream:
            self._regain()
            self.source.denied = ""
            async for line in _lines(stream):
                self.source.heard_s = self._clock()
                self.take(line)

    def read_page(self, raw: bytes) -> Listed[Item]:
        """Return a page of a list; msgspec.MsgspecError if it is malformed."""
        return _decoded(self.source.page, raw)

    def take(self, line: bytes) -> None:
        """Pass one line of the watch to the source's callbacks.

        A malformed line raises msgspec.MsgspecError.

        Args:
            line: One event as JSON.

        Raises:
            ApiError: The line is an error of the API server.
        """
        if line.startswith(b'{"type":"ERROR"'):
            failed = _decoded(_TROUBLE, line).object
            raise ApiError(failed.code or 500, "WatchError", failed.message)
        event = _decoded(self.source.event, line)
        self.source.version = event.object.metadata.resource_version or self.source.version
        if event.type == "BOOKMARK":
            return
        self._metrics.events.labels(self.source.kind).inc()
        if event.type == "DELETED":
            self.source.drop(event.object)
        else:
            self.source.put(event.object)


def _decoded(decoder: msgspec.json.Decoder[T], raw: bytes) -> T:
    """Decode JSON; too deep nesting is an error like any other.

    The author of a pod can nest fields as deep as they like.

    Args:
        decoder: Decoder of the type.
        raw: The JSON.

    Returns:
        The decoded value.

    Raises:
        msgspec.DecodeError: The JSON is malformed or too deep.
    """
    try:
        return decoder.decode(raw)
    except UNDECODABLE as error:
        raise msgspec.DecodeError(str(error)) from None


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Split a stream into lines.

    The stream reader's own limit for a line is too small for large objects.

    Args:
        stream: Body of a watch.

    Yields:
        Each line that is not empty, without its end.
    """
    rest = b""
    async for chunk in stream.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line:
                yield line
        await asyncio.sleep(0)  # let decisions run during a burst of events


def pod_source(store: Store, clock: Callable[[], float], namespace: str) -> Source[PodObject]:
    """Return the source of the pods of this operator's jobs.

    Args:
        store: Receives the pods.
        clock: Returns seconds of the wall clock.
        namespace: The only namespace to watch; empty for all.

    Returns:
        The source.
    """

    def put(item: PodObject) -> None:
        if entry := pod_of(item, clock()):
            store.put_pod((entry[0], entry[1]), entry[2])

    def drop(item: PodObject) -> None:
        if entry := pod_of(item, clock()):
            store.drop_pod((entry[0], entry[1]), entry[2].name, entry[2].uid)

    def listed(items: list[PodObject]) -> None:
        now_s = clock()
        pods = (pod_of(item, now_s) for item in items)
        store.keep_pods(((f[0], f[1]), f[2]) for f in pods if f is not None)

    within = f"/namespaces/{namespace}" if namespace else ""
    return Source(
        kind="pods",
        path=f"/api/v1{within}/pods",
        selector=f"{LABEL_MANAGER}={manager_label(store.manager)}",
        page=msgspec.json.Decoder(Listed[PodObject]),
        event=msgspec.json.Decoder(WatchEvent[PodObject]),
        listed=listed,
        put=put,
        drop=drop,
    )


def _all_of(
    known: Mapping[str, Any], put: Callable[[Item], None], drop: Callable[[str], None]
) -> Callable[[list[Item]], None]:
    """Return a callback for complete lists of objects that are known by name.

    Args:
        known: Objects by name.
        put: Stores an object of the list.
        drop: Removes an object that the list lacks.

    Returns:
        The callback.
    """

    def listed(items: list[Item]) -> None:
        for gone in set(known) - {item.metadata.name for item in items}:
            drop(gone)
        for item in items:
            put(item)

    return listed


def node_source(store: Store, clock: Callable[[], float]) -> Source[NodeObject]:
    """Return the source of the nodes."""

    def put(item: NodeObject) -> None:
        store.put_node(node_of(item, store.nodes.get(item.metadata.name), clock()))

    return Source(
        kind="nodes",
        path="/api/v1/nodes",
        selector="",
        page=msgspec.json.Decoder(Listed[NodeObject]),
        event=msgspec.json.Decoder(WatchEvent[NodeObject]),
        listed=_all_of(store.nodes, put, store.drop_node),
        put=put,
        drop=lambda item: store.drop_node(item.metadata.name),
    )


def fabric_source(store: Store) -> Source[FabricObject]:
    """Return the source of the cluster's fabric profiles; invalid ones are logged and dropped."""

    def put(item: FabricObject) -> None:
        result = fabric_from(item)
        if isinstance(result, str):
            log.warning("FabricProfile %s is left out: %s", item.metadata.name, result)
            store.drop_fabric(item.metadata.name)
        else:
            store.put_fabric(item.metadata.name, result)

    return Source(
        kind=FABRIC_PLURAL,
        path=f"/apis/{API_VERSION}/{FABRIC_PLURAL}",
        selector="",
        page=msgspec.json.Decoder(Listed[FabricObject]),
        event=msgspec.json.Decoder(WatchEvent[FabricObject]),
        listed=_all_of(store.fabrics, put, store.drop_fabric),
        put=put,
        drop=lambda item: store.drop_fabric(item.metadata.name),
        optional=True,
    )


def runtime_source(store: Store, kind: RuntimeKind, namespace: str) -> Source[RuntimeObject]:
    """Return the source of the runtimes of one kind.

    Args:
        store: Receives the runtimes.
        kind: The kind.
        namespace: The only namespace to watch; empty for all, and for a kind of the cluster.

    Returns:
        The source.
    """

    def listed(items: list[RuntimeObject]) -> None:
        runtimes = [runtime_of(item, kind) for item in items]
        known = {key for key in store.runtimes if key[0] == kind}
        for gone in known - {runtime.key for runtime in runtimes}:
            store.drop_runtime(gone)
        for runtime in runtimes:
            store.put_runtime(runtime)

    within = f"/namespaces/{namespace}" if namespace else ""
    return Source(
        kind=PLURALS[kind],
        path=f"/apis/{API_VERSION}{within}/{PLURALS[kind]}",
        selector="",
        page=msgspec.json.Decoder(Listed[RuntimeObject]),
        event=msgspec.json.Decoder(WatchEvent[RuntimeObject]),
        listed=listed,
        put=lambda item: store.put_runtime(runtime_of(item, kind)),
        drop=lambda item: store.drop_runtime(runtime_of(item, kind).key),
        optional=True,
    )
