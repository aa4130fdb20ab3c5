"""Follow a job's coordinator from outside, through every replacement of its pod.

The watcher uses the pod's address with the token and certificates that the operator derives for the
job. It therefore keeps working while the API server is away.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

from paceline_api.names import NOTE_KEY
from paceline_operator.cluster.own_key import NAME as OPERATOR_KEY
from paceline_operator.cluster.tls import operator_context
from paceline_operator.core.keys import job_keys, key_id

from testing.cluster.api import ApiError, Json
from tests.nodes.platform import SYSTEM

if TYPE_CHECKING:
    from tests.nodes.jobs import Job

PORT = 7070
POLL_S = 5
RETRY_S = 0.2
REST_S = 0.1


class Watcher:
    """A poller: `last` is the newest answer, `rounds` the time at which each version appeared."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._address = ""
        self._token = ""
        self._tls: ssl.SSLContext | None = None
        self._uid = ""
        self.last: Json = {}
        self.rounds: list[tuple[float, int]] = []

    @property
    def version(self) -> int:
        return int(self.last.get("version", 0))

    @property
    def ledger(self) -> Json:
        log: Json = self.last.get("log", {})
        return log

    @property
    def pids(self) -> dict[str, int]:
        """The process id of each living rank by slot.process#attempt."""
        return {
            "{}.{}#{}".format(*rank["member"]): rank["pid"]
            for rank in self.last.get("ranks", ())
            if rank["state"] != "dead"
        }

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(2 * POLL_S)

    def _run(self) -> None:
        seq: int | None = None
        while not self._ended.is_set():
            try:
                if not self._address:
                    seq = None
                    self._look_up()
                answer = self._ask(seq)
            except (ApiError, OSError, http.client.HTTPException, LookupError):
                self._address = ""
                self._ended.wait(RETRY_S)
                continue
            seq, self.last = answer["seq"], answer
            if not self.rounds or answer["version"] > self.rounds[-1][1]:
                self.rounds.append((time.monotonic(), answer["version"]))
            # At the end the coordinator exits as soon as the operator has its outcome.
            if not answer["stopping"]:
                self._ended.wait(REST_S)

    def _look_up(self) -> None:
        job, api = self._job, self._job.api
        body = job.get()
        uid = body["metadata"]["uid"]
        pod = job.coordinator()
        if pod is None or not pod["status"].get("podIP"):
            raise LookupError("no coordinator yet")
        if uid != self._uid:
            # No pod has the operator's certificate: derive it, as the operator does.
            path = f"/api/v1/namespaces/{SYSTEM}/secrets/{OPERATOR_KEY}"
            secrets = [base64.b64decode(v) for v in api.get(path)["data"].values()]
            used = pod["metadata"]["annotations"][NOTE_KEY]
            (keys,) = (job_keys(key, uid) for key in secrets if key_id(key) == used)
            self._tls = operator_context(keys)
            self._token, self._uid = keys.operator_token, uid
        self._address = pod["status"]["podIP"]

    def _ask(self, seq: int | None) -> Json:
        after = "" if seq is None else f"&after={seq}"
        connection = http.client.HTTPSConnection(
            self._address, PORT, context=self._tls, timeout=2 * POLL_S
        )
        with closing(connection):
            headers = {"Authorization": f"Bearer {self._token}"}
            connection.request("GET", f"/v1/status?timeout={POLL_S}s{after}", headers=headers)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise LookupError(answer.read())
            status: Json = json.loads(answer.read())
            return status
