"""A real agent process, and a small coordinator that records its messages and sends orders."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import WSMsgType, web
from msgspec.structs import replace
from paceline import scratch
from paceline.core import wire
from paceline.core.messages import RankDead, RankStarted
from paceline_api.ids import MemberId
from paceline_api.jobfile import JobFile
from paceline_api.reading.load import parse_job
from paceline_api.resolve import resolve
from paceline_api.settings import FailureRuleSettings

TOKEN = "secret"
WAIT_S = 60.0
PYTHON = sys.executable
T = TypeVar("T")

JOB = """
apiVersion: paceline.dev/v1alpha1
kind: TrainingJob
metadata: {name: digits}
spec:
  replicas: 1
  template: {spec: {containers: [{name: trainer, image: none, command: [python]}]}}
"""
RANK_SIDE = """
import os, sys
from paceline.worker.agent_pipe import AgentPipe
from paceline.environment import RankSettings
settings = RankSettings.from_environment(os.environ)
line = AgentPipe(settings.agent_fd)
"""
"""First lines of a script that behaves like a rank."""


class Coordinator:
    """Coordinator that keeps its port when it is stopped and started again."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, msgspec.Struct]] = []
        self.refused = 0
        self.port = 0
        self._news = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._sockets: set[web.WebSocketResponse] = set()

    async def start(self) -> None:
        """Listen; the first start chooses the port."""
        app = web.Application()
        app.add_routes([web.get("/v1/agents", self._serve)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        await web.SockSite(self._runner, listener).start()

    async def stop(self) -> None:
        """Abort all connections, like a process that was killed."""
        for ws in list(self._sockets):
            if ws._req is not None and ws._req.transport is not None:
                ws._req.transport.abort()  # like a process that was killed
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def order(self, message: msgspec.Struct) -> None:
        """Send a message to all connected agents."""
        for ws in self._sockets:
            await ws.send_str(wire.to_json(message))

    async def wait(
        self, kind: type[T], test: Callable[[T], bool] = lambda _: True, *, n: int = 1
    ) -> T:
        """Wait for the n-th message of a kind that passes the test, and return it."""
        async with asyncio.timeout(WAIT_S):
            while True:
                messages = [m for _, m in self.messages if isinstance(m, kind) and test(m)]
                if len(messages) >= n:
                    return messages[n - 1]
                self._news.clear()
                await self._news.wait()

    def time_of(self, message: object) -> int:
        """Return when a message arrived, in ns of the monotonic clock."""
        return next(t for t, m in self.messages if m is message)

    def all(self, kind: type[T]) -> list[T]:
        """Return all messages of a kind so far."""
        return [m for _, m in self.messages if isinstance(m, kind)]

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.refused += 1
            raise web.HTTPUnauthorized
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        self._sockets.add(ws)
        try:
            async for message in ws:
                if message.type is WSMsgType.TEXT:
                    decoded = wire.message_of_pod(message.data)
                    self.messages.append((time.monotonic_ns(), decoded))
                    self._news.set()
        finally:
            self._sockets.discard(ws)
        return ws


class AgentProcess:
    """An agent process whose output is collected."""

    def __init__(self, process: asyncio.subprocess.Process, run_dir: Path) -> None:
        self.process, self.run_dir = process, run_dir
        self.out = b""
        self.err = b""
        self._readers = [
            asyncio.create_task(self._read(process.stdout, "out")),
            asyncio.create_task(self._read(process.stderr, "err")),
        ]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the agent."""
        self.process.send_signal(number)

    async def ended(self) -> int:
        """Wait for the end of the agent and of its output; return the exit code."""
        async with asyncio.timeout(WAIT_S):
            code = await self.process.wait()
            await asyncio.wait(self._readers)
            return code

    async def printed(self, text: str) -> None:
        """Wait until the output contains a text."""
        await until(lambda: text.encode() in self.out + self.err, f"{text!r} in the output")

    async def kill(self) -> None:
        """Kill the agent if it runs."""
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        for reader in self._readers:
            await reader

    async def _read(self, stream: asyncio.StreamReader | None, name: str) -> None:
        assert stream is not None
        while data := await stream.read(65536):
            setattr(self, name, getattr(self, name) + data)


@asynccontextmanager
async def pod(
    folder: Path,
    command: list[str] | str,
    *,
    procs: int = 1,
    backend: str = "gloo",
    backoff_limit: int = 6,
    rules: tuple[FailureRuleSettings, ...] = (),
    drain_grace_s: float = 10.0,
    urls: str = "",
    env: tuple[tuple[str, str], ...] = (),
    working_dir: str = "",
    program: Sequence[str] = ("-m", "paceline.agent"),
) -> AsyncIterator[tuple[AgentProcess, Coordinator]]:
    """Run an agent with its ranks beside a coordinator.

    Args:
        folder: folder for the script, the job file and the run folder.
        command: command of a rank; a string is the text of a Python script.
        procs: number of ranks.
        backend: the job's backend.
        backoff_limit: the job's backoff limit.
        rules: the job's failure rules.
        drain_grace_s: time that ranks have to drain, in seconds.
        urls: addresses of coordinators, instead of that of the coordinator here.
        env: environment of the trainer container.
        working_dir: working directory of the trainer container.
        program: arguments of Python that run the agent.

    Yields:
        the agent and the coordinator.
    """
    if isinstance(command, str):
        script = folder / "script.py"
        script.write_text(command)
        command = [PYTHON, str(script)]
    spec_path = folder / "spec.json"
    job = JobFile.of(resolve(parse_job(JOB)), command=command, env=env, working_dir=working_dir)
    made = replace(job, backend=backend, backoff_limit=backoff_limit, failure_rules=rules)
    spec_path.write_text(made.to_json())
    coordinator = Coordinator()
    await coordinator.start()
    environment = {
        **os.environ,
        "PACELINE_JOB": "digits",
        "PACELINE_SLOT": "2",
        "PACELINE_ATTEMPT": "1",
        "PACELINE_PROCS": str(procs),
        "PACELINE_COORDINATOR": urls or f"http://127.0.0.1:{coordinator.port}",
        "PACELINE_TOKEN": TOKEN,
        "PACELINE_RUN_DIR": str(folder / "run"),
        "PACELINE_SPEC": str(spec_path),
        "PACELINE_LOCAL": "1",
        "PACELINE_FAULTS": "slow:rank=0,ms=1",
        "PACELINE_DRAIN_GRACE_SECONDS": str(drain_grace_s),
        "PACELINE_METRICS_PORT": "0",
    }
    process = await asyncio.create_subprocess_exec(
        PYTHON,
        *program,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    agent = AgentProcess(process, folder / "run")
    try:
        yield agent, coordinator
    except BaseException:
        sys.stdout.write(f"---- agent ----\n{agent.out.decode()}\n{agent.err.decode()}\n")
        raise
    finally:
        await agent.kill()
        await coordinator.stop()
        scratch.sweep(scratch.bases())  # the starter of an agent does this after it was killed


def member(local: int = 0, restarts: int = 0) -> MemberId:
    """Return the member of a rank of the pod after this number of restarts."""
    return MemberId(2, local, 1000 + restarts)


async def started(coordinator: Coordinator, local: int = 0, restarts: int = 0) -> RankStarted:
    """Wait until a rank has started and its shim has become the command.

    A process in the middle of an exec has no command line at all.

    Args:
        coordinator: receives the agent's messages.
        local: index of the rank in the pod.
        restarts: number of restarts of the rank before.

    Returns:
        the message about the start.
    """
    rank = await coordinator.wait(RankStarted, lambda m: m.member == member(local, restarts))
    await until(lambda: "shim.py" not in (command_line(rank.pid) or "shim.py"), "the command")
    return rank


async def dead(coordinator: Coordinator, local: int = 0, restarts: int = 0) -> RankDead:
    """Wait for the death of a rank and return the message about it."""
    return await coordinator.wait(RankDead, lambda m: m.member == member(local, restarts))


async def until(true: Callable[[], bool], what: str) -> None:
    """Poll for a condition that no message reports, such as the output or end of a process."""
    for _ in range(round(WAIT_S / 0.005)):
        if true():
            return
        await asyncio.sleep(0.005)
    raise TimeoutError(f"{what}: not within {WAIT_S:g} s")


def command_line(pid: int) -> str:
    """Return the command line of a process; "" in the middle of an exec."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def lives(pid: int) -> bool:
    """Return True if a process exists and is not a zombie."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] != "Z"
    return False


async def gone(*pids: int) -> None:
    """Wait until none of the processes lives."""
    await until(lambda: not any(lives(pid) for pid in pids), f"the end of {pids}")


def descendants(pid: int) -> dict[int, str]:
    """Return pid -> command line of everything below a process."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text()
                parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    commands: dict[int, str] = {}
    frontier = [pid]
    while frontier:
        parent = frontier.pop()
        for child in [c for c, p in parents.items() if p == parent]:
            with contextlib.suppress(OSError):
                commands[child] = command_line(child)
                frontier.append(child)
    return commands
