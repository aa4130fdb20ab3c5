"""Assembly of the operator, which runs until a signal ends it or it loses the lead.

A leader that loses its Lease ends the process, as other operators do. Its memory may be about to
act on an old view, and a new process starts within seconds as a standby.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import kopf
from paceline_api.access.access import Access, access
from paceline_api.crdgen import PLURAL
from paceline_api.errors import PacelineError
from paceline_api.status import Status
from paceline_api.types.enums import RuntimeKind
from paceline_api.types.job import API_VERSION

from paceline_operator.cluster import observe
from paceline_operator.cluster.api import ApiError
from paceline_operator.cluster.apply import Applier
from paceline_operator.cluster.coordinator import Links
from paceline_operator.cluster.kube import Kube, pause
from paceline_operator.cluster.lease import Election, Terms
from paceline_operator.cluster.levels import Levels
from paceline_operator.cluster.memory import Memory
from paceline_operator.cluster.own_key import OwnKeys
from paceline_operator.cluster.rights import denied
from paceline_operator.cluster.runtimes import RuntimeReports
from paceline_operator.cluster.scrapers import Scrapers
from paceline_operator.cluster.services import Services
from paceline_operator.cluster.store import Key, Store
from paceline_operator.cluster.tls import (
    CertificateFiles,
    certificates_of,
    metrics_context,
    operator_context,
)
from paceline_operator.cluster.wire import NodeObject, PodObject
from paceline_operator.controller import Controller
from paceline_operator.core.changes import SecretId
from paceline_operator.core.job import JobObject
from paceline_operator.core.keys import job_keys
from paceline_operator.core.pods import children
from paceline_operator.core.unheard import Unheard
from paceline_operator.handlers import JobsWatch, make_registry, make_settings
from paceline_operator.health import Guarded, Health, serving
from paceline_operator.listing import Listing
from paceline_operator.metrics import CONTROLLER, OperatorMetrics
from paceline_operator.options import Options
from paceline_operator.queue import DecisionQueue

log = logging.getLogger("paceline.operator")

START_S: Final = 60.0
"""Seconds to wait at the start for an API server that serves TrainingJobs."""
PODS_S: Final = 0.02
"""Delay of a decision after an event about a pod, in seconds: each starting pod has three events
within moments."""
EXIT_DEPOSED: Final = 3
"""Exit code of an operator that lost the lead."""


class Operator:
    """All parts of the operator, connected on one event loop; the Lease has its own thread."""

    def __init__(self, options: Options, access: Access) -> None:
        self._options, self._access = options, access
        self.metrics = OperatorMetrics()
        self._queue = DecisionQueue(self._decide, self.metrics, time.monotonic)
        self._store = Store(
            self._queue.add,
            options.manager,
            pods_changed=lambda key: self._queue.add(key, PODS_S),
        )
        self._kube = Kube(access, self.metrics, options.api_rate)
        self._keys = OwnKeys(self._kube, self._key_changed)
        self._listing = Listing(self._kube, self._store, options.scope)
        self._nodes: observe.Watch[NodeObject] | None = None
        """Watch of nodes; None if nodes are not watched."""
        self._pods: observe.Watch[PodObject] | None = None
        self._election: Election | None = None
        self._stopped = asyncio.Event()
        self._deposed = False
        self._started_epoch = int(time.time())
        self._controller: Controller | None = None
        self._links = Links(
            secrets_of=self._secrets_of,
            on_status=self._take_status,
            missed=self._missed,
            arrived=self._arrived,
            clock=time.monotonic,
            leads=self._leads,
            metrics=self.metrics,
        )
        self._services = Services(
            self._kube, time.monotonic, self._store.namespaces_in_use, options.scope
        )
        self._jobs = JobsWatch(access, time.monotonic)
        self._health = Health(self._store, self.metrics, lambda: self._links.connected, self._jobs)

    async def run(self) -> int:
        """Run until a signal or a lost lead; a missing right raises PacelineError."""
        try:
            return await self._run()
        except ApiError as error:
            if error.denied:
                raise denied(error.denied, error.message) from None
            raise

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        self._handle_signals()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._kube)
            await stack.enter_async_context(self._links)
            await self._wait_for_the_api()
            namespace = self._options.own_namespace or self._access.namespace
            await self._keys.load(namespace)
            self._controller = self._make_controller()
            at = self._options.host, self._options.port
            await stack.enter_async_context(serving(self._health, *at, self._guarded()))
            self._elect(namespace, loop)
            await self._serve()
        if self._election is not None:
            await asyncio.to_thread(self._election.stop)
        return EXIT_DEPOSED if self._deposed else 0

    def _guarded(self) -> Guarded | None:
        if self._options.metrics_at is None:
            return None

        async def create(path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
            return await self._kube.request("POST", path, body=body)

        scrapers = Scrapers(create, time.monotonic)
        folder = self._options.metrics_certificate
        tls = metrics_context() if folder is None else CertificateFiles(folder).context
        return Guarded(*self._options.metrics_at, tls, scrapers)

    def _handle_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stopped.set)

    async def _serve(self) -> None:
        tasks = [asyncio.create_task(task) for task in self._tasks()]
        ended = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait([*tasks, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stopped.set()
            self._queue.close()
            for task in (*tasks, ended):
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    def _tasks(self) -> list[Any]:
        pods = observe.pod_source(self._store, time.time, self._options.scope)
        self._pods = observe.Watch(self._kube, pods, time.time, self.metrics)
        watches: list[observe.Watch[Any]] = [self._pods]
        if self._options.watch_nodes:
            nodes = observe.node_source(self._store, time.time)
            self._nodes = observe.Watch(self._kube, nodes, time.time, self.metrics)
            watches.append(self._nodes)
            fabrics = observe.fabric_source(self._store)
            watches.append(observe.Watch(self._kube, fabrics, time.time, self.metrics))
        for kind in RuntimeKind:
            if kind is RuntimeKind.NAMESPACED or self._options.watch_nodes:
                within = self._options.scope if kind is RuntimeKind.NAMESPACED else ""
                runtimes = observe.runtime_source(self._store, kind, within)
                watches.append(observe.Watch(self._kube, runtimes, time.time, self.metrics))
        self._health.watches = tuple(watches)
        scope = {"namespaces": [self._options.scope]} if self._options.scope else {}
        return [
            *(watch.run() for watch in watches),
            kopf.operator(
                registry=make_registry(self._store, self._jobs),
                settings=make_settings(),
                standalone=True,
                clusterwide=not self._options.scope,
                stop_flag=self._stopped,
                **scope,  # type: ignore[arg-type]
            ),
            self._queue.run(),
            self._services.run(self._leads),
            RuntimeReports(self._kube, self._store, time.time).run(self._leads),
            self._keys.run(self._leads),
            self._listing.run(),
            self._open_when_synced(),
        ]

    # ---- the start --------------------------------------------------------------------------

    async def _wait_for_the_api(self) -> None:
        """Wait until the API server serves TrainingJobs.

        Raises:
            PacelineError: It does not within START_S, so the chart with the definitions is missing.
        """
        until_s = time.monotonic() + START_S
        while True:
            try:
                answer = await self._kube.request("GET", f"/apis/{API_VERSION}")
                if any(item.get("name") == PLURAL for item in answer.get("resources", ())):
                    return
                why = f"the API server does not know {PLURAL}"
            except ApiError as error:
                if error.code == HTTPStatus.UNAUTHORIZED:
                    raise self._access.refused() from None
                why = str(error)
            if time.monotonic() >= until_s:
                raise PacelineError(why, hint="install the chart paceline-crds first")
            log.info("waiting: %s", why)
            await pause(0.5)

    def _elect(self, namespace: str, loop: asyncio.AbstractEventLoop) -> None:
        if not self._options.lease:
            self.metrics.leader.labels(CONTROLLER).set(1)
            return

        def changed(leads: bool) -> None:
            loop.call_soon_threadsafe(self._led, leads)

        terms = Terms(
            namespace,
            self._options.identity,
            self._options.lease_duration_s,
            self._options.lease_duration_s * 0.3,
        )
        self._election = Election(
            self._access,
            terms,
            changed=changed,
        )
        self._election.start()

    def _led(self, leads: bool) -> None:
        self.metrics.leader.labels(CONTROLLER).set(leads)
        if not leads and not self._stopped.is_set():
            log.error("the lead is lost: ending")
            self._deposed = True
            self._stopped.set()

    def _leads(self) -> bool:
        return self._election is None or self._election.leads()

    async def _open_when_synced(self) -> None:
        """Open the queue once this process leads and every watch has its first list.

        It then waits until the operator ends.
        """
        while not (self._leads() and self._health.synced):
            await pause(0.05)
        self._handle_signals()  # kopf has replaced them by its own
        await self._listing.first()
        log.info("acting for %d jobs with %d pods", len(self._store.jobs), self._store.pod_count())
        self._queue.open()
        await self._stopped.wait()

    # ---- jobs -------------------------------------------------------------------------------

    async def _decide(self, key: Key) -> float | None:
        assert self._controller is not None
        return await self._controller.reconcile(key)

    def _make_controller(self) -> Controller:
        applier = Applier(
            self._kube,
            self._store,
            make_secret=self._make_secret,
            ensure_service=self._services.ensure,
            level_of=Levels(self._kube, time.monotonic).of,
            clock=time.time,
            leads=self._leads,
        )
        return Controller(
            self._store,
            applier,
            self._links,
            clock=time.time,
            epoch=lambda: self._election.epoch if self._election else self._started_epoch,
            nodes_fresh=lambda: self._nodes is not None and self._nodes.fresh,
            pods_live_s=lambda: self._pods.live_since_s if self._pods is not None else None,
            key_id=lambda: self._keys.newest,
        )

    def _make_secret(self, job: JobObject, secret: SecretId) -> Mapping[str, Any] | None:
        key = self._keys.of(secret.key_id)
        if key is None:
            return None
        keys = job_keys(key, job.uid)
        made = certificates_of(keys)
        tls = {
            children.CERTIFICATE: made.server.certificate,
            children.PRIVATE_KEY: made.server.private_key,
            children.CALLERS: made.callers,
            children.AGENT_CERTIFICATE: made.agent.certificate,
            children.AGENT_KEY: made.agent.private_key,
        }
        return children.secret(job, keys, file=secret.file, tls=tls)

    def _secrets_of(self, uid: str, key_id: str) -> tuple[str, ssl.SSLContext] | None:
        key = self._keys.of(key_id)
        if key is None:
            return None
        keys = job_keys(key, uid)
        return keys.operator_token, operator_context(keys)

    def _key_changed(self) -> None:
        if self._controller is not None:
            self._controller.key_changed()
            for key in self._store.jobs:
                self._queue.add(key)

    def _take_status(self, key: Key, status: Status) -> None:
        if (memory := self._memory(key)) is not None:
            memory.hear(status, time.time())
            self._queue.add(key)

    def _missed(self, key: Key, unheard: Unheard, away: bool) -> None:
        if (memory := self._memory(key)) is not None:
            memory.miss(unheard, away=away)
            self._queue.add(key)

    def _memory(self, key: Key) -> Memory | None:
        return self._controller.memories.get(key) if self._controller else None

    def _arrived(self, key: Key, inventory: Any) -> None:
        assert self._controller is not None
        self._controller.inventory_arrived(key, inventory)


def run(options: Options) -> int:
    """Run the operator with these options, and return its exit code."""
    api_access = access(Path(options.kubeconfig) if options.kubeconfig else None)

    async def main() -> int:
        return await Operator(options, api_access).run()

    return asyncio.run(main())
