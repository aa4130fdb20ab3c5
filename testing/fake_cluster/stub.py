"""Stub coordinators for all jobs of a real API server whose pods are not real.

Each stub listens at the address of its pod, which leads to this machine, with the certificate and
the token that the operator's key yields for the job. The stubs learn of worker pods by a watch,
instead of registrations by agents, and end drained pods through the fake kubelet.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
import yaml
from aiohttp import web
from paceline_api.names import (
    COORDINATOR_PORT,
    LABEL_JOB,
    LABEL_ROLE,
    LABEL_SLOT,
    ROLE_COORDINATOR,
)
from paceline_operator.core.keys import JobKeys, job_keys

from testing.cluster.fake_kubelet import EXIT_CODE, session
from testing.fake_cluster.beside import JOBS, Plane, own_key, server_context
from testing.fake_cluster.parts import place_of
from testing.fake_cluster.pods_seen import owner_of, runs, trains
from testing.fake_cluster.ring import Place, Ring, State
from testing.loop_end import close_connections, close_server

POLL_S = 10.0
HANDSHAKE_S = 5.0
"""Timeout of a TLS handshake. It is shorter than `loop_end.TIMEOUT_S`, since a peer that was
stopped during one keeps its connection open."""
RETRY_S = 0.2
LOOK_S = 0.01


@dataclass(eq=False)
class Coordinator:
    """One coordinator pod that serves."""

    ring: Ring
    keys: JobKeys
    job_uid: str
    news: asyncio.Event = field(default_factory=asyncio.Event)
    runner: web.AppRunner | None = None
    server: asyncio.Server | None = None
    refused: int = 0


class Fleet:
    """The stubs for the jobs of one namespace, in a thread of their own."""

    def __init__(
        self, plane: Plane, namespace: str, *, start_s: float = 0.3, operator: str = ""
    ) -> None:
        """Prepare the stubs; `start_s`: start-up time of an agent; `operator`: its namespace."""
        self._plane, self._namespace, self._start_s = plane, namespace, start_s
        self._operator = operator or namespace
        self._path = f"/api/v1/namespaces/{namespace}/pods?labelSelector={quote(LABEL_JOB)}"
        self._since: dict[str, float] = {}
        """Uid of a worker pod -> time since which it runs."""
        self._config = yaml.safe_load(plane.kubeconfig_of("stubs", "system:masters").read_text())
        self._pods: dict[str, dict[str, Any]] = {}
        self._workers: dict[str, dict[str, dict[str, Any]]] = {}
        """Uid of a job -> its worker pods by uid."""
        self._due: set[str] = set()
        """Uids of jobs to update: many pods at once cause one update."""
        self._coordinators: dict[str, Coordinator] = {}
        """Uid of a coordinator pod -> its stub."""
        self._ended: set[str] = set()
        """Uids of the pods that the fake kubelet was asked to end."""
        self._states: dict[str, State] = {}
        self.wrong: list[str] = []
        self.hostile: dict[str, bytes] = {}
        """Job -> raw bytes that its coordinator returns at once for each status request."""
        self._key = b""
        """The operator's key."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._up = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="stubs", daemon=True)

    def __enter__(self) -> Fleet:
        self._thread.start()
        assert self._up.wait(20), self._failed
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        if self._failed is None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(15)
        if self._failed is not None:
            raise AssertionError("the stubs have failed") from self._failed
        assert not self._thread.is_alive(), "the stubs do not end"

    def coordinator(self, job: str = "digits") -> Coordinator | None:
        """Return the newest coordinator of a job, or None."""
        coordinators = [
            coordinator
            for coordinator in list(self._coordinators.values())
            if coordinator.ring.job == job
        ]
        return coordinators[-1] if coordinators else None

    def ring(self, job: str = "digits") -> Ring | None:
        """Return the state machine of a job's newest coordinator, or None."""
        coordinator = self.coordinator(job)
        return coordinator.ring if coordinator is not None else None

    def finish(self, job: str = "digits") -> None:
        """Complete a job: its pods end with exit code 0 and the outcome is kept."""
        self._call(self._finish, job)

    def slow(self, place: Place, job: str = "digits") -> None:
        """Report a rank's steps as ten times slower."""
        ring = self.ring(job)
        if ring is not None:
            ring.slow.add(place)
            ring.seq += 1

    def train(self) -> None:
        """Commit one round in every job that has members."""
        self._call(self._train)

    @property
    def serving(self) -> int:
        """Number of coordinators that serve."""
        return len(self._coordinators)

    # ---- in the thread ------------------------------------------------------------------------

    def _call(self, what: Callable[..., None], *words: Any) -> None:
        assert self._loop is not None
        done = threading.Event()

        def run() -> None:
            what(*words)
            done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(20)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # raised again in the thread that joins this one
            self._failed = error

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._sends: set[asyncio.Task[None]] = set()
        self._serving: set[Coordinator] = set()
        self._wholes: set[asyncio.Task[None]] = set()
        """Tasks that are never canceled, since their sockets would stay open."""
        async with session(self._config) as http:
            self._http = http
            watching = asyncio.create_task(self._watch())
            self._up.set()
            stopping = asyncio.create_task(self._stop.wait())
            await asyncio.wait([watching, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in (watching, stopping, *self._sends):
                task.cancel()
            results = await asyncio.gather(watching, *self._sends, return_exceptions=True)
            await asyncio.gather(*self._wholes)
            await asyncio.gather(*map(_serve_no_more, self._serving))
        await close_connections()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _watch(self) -> None:
        while True:
            try:
                version = await self._list()
                await self._follow(version)
            except (aiohttp.ClientError, TimeoutError, OSError):
                await asyncio.sleep(RETRY_S)  # the API server may be away

    async def _list(self) -> str:
        async with self._http.get(self._path) as answer:
            answer.raise_for_status()
            pods = msgspec.json.decode(await answer.read())
        uids = {pod["metadata"]["uid"] for pod in pods["items"]}
        for gone in set(self._pods) - uids:
            await self._gone(self._pods[gone])
        for pod in pods["items"]:
            await self._on_pod(pod)
        return str(pods["metadata"]["resourceVersion"])

    async def _follow(self, version: str) -> None:
        query = f"&watch=1&resourceVersion={version}&timeoutSeconds=240"
        forever = aiohttp.ClientTimeout(None)
        async with self._http.get(self._path + query, timeout=forever) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                event = msgspec.json.decode(line)
                if event["type"] == "ERROR":
                    return
                if event["type"] == "DELETED":
                    await self._gone(event["object"])
                else:
                    await self._on_pod(event["object"])

    # ---- pods -----------------------------------------------------------------------------------

    async def _on_pod(self, pod: dict[str, Any]) -> None:
        uid = pod["metadata"]["uid"]
        self._pods[uid] = pod
        if LABEL_SLOT in pod["metadata"]["labels"]:
            self._workers.setdefault(owner_of(pod), {})[uid] = pod
        if pod["metadata"]["labels"].get(LABEL_ROLE) == ROLE_COORDINATOR:
            if runs(pod) and uid not in self._coordinators:
                await self._open(pod)
            elif not runs(pod):
                await self._close(uid)
        elif trains(pod) and uid not in self._since:
            assert self._loop is not None
            self._since[uid] = self._loop.time()
            self._loop.call_later(self._start_s, self._look_at, owner_of(pod))
        self._look_at(owner_of(pod))

    async def _gone(self, pod: dict[str, Any]) -> None:
        uid, job_uid = pod["metadata"]["uid"], owner_of(pod)
        self._pods.pop(uid, None)
        self._workers.get(job_uid, {}).pop(uid, None)
        await self._close(uid)
        self._look_at(job_uid)

    def _alive(self, job_uid: str) -> dict[Place, str]:
        return {
            place_of(pod): pod["metadata"]["uid"]
            for pod in self._workers.get(job_uid, {}).values()
            if trains(pod) and self._up_for(pod) >= 0.99 * self._start_s
        }

    async def _lives(self, uid: str) -> bool:
        """Ask the API server whether a pod trains: the watch here may lag behind the operator's."""
        if (pod := self._pods.get(uid)) is None:
            return False
        path = f"/api/v1/namespaces/{self._namespace}/pods/{pod['metadata']['name']}"
        async with self._http.get(path) as answer:
            if answer.status == 404:
                return False
            answer.raise_for_status()
            current = msgspec.json.decode(await answer.read())
        return bool(current["metadata"]["uid"] == uid and trains(current))

    def _up_for(self, pod: dict[str, Any]) -> float:
        assert self._loop is not None
        now_s = self._loop.time()
        return now_s - self._since.get(pod["metadata"]["uid"], now_s)

    def _look_at(self, job_uid: str) -> None:
        assert self._loop is not None
        if job_uid not in self._due:
            self._due.add(job_uid)
            self._loop.call_later(LOOK_S, self._step, job_uid)

    def _step(self, job_uid: str) -> None:
        self._due.discard(job_uid)
        for coordinator in self._coordinators.values():
            if coordinator.job_uid != job_uid:
                continue
            before = coordinator.ring.seq
            alive = self._alive(job_uid)
            self._end(job_uid, coordinator.ring.step(alive))
            if coordinator.ring.seq != before:
                coordinator.news.set()

    def _end(self, job_uid: str, places: set[Place]) -> None:
        if not places:
            return
        for pod in self._workers.get(job_uid, {}).values():
            uid = pod["metadata"]["uid"]
            if place_of(pod) in places and uid not in self._ended:
                self._ended.add(uid)
                task = asyncio.create_task(self._annotate(pod))
                self._sends.add(task)
                task.add_done_callback(self._sends.discard)

    async def _annotate(self, pod: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        body = {"metadata": {"uid": metadata["uid"], "annotations": {EXIT_CODE: "0"}}}
        headers = {"Content-Type": "application/merge-patch+json"}
        data = msgspec.json.encode(body)
        try:
            async with self._http.patch(path, data=data, headers=headers) as done:
                await done.read()
                if done.status in (200, 404):
                    return
        except (aiohttp.ClientError, TimeoutError, OSError):
            pass  # the API server may be away
        self._ended.discard(metadata["uid"])
        assert self._loop is not None
        self._loop.call_later(RETRY_S, self._look_at, owner_of(pod))

    def _finish(self, job: str) -> None:
        coordinator = self.coordinator(job)
        assert coordinator is not None, f"no coordinator of {job} serves"
        coordinator.ring.finish()
        self._end(coordinator.job_uid, set(self._alive(coordinator.job_uid)))
        coordinator.news.set()

    def _train(self) -> None:
        for coordinator in self._coordinators.values():
            if coordinator.ring.members:
                coordinator.ring.train()
                coordinator.news.set()

    # ---- one coordinator ------------------------------------------------------------------------

    async def _open(self, pod: dict[str, Any]) -> None:
        metadata, job_uid = pod["metadata"], owner_of(pod)
        job = metadata["labels"][LABEL_JOB]
        async with self._http.get(f"{JOBS.format(self._namespace)}/{job}") as answer:
            body = msgspec.json.decode(await answer.read())
        if body.get("metadata", {}).get("uid") != job_uid:
            return  # the job was deleted meanwhile
        ring = Ring(
            job,
            metadata["uid"],
            body["spec"]["replicas"],
            "checkpoint" in body["spec"],
            self._states.setdefault(job_uid, State()),
        )
        self._key = self._key or await asyncio.to_thread(own_key, self._plane, self._operator)
        keys = job_keys(self._key, job_uid)
        coordinator = Coordinator(ring, keys, job_uid)
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/status", partial(self._status, coordinator)),
                web.post("/v1/inventory", partial(self._inventory, coordinator)),
                web.post("/v1/targets", partial(self._targets, coordinator)),
            ]
        )
        coordinator.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        self._serving.add(coordinator)
        await coordinator.runner.setup()
        assert coordinator.runner.server is not None
        await asyncio.shield(self._whole(_listen(coordinator, pod["status"]["podIP"])))
        self._coordinators[metadata["uid"]] = coordinator

    async def _close(self, uid: str) -> None:
        coordinator = self._coordinators.pop(uid, None)
        if coordinator is not None:
            self._serving.discard(coordinator)
            self._whole(_serve_no_more(coordinator))

    def _whole(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._wholes.add(task)
        task.add_done_callback(self._wholes.discard)
        return task

    async def _status(self, coordinator: Coordinator, request: web.Request) -> web.Response:
        if not _trusted(coordinator, request):
            return web.Response(status=401)
        if raw := self.hostile.get(coordinator.ring.job):
            return web.Response(body=raw, content_type="application/json")
        try:
            async with asyncio.timeout(POLL_S):
                while request.query.get("after") == str(coordinator.ring.seq):
                    coordinator.news.clear()
                    await coordinator.news.wait()
        except TimeoutError:
            pass  # no news is a valid answer
        return web.json_response(coordinator.ring.body())

    async def _inventory(self, coordinator: Coordinator, request: web.Request) -> web.Response:
        if not _trusted(coordinator, request):
            return web.Response(status=401)
        inventory = await request.json()
        listed = {(slot, attempt) for slot, attempt in inventory["pods"]}
        alive = {
            place: uid
            for place, uid in self._alive(coordinator.job_uid).items()
            if place in listed or await self._lives(uid)
        }
        coordinator.ring.hear(inventory, alive)
        self._wrong(coordinator)
        self._turn(coordinator)
        return web.json_response({})

    async def _targets(self, coordinator: Coordinator, request: web.Request) -> web.Response:
        if not _trusted(coordinator, request):
            return web.Response(status=401)
        coordinator.ring.aim(await request.json())
        self._turn(coordinator)
        return web.json_response({})

    def _turn(self, coordinator: Coordinator) -> None:
        self._end(coordinator.job_uid, coordinator.ring.step(self._alive(coordinator.job_uid)))
        coordinator.news.set()

    def _wrong(self, coordinator: Coordinator) -> None:
        self.wrong += coordinator.ring.wrong
        coordinator.ring.wrong.clear()


async def _listen(coordinator: Coordinator, host: str) -> None:
    assert coordinator.runner is not None
    # aiohttp's TCPSite would wait a minute for the handshake of a peer.
    coordinator.server = await asyncio.get_running_loop().create_server(
        coordinator.runner.server,  # type: ignore[arg-type]
        host,
        COORDINATOR_PORT,
        ssl=server_context(coordinator.keys),
        ssl_handshake_timeout=HANDSHAKE_S,
    )


async def _serve_no_more(coordinator: Coordinator) -> None:
    """Stop serving without waiting for a peer's end of TLS: the peer may be stopped."""
    runner = coordinator.runner
    assert runner is not None
    if coordinator.server is not None:
        await close_server(coordinator.server)
    open_now = _open_now(runner.server) if runner.server else []
    await runner.cleanup()
    for transport in open_now:
        transport.abort()


def _open_now(server: web.Server) -> list[asyncio.Transport]:
    """Return the connections of a server.

    After the server's clean-up these are the ones whose handshake was in progress.

    Args:
        server: the server.

    Returns:
        the transports of its connections.
    """
    return [each.transport for each in server.connections if each.transport is not None]


def _trusted(coordinator: Coordinator, request: web.Request) -> bool:
    good = request.headers.get("Authorization") == f"Bearer {coordinator.keys.operator_token}"
    coordinator.refused += not good
    return good
