"""Nodes that exist in the API server only, for tests with more pods than a machine can run.

Bound pods become Running and Ready at once. Deleted pods disappear at once. The annotation
`paceline.test/exit-code` ends a pod, with Succeeded for 0 and Failed otherwise. No container runs.
The fake kubelet is a process of its own, so its CPU time is not counted as the operator's.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import ssl
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml

EXIT_CODE = "paceline.test/exit-code"
EVICTED = "evicted"
"""Value of the annotation, instead of an exit code, that evicts the pod."""
BOUND = "/api/v1/pods?fieldSelector=spec.nodeName!="
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
LEASE_RENEW_S = 5.0
WATCH_S = 240
REQUESTS_AT_ONCE = 64
LINE_BYTES_MAX = 4 << 20
log = logging.getLogger("fake-kubelet")
RETRY_S = 0.5
BUSY = (HTTPStatus.TOO_MANY_REQUESTS,)
GONE = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)


class Metadata(msgspec.Struct):
    """The fields of an object's metadata that the fake kubelet reads."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resourceVersion: str = ""  # noqa: N815 - the API's own name
    deletionTimestamp: str | None = None  # noqa: N815
    annotations: dict[str, str] | None = None


class Container(msgspec.Struct):
    """The fields of a container that are repeated in its status."""

    name: str
    image: str = ""


class PodSpec(msgspec.Struct):
    """The fields of a pod's spec that the fake kubelet reads."""

    # The pod of a bookmark has null here.
    containers: list[Container] | None = None


class PodStatus(msgspec.Struct):
    """The fields of a pod's status that the fake kubelet reads."""

    phase: str = ""


class Pod(msgspec.Struct):
    """The parts of a pod that the fake kubelet reads."""

    metadata: Metadata
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)


class PodList(msgspec.Struct):
    """Answer to a list request: the pods, and the version at which a watch may begin."""

    metadata: Metadata
    items: list[Pod]


class Event(msgspec.Struct):
    """One line of a watch; only after its type is known is the object decoded as a pod."""

    type: str
    object: msgspec.Raw


class FakeKubelet:
    """Kubelet of all nodes that it created in the API server."""

    def __init__(self, http: aiohttp.ClientSession, nodes: list[str], pods: str) -> None:
        self._http = http
        self._nodes = nodes
        # Pod uid -> the last state requested for it: "run", its exit code, or "go".
        self._phases: dict[str, str] = {}
        self._addresses = deque(islice(ipaddress.ip_network(pods).hosts(), 1, None))
        self._given: dict[str, str] = {}
        """Pod uid -> its address."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: dict[str, asyncio.Lock] = {}
        """Pod uid -> lock that keeps the writes for one pod in order."""

    async def run(self, pods_per_node: int) -> None:
        """Create the nodes and their leases, then renew leases and watch pods forever."""
        for node in self._nodes:
            await self._send("POST", "/api/v1/nodes", _node(node, pods_per_node))
            await self._send("POST", LEASES, _lease(node))
        await asyncio.gather(self._renew(), self._watch())

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_RENEW_S)
            for node in self._nodes:
                await self._send("PATCH", f"{LEASES}/{node}", {"spec": _lease(node)["spec"]})

    async def _watch(self) -> None:
        version = ""
        while True:
            try:
                if not version:
                    version = await self._list()
                version = await self._follow(version)
            except (aiohttp.ClientError, TimeoutError) as error:
                # The API server may be away. The next list has what happened meanwhile.
                log.warning("watch ended: %r", error)
                version = ""
                await asyncio.sleep(RETRY_S)

    async def _list(self) -> str:
        async with self._http.get(BOUND) as answer:
            answer.raise_for_status()
            pods = msgspec.json.decode(await answer.read(), type=PodList)
        for pod in pods.items:
            self._look_at(pod)
        return pods.metadata.resourceVersion

    async def _follow(self, version: str) -> str:
        """Watch until the server ends it; return where to resume, or "" to list again."""
        query = f"&watch=1&resourceVersion={version}&timeoutSeconds={WATCH_S}&allowWatchBookmarks=1"
        async with self._http.get(BOUND + query, timeout=aiohttp.ClientTimeout(None)) as answer:
            if answer.status == HTTPStatus.GONE:
                return ""
            answer.raise_for_status()
            async for line in answer.content:
                event = msgspec.json.decode(line, type=Event)
                if event.type == "ERROR":
                    return ""
                pod = msgspec.json.decode(event.object, type=Pod)
                version = pod.metadata.resourceVersion
                if event.type == "DELETED":
                    self._forget(pod.metadata.uid)
                elif event.type != "BOOKMARK":
                    self._look_at(pod)
        return version

    def _forget(self, uid: str) -> None:
        self._phases.pop(uid, None)
        self._turns.pop(uid, None)
        if address := self._given.pop(uid, ""):
            self._addresses.append(ipaddress.ip_address(address))

    def _address(self, uid: str) -> str:
        """Return the pod's address; a new pod gets the one that has been free for longest."""
        if uid not in self._given:
            self._given[uid] = str(self._addresses.popleft())
        return self._given[uid]

    def _look_at(self, pod: Pod) -> None:
        meta = pod.metadata
        exit_code = (meta.annotations or {}).get(EXIT_CODE)
        wanted = "go" if meta.deletionTimestamp else exit_code or "run"
        over = pod.status.phase in ("Succeeded", "Failed")
        if self._phases.get(meta.uid) == wanted or (over and wanted != "go"):
            return  # a finished pod never changes again
        self._phases[meta.uid] = wanted
        path = f"/api/v1/namespaces/{meta.namespace}/pods/{meta.name}"
        if wanted == "go":
            body = {"gracePeriodSeconds": 0, "preconditions": {"uid": meta.uid}}
            sending = self._send("DELETE", path, body)
        else:
            status = _running(pod, self._address(meta.uid)) if wanted == "run" else None
            status = status or _ended(pod, wanted)
            status_patch = {"metadata": {"uid": meta.uid}, "status": status}
            sending = self._send("PATCH", f"{path}/status", status_patch)
        task = asyncio.create_task(self._in_turn(meta.uid, sending))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _in_turn(self, uid: str, sending: Coroutine[Any, Any, None]) -> None:
        async with self._turns.setdefault(uid, asyncio.Lock()):
            await sending

    async def _send(self, method: str, path: str, body: dict[str, Any]) -> None:
        """Retry until the server accepts the request; it may be away or overloaded."""
        while True:
            try:
                if await self._sent(method, path, body):
                    return
            except (aiohttp.ClientError, TimeoutError) as error:
                log.warning("%s %s: %r", method, path, error)
            await asyncio.sleep(RETRY_S)

    async def _sent(self, method: str, path: str, body: dict[str, Any]) -> bool:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        async with self._http.request(
            method, path, data=msgspec.json.encode(body), headers={"Content-Type": kind}
        ) as answer:
            if answer.status < HTTPStatus.BAD_REQUEST or answer.status in GONE:
                return True
            log.warning("%s %s: %d %s", method, path, answer.status, await answer.text())
            # The server would refuse a repeated request for the same reason.
            return answer.status not in BUSY and answer.status < HTTPStatus.INTERNAL_SERVER_ERROR


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _node(name: str, pods: int) -> dict[str, Any]:
    capacity = {"cpu": "100k", "memory": "1000Ti", "pods": str(pods)}
    ready = {"type": "Ready", "status": "True", "reason": "Fake", "lastHeartbeatTime": _now()}
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "status": {"capacity": capacity, "allocatable": capacity, "conditions": [ready]},
    }


def _lease(node: str) -> dict[str, Any]:
    renewed = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    spec = {"holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": renewed}
    return {"metadata": {"name": node}, "spec": spec}


def _running(pod: Pod, address: str) -> dict[str, Any]:
    now = _now()
    kinds = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    state = {"running": {"startedAt": now}}
    return {
        "phase": "Running",
        "startTime": now,
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": [
            {"type": kind, "status": "True", "lastTransitionTime": now} for kind in kinds
        ],
        "containerStatuses": _statuses(pod, state, ready=True),
    }


def _ended(pod: Pod, outcome: str) -> dict[str, Any]:
    if outcome == EVICTED:
        return {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}
    exit_code = int(outcome)
    reason = "Error" if exit_code else "Completed"
    state = {"terminated": {"exitCode": exit_code, "reason": reason, "finishedAt": _now()}}
    phase = "Failed" if exit_code else "Succeeded"
    return {"phase": phase, "containerStatuses": _statuses(pod, state, ready=False)}


def _statuses(pod: Pod, state: dict[str, Any], *, ready: bool) -> list[dict[str, Any]]:
    common = {"ready": ready, "started": ready, "restartCount": 0, "imageID": "", "state": state}
    return [{"name": one.name, "image": one.image} | common for one in pod.spec.containers or ()]


@asynccontextmanager
async def session(config: dict[str, Any]) -> AsyncIterator[aiohttp.ClientSession]:
    """Yield an HTTP session that is authenticated with a kubeconfig's client certificate."""
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    tls = ssl.create_default_context(cafile=cluster["certificate-authority"])
    tls.load_cert_chain(user["client-certificate"], user["client-key"])
    # One connection more than requests at once, for the watch.
    connections = aiohttp.TCPConnector(ssl=tls, limit=REQUESTS_AT_ONCE + 1)
    async with aiohttp.ClientSession(
        cluster["server"],
        connector=connections,
        read_bufsize=LINE_BYTES_MAX,
        timeout=aiohttp.ClientTimeout(total=300, sock_connect=10),
    ) as http:
        yield http


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--nodes", required=True, help="names, with commas")
    parser.add_argument("--pods-per-node", type=int, required=True)
    parser.add_argument("--pod-range", required=True, help="addresses that pods are given")
    return parser.parse_args()


async def main(arguments: argparse.Namespace, config: dict[str, Any]) -> None:
    """Run the fake kubelet against the cluster of the kubeconfig."""
    async with session(config) as http:
        kubelet = FakeKubelet(http, arguments.nodes.split(","), arguments.pod_range)
        await kubelet.run(arguments.pods_per_node)


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    given = parsed()
    asyncio.run(main(given, yaml.safe_load(given.kubeconfig.read_text())))
