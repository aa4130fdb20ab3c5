"""A cluster with the real operator inside: watches, queue, links and Lease on a virtual clock.

The program runs as it is delivered, kopf included. It talks HTTP to the API server and to the
coordinators over a virtual network. So every failure of a real network can occur here, in any order
that Hypothesis draws, and again in the same order.
"""

from __future__ import annotations

import asyncio
import base64
import gc
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final
from unittest.mock import patch

import aiohttp
import msgspec
from aiohttp import web
from kopf._cogs.clients.errors import APIError
from paceline_api.access.access import Access
from paceline_api.access.login import Login
from paceline_api.crdgen import PLURAL
from paceline_api.errors import PacelineError
from paceline_api.names import COORDINATOR_PORT, LABEL_JOB
from paceline_operator import main
from paceline_operator.cluster import own_key
from paceline_operator.cluster.api import ApiError
from paceline_operator.cluster.lease import Election
from paceline_operator.cluster.store import Key
from paceline_operator.core.changes import CoordinatorMessage
from paceline_operator.core.keys import job_keys
from paceline_operator.handlers import JobsWatch, make_settings
from paceline_operator.options import parse

from testing.fake_cluster.cluster import Cluster
from testing.fake_cluster.http_api import VirtualApi
from testing.fake_cluster.parts import NAMESPACE, START_S
from testing.fake_cluster.virtual import VirtualLoop

API_HOST: Final = "10.255.0.1"
OWN_NAMESPACE: Final = "paceline"
HEALTH: Final = ("10.255.0.2", 8080)


class Answer(StrEnum):
    """Wrong answers that a coordinator gives instead of its status."""

    REFUSED = "nobody listens"
    SILENT = "nothing comes back"
    CUT = "the connection ends"
    LATE = "the answer takes long"
    BROKEN = "half of an answer"
    HTML = "the page of a proxy"
    OTHER = "JSON of another shape"
    ERROR = "500"
    FORBIDDEN = "401"


@dataclass
class Post:
    """A coordinator that listens, with the credentials of its job."""

    key: Key
    uid: str
    host: str
    token: str
    news: asyncio.Event
    server: web.Server
    heard: frozenset[tuple[int, int]] = frozenset()
    """Pods that any inventory has listed."""


class InTheLoop(Election):
    """The election for the Lease as a task of the virtual loop, instead of a thread."""

    def __init__(self, loop: VirtualLoop, *words: Any, **more: Any) -> None:
        super().__init__(*words, clock=loop.time, **more)
        self._loop = loop

    def start(self) -> None:
        """Start the election as a task."""
        self.task = self._loop.create_task(self._elect())

    def stop(self) -> None:
        """End the election at its next turn."""
        self._ended.set()


class Inside(Cluster):
    """A cluster whose operator is the real program; it is restarted whenever it ends."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self._zero_s = self.loop.time()
        super().__init__()
        for name in self.nodes:
            self.server.insert("nodes", "", _node(name, ready=True))
        self.api = VirtualApi(self.loop, self.server, API_HOST, self.crash)
        self.posts: dict[str, Post] = {}
        """Uid of the coordinator's pod -> the listening coordinator."""
        self.manners: dict[str, Answer | None] = {}
        """Job -> how its present and future coordinators answer."""
        self.lives = 0
        self.ends: list[str] = []
        """Why earlier lives of the operator ended."""
        self.wrong: list[BaseException] = []
        """Errors that must not happen; raised at the next step."""
        self._sessions: list[aiohttp.ClientSession] = []
        """HTTP sessions of kopf, which does not close them when it is killed."""
        self._cleared = ExitStack()
        self._patched()
        self.start_operator()

    @property
    def now_s(self) -> float:  # type: ignore[override]
        """Current virtual time in seconds since the epoch."""
        return START_S + self.loop.time() - self._zero_s

    def close(self) -> None:
        """End the operator, all tasks and the loop."""
        self.crash()
        while left := asyncio.all_tasks(self.loop):
            for task in left:
                task.cancel()
            self._turn(0.05)
        for session in self._sessions:
            self.loop.run_until_complete(session.close())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
        self._cleared.close()
        # Tasks of kopf whose error nobody has read are reported once they are collected. The report
        # parses source; inside another `ast.parse` that raises SystemError (python/cpython#106905).
        gc.collect()

    # ---- the operator ---------------------------------------------------------------------------

    def _patched(self) -> None:
        """Replace the clocks of the program and its one thread."""
        world = self

        class Clocks:
            time = staticmethod(lambda: world.now_s)
            monotonic = staticmethod(world.loop.time)

        def in_the_loop(*words: Any, **more: Any) -> InTheLoop:
            return InTheLoop(world.loop, *words, **more)

        session = JobsWatch.session

        def kept(watch: JobsWatch, login: Login) -> aiohttp.ClientSession:
            made = session(watch, login)
            self._sessions.append(made)
            return made

        settings = make_settings()
        # Ten minutes after its end kopf would kill the whole process, in case something hangs.
        settings.process.ultimate_exiting_timeout = None

        for patched in (
            patch.object(main, "make_settings", lambda: settings),
            patch.object(JobsWatch, "session", kept),
            patch.object(main, "time", Clocks),
            patch.object(main, "Election", in_the_loop),
        ):
            self._cleared.enter_context(patched)

    def start_operator(self) -> None:
        """Start the operator for another life."""
        self.lives += 1
        self._dying = False
        options = parse(
            [
                f"--own-namespace={OWN_NAMESPACE}",
                "--identity=one",
                "--lease-duration=60",
                f"--listen={HEALTH[0]}:{HEALTH[1]}",
            ]
        )
        access = Access(lambda: Login(self.api.url, OWN_NAMESPACE))
        self.operator = main.Operator(options, access)
        links = self.operator._links
        send = links.send

        def judged(key: Key, message: CoordinatorMessage) -> None:
            if message.inventory is not None:
                self._blaming(lambda: self.judge(key, message.inventory.pods))
            send(key, message)

        links.send = judged  # type: ignore[method-assign]
        self._task = self.loop.create_task(self._live())

    async def _live(self) -> None:
        """Run the operator once and record why it ended."""
        try:
            code = await self.operator.run()
            self.ends.append(f"exit code {code}")
            if code != main.EXIT_DEPOSED and not self._dying:
                self.wrong.append(AssertionError(f"the operator has ended with {code}"))
        except (PacelineError, ApiError) as error:
            self.ends.append(str(error))
            if isinstance(error, ApiError) and not error.transient:
                self.wrong.append(error)
        except APIError as error:
            self.ends.append(f"kopf gave up its watch: {error}")
        except asyncio.CancelledError:
            self.ends.append("crashed")
            raise
        except BaseException as error:
            self.wrong.append(error)

    def crash(self) -> None:
        """Cut all connections and cancel the operator; what it still does has no effect."""
        if self._dying:
            return
        self._dying = True
        self.loop.network.cut(API_HOST)
        for post in self.posts.values():
            self.loop.network.cut(post.host)
        self._task.cancel()
        election = self.operator._election
        if election is not None:
            assert isinstance(election, InTheLoop)
            election.task.cancel()

    def _turn(self, seconds: float) -> None:
        """Run the loop without a task: kopf ends all tasks that are younger than its own."""
        self.loop.call_later(seconds, self.loop.stop)
        self.loop.run_forever()

    def spend(self, seconds: float) -> None:
        """Let time pass for the operator, and restart it whenever it ends."""
        until_s = self.loop.time() + seconds
        while (rest_s := until_s - self.loop.time()) > 0:
            self._turn(min(rest_s, 1.0))
            if self.operator._health.alive():
                self.crash()  # a kubelet restarts a container whose probe fails
            if self._task.done():
                self.loop.network.listeners.pop(HEALTH, None)
                self.start_operator()
            if self.wrong:
                raise self.wrong[0]

    def _blaming(self, check: Any) -> None:
        """Run a check and record its failure, which the operator's tasks would swallow."""
        try:
            check()
        except AssertionError as error:
            self.wrong.append(error)

    def settle(self, seconds: float = 30.0, step_s: float = 0.5) -> None:
        """Let time pass while kubelets, garbage collection and coordinators act."""
        for _ in range(max(1, round(seconds / step_s))):
            self.kubelets()
            self.server.collect_garbage()
            self.coordinators()
            self.spend(step_s)

    # ---- nodes and coordinators -----------------------------------------------------------------

    def node_ready(self, name: str, ready: bool) -> None:
        """Set a node's Ready condition, on the server too."""
        super().node_ready(name, ready)
        self.server.change("nodes", "", name, **_node_parts(ready))
        for post in self.posts.values():
            self._reach(post)

    def coordinators(self) -> None:
        """Let coordinators act; open and close their listeners as their pods come and go."""
        super().coordinators()
        serving = {
            pod["metadata"]["uid"]: pod
            for pod in self.server.of_kind("pods")
            if pod["status"].get("phase") == "Running" and self._is_post(pod)
        }
        for uid in set(self.posts) - set(serving):
            post = self.posts.pop(uid)
            self.loop.network.swallow(post.host, False)
            self.loop.network.listeners.pop((post.host, COORDINATOR_PORT), None)
            self.loop.network.cut(post.host)
        for uid, pod in serving.items():
            if uid not in self.posts:
                self._open(pod)
            self._reach(self.posts[uid])

    def _is_post(self, pod: Mapping[str, Any]) -> bool:
        key = (NAMESPACE, pod["metadata"]["labels"][LABEL_JOB])
        return key in self.ranks and self.ranks[key].uid == pod["metadata"]["uid"]

    def _open(self, pod: Mapping[str, Any]) -> None:
        metadata = pod["metadata"]
        key = (NAMESPACE, metadata["labels"][LABEL_JOB])
        secret = self.server.find("secrets", OWN_NAMESPACE, own_key.NAME)
        keys = job_keys(
            base64.b64decode(secret["data"][own_key.FIELD]), metadata["ownerReferences"][0]["uid"]
        )
        host = pod["status"]["podIP"]

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            return await self._serve(post, request)

        server = web.Server(answer, loop=self.loop, access_log=None)
        post = Post(key, metadata["uid"], host, keys.operator_token, asyncio.Event(), server)
        self.posts[post.uid] = post

    def _reach(self, post: Post) -> None:
        """Make a coordinator reachable as far as its node and its assigned fault allow."""
        pods = (pod for pod in self.pods(post.key[1], "coordinator"))
        node = next(
            (pod["spec"]["nodeName"] for pod in pods if pod["metadata"]["uid"] == post.uid), ""
        )
        wrong = self.manners.get(post.key[1])
        network, address = self.loop.network, (post.host, COORDINATOR_PORT)
        network.swallow(post.host, node in self.cut_off or wrong is Answer.SILENT)
        if wrong is Answer.REFUSED:
            network.listeners.pop(address, None)
            network.cut(post.host)
        elif address not in network.listeners:
            network.listen(address, post.server)

    def _tell(self, key: Key, body: dict[str, Any]) -> None:
        del body
        post = self.posts.get(self.ranks[key].uid)
        if post is not None:
            post.news.set()

    def misbehave(self, job: str, wrong: Answer | None) -> None:
        """Make the coordinators of a job answer wrongly, or well again with None."""
        self.manners[job] = wrong
        for post in self.posts.values():
            if post.key[1] == job:
                self._reach(post)
                if wrong is Answer.CUT:
                    self.loop.network.cut(post.host)

    async def _serve(self, post: Post, request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {post.token}":
            self.wrong.append(AssertionError("a coordinator was asked with another job's token"))
        response = await self._answer_of(post, request)
        wrong = self.manners.get(post.key[1])
        match wrong:
            case Answer.LATE:
                await asyncio.sleep(8.0)
            case Answer.CUT | Answer.BROKEN:
                assert request.transport is not None
                if wrong is Answer.BROKEN:
                    request.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{")
                request.transport.close()
            case Answer.HTML:
                return web.Response(text="<html>I am a proxy</html>", content_type="text/html")
            case Answer.OTHER:
                return web.json_response([["seq"], {"ranks": 7}])
            case Answer.ERROR:
                return web.Response(status=500, text="oops")
            case Answer.FORBIDDEN:
                return web.Response(status=401)
        return response

    async def _answer_of(self, post: Post, request: web.BaseRequest) -> web.StreamResponse:
        ranks = self.ranks.get(post.key)
        if ranks is None or ranks.uid != post.uid:
            return web.Response(status=503)
        if request.path == "/v1/inventory":
            inventory = msgspec.json.decode(await request.read())
            self._hear(post, inventory["revision"], frozenset(map(tuple, inventory["pods"])))
            return web.json_response({})
        if request.path == "/v1/targets":
            self.hear_targets(post.key, msgspec.json.decode(await request.read()))
            return web.json_response({})
        seconds = float(request.query["timeout"].removesuffix("s"))
        try:
            async with asyncio.timeout(seconds):
                while request.query.get("after") == str(ranks.seq):
                    post.news.clear()
                    await post.news.wait()
        except TimeoutError:
            pass  # no news is a valid answer
        body = self.server.objects.get((PLURAL, *post.key))
        if body is None or self.ranks.get(post.key) is not ranks:
            return web.Response(status=503)
        return web.json_response(self.status_of(post.key, body))

    def _hear(self, post: Post, revision: int, pods: frozenset[tuple[int, int]]) -> None:
        """Handle an inventory; it may be older than a pod, but must keep all listed pods."""
        if self.hear_inventory(post.key, revision, pods):
            unheard = set(self.processes(post.key[1])) - post.heard
            self._blaming(lambda: self.judge(post.key, pods | unheard))
            post.heard |= pods

    # ---- what can be asked about it -------------------------------------------------------------

    def health(self) -> int:
        """Return the HTTP status of /healthz."""

        async def ask() -> int:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://{HEALTH[0]}:{HEALTH[1]}/healthz") as answer,
            ):
                return answer.status

        return self.loop.run_until_complete(ask())


def _node(name: str, *, ready: bool) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {}, **_node_parts(ready)}


def _node_parts(ready: bool) -> dict[str, Any]:
    return {"status": {"conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}]}}
