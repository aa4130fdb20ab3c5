"""The stage of a rehearsal: coordinator and players as processes, and the operator's part.

It starts the coordinator as the operator's pod does, sends it the inventory of pods that may live,
polls its status, replaces the pods that have left, and restarts it when it was killed.
"""

from __future__ import annotations

import http.client
import logging
import multiprocessing
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec
from paceline import environment
from paceline.clock import now_ns
from paceline.core.agent.exits import EndKind
from paceline.core.messages import Inventory, Targets
from paceline_api import names
from paceline_api.ids import MemberId
from paceline_api.jobfile import JobFile
from paceline_api.reading.load import job_from_mapping
from paceline_api.resolve import resolve
from paceline_api.status import RankPhase, Status
from paceline_operator.cluster.tls import certificates_of, operator_context
from paceline_operator.core.keys import OPERATOR_KEY_BYTES, job_keys

from benchmarks.rehearsal import player, watch
from benchmarks.rehearsal.meters import Summary
from benchmarks.rehearsal.sums import Partial, WholeSums

log = logging.getLogger("rehearsal")

PROCS: Final = 8
"""Number of ranks of a pod."""
POLL_S: Final = 1.0
"""Pause between two requests for the status. The operator pauses longer while all is well."""
NEWS_S: Final = 10.0
ENDS_S: Final = 20.0


class RehearsalError(RuntimeError):
    """Raised when a step of the rehearsal fails; the message names the awaited condition."""


@dataclass(frozen=True)
class Sample:
    """Resources of the coordinator and the players at one moment."""

    at_ns: int
    cpu_s: float
    memory: int
    traffic: watch.Traffic
    players_s: float
    """Processor time of all players so far."""


@dataclass
class _Process:
    process: Any
    line: Connection[Any, Any]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def say(self, order: player.Order) -> None:
        """Send an order to the player; any thread may call this."""
        with self.lock:
            self.line.send(order)


class Stage:
    """Context manager of all processes of a rehearsal; none is alive afterwards."""

    def __init__(self, ranks: int, *, processes: int, step_s: float, limit_s: float, folder: Path):
        self.ranks, self.processes = ranks, processes
        self.step_s, self.limit_s = step_s, limit_s
        self.pods = dict.fromkeys(range(ranks // PROCS), 0)
        """Attempt by slot, for the pods that should run."""
        self.status: Status | None = None
        self.samples: list[Sample] = []
        self.summary = Summary()
        self._folder = folder
        self._revision = 0
        self._news = threading.Condition()
        self._ended: list[player.PodEnded] = []
        self._reports = 0
        self._over = False
        self._players: list[_Process] = []
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._spent_s = 0.0
        """Processor time of coordinators that are dead."""
        self._sums = WholeSums(self._to_all)
        self._threads: list[threading.Thread] = []
        self._keys = job_keys(secrets.token_bytes(OPERATOR_KEY_BYTES), "rehearsal")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._listener = watch.Listener(self.port)

    def __enter__(self) -> Self:
        try:
            self._set_up()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _set_up(self) -> None:
        made = certificates_of(self._keys)
        self._tls = operator_context(self._keys)
        for name, text in (
            ("tls.crt", made.server.certificate),
            ("tls.key", made.server.private_key),
            ("callers.crt", made.callers),
            ("agent.crt", made.agent.certificate),
            ("agent.key", made.agent.private_key),
        ):
            (self._folder / name).write_text(text)
        (self._folder / "job.json").write_text(_job_file(self.ranks))
        (self._folder / "s").mkdir()
        self.start_coordinator()
        self._start_players()
        self._threads = [
            threading.Thread(target=self._hear, name="notes", daemon=True),
            threading.Thread(target=self._poll, name="status", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._over = True
        for each in self._players:
            each.process.join(ENDS_S if error is None else 0.0)
            each.process.kill()
            each.process.join()
        if self._coordinator is not None:
            self._coordinator.kill()
            self._coordinator.wait()
        for thread in self._threads:
            thread.join(NEWS_S + ENDS_S)

    # ---- processes ------------------------------------------------------------------------

    def start_coordinator(self) -> None:
        """Start a coordinator process."""
        outer = {name: v for name, v in os.environ.items() if not name.startswith("PACELINE_")}
        env = outer | {
            names.ENV_JOB: "rehearsal",
            names.ENV_TOKEN: self._keys.token,
            names.ENV_OPERATOR_TOKEN: self._keys.operator_token,
            names.ENV_SPEC: str(self._folder / "job.json"),
            environment.ENV_LISTEN: f"127.0.0.1:{self.port}",
            names.ENV_TLS_CERT: str(self._folder / "tls.crt"),
            environment.ENV_TLS_KEY: str(self._folder / "tls.key"),
            names.ENV_TLS_CALLERS: str(self._folder / "callers.crt"),
        }
        with (self._folder / "coordinator.log").open("ab") as log_file:
            self._coordinator = subprocess.Popen(
                [sys.executable, "-m", "paceline.coordinator"], env=env, stderr=log_file
            )

    def kill_coordinator(self) -> None:
        """Kill the coordinator; its processor time still counts."""
        assert self._coordinator is not None
        self._spent_s += watch.cpu_s(self._coordinator.pid)
        self._coordinator.send_signal(signal.SIGKILL)
        self._coordinator.wait()

    def _start_players(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        for index in range(self.processes):
            here, there = spawn.Pipe()
            part = player.Part(
                index,
                self.processes,
                f"https://127.0.0.1:{self.port}",
                self._keys.token,
                self._folder / "tls.crt",
                (self._folder / "agent.crt", self._folder / "agent.key"),
                self._folder / "s",
                PROCS,
                self.step_s,
            )
            process = spawn.Process(target=player.play, args=(there, part), daemon=True)
            process.start()
            there.close()
            self._players.append(_Process(process, here))

    # ---- the operator's part --------------------------------------------------------------

    def start_pods(self) -> None:
        """Send the inventory and start all pods."""
        self.send_inventory()
        for slot, attempt in self.pods.items():
            self._player(slot).say(player.StartPod(slot, attempt))

    def replace(self, slot: int) -> None:
        """Start another pod in the place of one that has ended."""
        self.pods[slot] += 1
        self.send_inventory()
        self._player(slot).say(player.StartPod(slot, self.pods[slot]))

    def send_inventory(self) -> None:
        """Send the coordinator the pods that may live at this moment (R25)."""
        self._revision += 1
        trained = self.status is not None and self.status.version > 0
        pods = tuple(sorted(self.pods.items()))
        self._post("/v1/inventory", Inventory(self._revision, pods, trained))

    def stop_job(self) -> None:
        """Ask the coordinator to stop the job."""
        self._post("/v1/targets", Targets(stop=True))

    def evict(self, slots: list[int]) -> None:
        """Evict pods."""
        for slot in slots:
            self._player(slot).say(player.EvictPod(slot))

    def ended(self, slots: list[int]) -> list[player.PodEnded]:
        """Return the pods of these slots whose current attempt has ended."""
        return [x for x in self._ended if x.slot in slots and x.attempt == self.pods[x.slot]]

    def kill(self, member: MemberId) -> None:
        """Kill a rank."""
        self._player(member.slot).say(player.Kill(member))

    def all_compute(self, step_s: float) -> None:
        """Set the length of the next batches, the same on slow ranks."""
        self._to_all(player.Pace(step_s, 1.0))

    def as_before(self) -> None:
        """Set the usual length of batches, and the slow ranks' factor."""
        self._to_all(player.Pace(self.step_s, player.SLOWNESS))

    def acknowledge(self) -> None:
        """Acknowledge the job's end, so that the coordinator exits, and wait for that.

        Raises:
            RehearsalError: The coordinator ended with an exit code other than 0.
        """
        self._call("POST", "/v1/acknowledge", b"")
        assert self._coordinator is not None
        if code := self._coordinator.wait(ENDS_S):
            raise RehearsalError(f"the coordinator ended with {code}\n{self.story()}")

    def collect(self) -> Summary:
        """Ask all players for their measurements and return them merged."""
        self._to_all(player.Report())
        self.until("the players' reports", lambda: self._reports == self.processes)
        return self.summary

    # ---- reports of players and coordinator -----------------------------------------------

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds.

        Args:
            what: Name of the condition, for the error message.
            holds: The condition; it is checked at each news.

        Raises:
            RehearsalError: It does not hold after `limit_s`, or a player has died.
        """
        end = time.monotonic() + self.limit_s
        with self._news:
            while not holds():
                left = end - time.monotonic()
                dead = [x for x in self._players if not x.process.is_alive()]
                lost = bool(dead) and not self._reports
                if left <= 0 or lost:
                    why = "a player has died" if lost else f"not within {self.limit_s:.0f} s"
                    raise RehearsalError(f"waited for {what}: {why}\n{self.story()}")
                self._news.wait(min(left, POLL_S))

    def until_active(self, count: int) -> None:
        """Wait until exactly `count` ranks are active."""
        self.until(f"{count} active ranks", lambda: self._count(RankPhase.ACTIVE) == count)

    def until_round(self, version: int) -> None:
        """Wait until the job has reached a version."""
        self.until(f"round {version}", lambda: self.version >= version)

    @property
    def version(self) -> int:
        """Version of the weights in the last status; 0 before the first."""
        return self.status.version if self.status else 0

    def _count(self, phase: RankPhase) -> int:
        return sum(rank.state is phase for rank in self.status.ranks) if self.status else 0

    def active(self) -> list[MemberId]:
        """Return the active members in the last status."""
        assert self.status is not None
        return [rank.member for rank in self.status.ranks if rank.state is RankPhase.ACTIVE]

    def sample(self) -> Sample:
        """Take a sample, keep it, and return it."""
        assert self._coordinator is not None
        pid = self._coordinator.pid
        players_s = sum(watch.cpu_s(x.process.pid) for x in self._players)
        spent_s = self._spent_s + watch.cpu_s(pid)
        sample = Sample(
            now_ns(), spent_s, watch.memory_bytes(pid), self._listener.look(), players_s
        )
        self.samples.append(sample)
        return sample

    def story(self) -> str:
        """Return the state of the job for an error message: phases, last events, and log."""
        log_tail = (self._folder / "coordinator.log").read_text()[-3000:]
        if self.status is None:
            return f"the coordinator never answered\n{log_tail}"
        phases = {str(p): n for p in RankPhase if (n := self._count(p))}
        last = [x.message for x in self.status.history[-5:]]
        return f"version {self.version}, ranks {phases}, {last}\n{log_tail}"

    # ---- threads --------------------------------------------------------------------------

    def _hear(self) -> None:
        """Receive the notes of the players until all have ended."""
        lines = [each.line for each in self._players]
        while lines:
            for line in wait(lines):
                assert isinstance(line, Connection)
                try:
                    self._take(line.recv())
                except (EOFError, ConnectionError):
                    lines.remove(line)

    def _take(self, note: player.Note) -> None:
        match note:
            case Partial():
                self._sums.take(note)
            case player.Died(member=member):
                self._to_all(player.Gone(member))
            case player.PodEnded():
                if note.end is EndKind.FAILED:
                    log.error("pod %d#%d failed: %s", note.slot, note.attempt, note.message)
                with self._news:
                    self._ended.append(note)
                    self._news.notify_all()
            case Summary():
                with self._news:
                    self.summary.merge(note)
                    self._reports += 1
                    self._news.notify_all()

    def _to_all(self, order: player.Order) -> None:
        for each in self._players:
            try:
                each.say(order)
            except ConnectionError:
                log.debug("player %s has ended", each.process.pid)

    def _player(self, slot: int) -> _Process:
        return self._players[slot % self.processes]

    def _poll(self) -> None:
        """Poll the status as the operator does.

        It asks for anything newer over one connection and pauses between answers.
        """
        line: http.client.HTTPSConnection | None = None
        while not self._over:
            try:
                line = line or self._connect(NEWS_S + ENDS_S)
                seq = self.status.seq if self.status else ""
                line.request(
                    "GET", f"/v1/status?after={seq}&timeout={NEWS_S:g}s", headers=self._headers
                )
                status = msgspec.json.decode(line.getresponse().read(), type=Status)
            except (OSError, http.client.HTTPException):
                line = None  # the coordinator has not started yet, or was killed
                time.sleep(POLL_S / 4)
                continue
            self._listener.look()  # count connections that end before the next sample
            with self._news:
                self.status = status
                self._news.notify_all()
            time.sleep(POLL_S)

    def _connect(self, timeout_s: float) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=timeout_s, context=self._tls
        )

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._keys.operator_token}"}

    def _post(self, path: str, body: msgspec.Struct) -> None:
        self._call("POST", path, msgspec.json.encode(body))

    def _call(self, method: str, path: str, body: bytes) -> None:
        """Send a request, and retry while nothing answers, as the operator does."""
        end = time.monotonic() + self.limit_s
        while True:
            line = self._connect(ENDS_S)
            try:
                line.request(method, path, body, self._headers)
                answer = line.getresponse()
                text = answer.read().decode()
                if answer.status != http.client.OK:
                    raise RehearsalError(f"{path}: {answer.status} {text}")
                return
            except (OSError, http.client.HTTPException) as error:
                assert self._coordinator is not None
                if time.monotonic() > end or self._coordinator.poll() is not None:
                    raise RehearsalError(f"{path}: {error}\n{self.story()}") from error
                time.sleep(POLL_S / 10)
            finally:
                line.close()


def _job_file(ranks: int) -> str:
    """Return the job's file.

    Its timeouts are long: a machine whose cores are all busy must not look like frozen or benched
    ranks.

    Returns:
        JSON.
    """
    spec = {
        "replicas": ranks // PROCS,
        "procsPerReplica": PROCS,
        "minReplicas": 1,
        "collective": {
            "mode": "Quorum",
            "quorum": "75%",
            "maxAge": 0,
            "normalisation": "Fixed",
            "freezeTimeout": "120s",
            "benchAfter": "600s",
            "hashEveryRounds": 10,
        },
        "elasticity": {"settleSeconds": 1},
        "template": {
            "spec": {"containers": [{"name": "trainer", "image": "none", "command": ["none"]}]}
        },
    }
    job = {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "rehearsal"},
        "spec": spec,
    }
    return JobFile.of(resolve(job_from_mapping(job)), command=["none"]).to_json()
