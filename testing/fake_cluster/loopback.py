"""The API server in memory on a real socket, for an operator that is a process of its own.

It replaces a control plane (cluster.control_plane) as far as an operator, stub coordinators and
benchmarks need one, at a hundredth of the cost. Nodes exist from the beginning. A pod is bound and
runs as soon as it is created, at an address of this machine.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec
from aiohttp import web

from testing.cluster import instance, kubeconfigs
from testing.cluster.api import Api
from testing.cluster.certificates import ADMINS, Authority
from testing.fake_cluster.http_api import HttpApi
from testing.fake_cluster.server import Server

HOST: Final = "127.0.0.1"
NODES: Final = 4
START_S: Final = 30.0
LOG_MAX: Final = 10_000
"""Number of events to remember; more are kept if an open watch has not read them yet."""


class Owned(Server):
    """Server that writes `managedFields`, as a real one does.

    For a small object they are most of its text.
    """

    def _bump(self, kind: str, what: str, body: dict[str, Any]) -> None:
        body["metadata"].pop("managedFields", None)
        account = {
            "manager": "somebody",
            "operation": "Update",
            "apiVersion": "v1",
            "time": "2026-01-01T00:00:00Z",
            "fieldsType": "FieldsV1",
            "fieldsV1": _fields(body),
        }
        body["metadata"]["managedFields"] = msgspec.Raw(msgspec.json.encode([account]))
        super()._bump(kind, what, body)


class Loopback:
    """The server, in a thread of its own between entering and leaving the block."""

    def __init__(self, folder: Path) -> None:
        self.instance = instance.acquire()
        self._folder, self._authority = folder, Authority(folder / "authority")
        self._port = self.instance.free_port()
        # Several instances may listen at the same port, so each has its own range of addresses.
        pods_at = f"127.{64 + 2 * self.instance.index}.0.0/15"
        self._addresses = ipaddress.ip_network(pods_at).hosts()
        self._nodes = 0
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="api", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(START_S), "the API server of memory does not listen"
        self.api = Api(self.kubeconfig_of("tests", ADMINS))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_S)
        self.instance.release(keep_logs=False)
        assert not self._thread.is_alive(), "the API server of memory does not end"

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"https://{HOST}:{self._port}"

    def kubeconfig_of(self, user: str, *groups: str) -> Path:
        """Write a kubeconfig for a user with these groups and return its path."""
        pair = self._authority.client(user, *groups)
        path = self._folder / f"{user}.yaml"
        return kubeconfigs.write(path, self.url, self._authority.certificate, pair)

    # ---- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._read, self._forgotten, self._due = 0, 0, False
        self.server = Owned(time.time)
        for number in range(NODES):
            self.server.insert("nodes", "", _node(f"node{number}"))
        self.server.watchers.append(self._news)
        self._http = HttpApi(self._loop, self.server, self._crashed)
        runner = web.ServerRunner(self._http.web, shutdown_timeout=0.2)
        await runner.setup()
        pair = self._authority.server("api", (HOST,))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.certificate, pair.key)
        await web.TCPSite(runner, HOST, self._port, ssl_context=context).start()
        self._up.set()
        await self._stop.wait()
        await runner.cleanup()

    def _crashed(self) -> None:
        raise AssertionError("nobody has told it to take its client along")

    def _news(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._kubelets)

    def _kubelets(self) -> None:
        self._due = False
        log = self.server.log
        while self._read < len(log):
            kind, what, body = log[self._read]
            self._read += 1
            if kind != "pods" or what == "DELETED":
                continue
            metadata = body["metadata"]
            place = kind, metadata["namespace"], metadata["name"]
            if "deletionTimestamp" in metadata:
                self.server.remove(*place, uid=metadata["uid"], at_once=True)
            elif what == "ADDED":
                self._nodes += 1
                self.server.change(*place, spec={"nodeName": f"node{self._nodes % NODES}"})
                self.server.change(*place, status=_running(body, str(next(self._addresses))))
        self._forget()

    def _forget(self) -> None:
        """Discard old events; a watch that resumes there has to list again."""
        log = self.server.log
        until = min([len(log) - LOG_MAX, *(stream.at for stream in self._http.streams)])
        while self._forgotten < until:
            kind, what, body = log[self._forgotten]
            version = body["metadata"]["resourceVersion"]
            log[self._forgotten] = kind, what, {"metadata": {"resourceVersion": version}}
            self._http.oldest = int(version)
            self._forgotten += 1


def _node(name: str) -> dict[str, Any]:
    ready = {"type": "Ready", "status": "True"}
    return {"metadata": {"name": name}, "spec": {}, "status": {"conditions": [ready]}}


def _running(pod: Mapping[str, Any], address: str) -> dict[str, Any]:
    kinds = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    containers = pod["spec"]["containers"]
    return {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": [{"type": kind, "status": "True"} for kind in kinds],
        "containerStatuses": [
            {"name": c["name"], "ready": True, "state": {"running": {}}} for c in containers
        ],
    }


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields as `managedFields` lists them; list items by their first entry."""
    if isinstance(value, Mapping):
        return {f"f:{name}": _fields(item) for name, item in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return {f'k:{{"{next(iter(i))}":"{next(iter(i.values()))}"}}': _fields(i) for i in value}
    return {}
