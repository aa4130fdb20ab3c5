"""A coordinator of one job for tests on a real API server without real pods.

It listens on all addresses, since those of fake pods lead to this machine, with the certificate and
the token that the operator's key gives for the job. All pods of the inventory count as ranks that
train; `finish` gives the outcome.
"""

from __future__ import annotations

import asyncio
import ssl
import tempfile
import threading
from pathlib import Path
from typing import Any

from aiohttp import web
from paceline_api.names import COORDINATOR_PORT
from paceline_operator.cluster.tls import pair_of
from paceline_operator.core.keys import job_keys


class Stub:
    def __init__(self, operator_key: bytes, job_uid: str, pod_uid: str, replicas: int) -> None:
        self._keys = job_keys(operator_key, job_uid)
        self.pod_uid, self.replicas = pod_uid, replicas
        self.inventories: list[dict[str, Any]] = []
        self.targets: list[dict[str, Any]] = []
        self.outcome: dict[str, Any] | None = None
        self.refused = 0
        self._seq = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> Stub:
        self._thread.start()
        assert self._up.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def finish(self) -> None:
        self.outcome = {"complete": True, "reason": "Complete", "message": "7 rounds, released"}
        self._seq += 1

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/status", self._status),
                web.post("/v1/inventory", self._inventory),
                web.post("/v1/targets", self._targets),
            ]
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        pair = pair_of(self._keys)
        with tempfile.TemporaryDirectory() as folder:
            certificate, key = Path(folder) / "crt", Path(folder) / "key"
            certificate.write_text(pair.certificate)
            key.write_text(pair.private_key)
            context.load_cert_chain(certificate, key)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        await web.TCPSite(runner, "0.0.0.0", COORDINATOR_PORT, ssl_context=context).start()
        self._up.set()
        await self._stop.wait()
        await runner.cleanup()
        await asyncio.sleep(0.25)  # closing a TLS connection takes a moment

    def _trusted(self, request: web.Request) -> bool:
        good = request.headers.get("Authorization") == f"Bearer {self._keys.token}"
        self.refused += not good
        return good

    async def _status(self, request: web.Request) -> web.Response:
        if not self._trusted(request):
            return web.Response(status=401)
        for _ in range(100):
            if request.query.get("after") != str(self._seq):
                break
            await asyncio.sleep(0.1)
        return web.json_response(self._body())

    def _body(self) -> dict[str, Any]:
        last = self.inventories[-1] if self.inventories else {"revision": 0, "pods": []}
        ranks = [
            {"member": [slot, 0, attempt * 1000], "state": "active", "rank": index}
            for index, (slot, attempt) in enumerate(last["pods"])
        ]
        ready = len(ranks) >= self.replicas
        return {
            "job": "any",
            "coordinator": self.pod_uid,
            "seq": self._seq,
            "generation": [1, self.pod_uid, len(self.inventories)],
            "changes": [{}] if ready else [],
            "replicas": self.replicas,
            "inventory": last["revision"],
            "ranks": ranks if ready else [],
            "version": 7 if ready else 0,
            "outcome": self.outcome,
        }

    async def _inventory(self, request: web.Request) -> web.Response:
        if not self._trusted(request):
            return web.Response(status=401)
        self.inventories.append(await request.json())
        self._seq += 1
        return web.json_response({})

    async def _targets(self, request: web.Request) -> web.Response:
        if not self._trusted(request):
            return web.Response(status=401)
        self.targets.append(await request.json())
        self.replicas = self.targets[-1].get("replicas", self.replicas)
        self._seq += 1
        return web.json_response({})
