"""How another terminal talks to the runner of a job: asks for its status, changes its size.

The runner owns the agents, so it is the one to ask: it starts and drains them, and it knows the
speed of the run beside the coordinator's status. It listens on a Unix socket in a folder that only
its user may enter; one line of JSON is asked and one is answered per connection.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec
from paceline_api.errors import EXIT_BAD_INPUT, PacelineError
from paceline_api.settings import ResolvedJob

from paceline.core.status import Status
from paceline.environment import SOCKETS, has_room, sockets_base
from paceline.local import index

LINE_MAX: Final = 16 * 2**20
ASK_S: Final = 5.0


class ControlError(PacelineError):
    """The runner refuses, or does not answer."""


# ---- words -----------------------------------------------------------------------------------


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Asks for a View."""


class ScaleRequest(msgspec.Struct, frozen=True, tag="scale"):
    """Asks for another number of replicas."""

    replicas: int


class View(msgspec.Struct, frozen=True, tag="view"):
    """What the runner's own table shows."""

    job: str
    run_dir: str
    status: Status | None
    """None until the coordinator has answered for the first time."""
    rounds_per_s_now: float
    left_s: float | None


class Scaled(msgspec.Struct, frozen=True, tag="scaled"):
    before: int
    after: int


class Refusal(msgspec.Struct, frozen=True, tag="refused"):
    message: str
    hint: str


Request = Look | ScaleRequest
Answer = View | Scaled | Refusal


# ---- the runner's side -----------------------------------------------------------------------


class Control:
    """`async with`: listens, and leaves the notes by which others find the socket."""

    def __init__(
        self,
        job: ResolvedJob,
        run_dir: Path,
        *,
        view: Callable[[], View],
        scale: Callable[[int], int],
        warn: Callable[[str], None],
    ) -> None:
        """`scale` changes the number of replicas and returns the one before."""
        self._job = job
        self._run_dir = run_dir
        self._view, self._scale, self._warn = view, scale, warn
        self._own_folder: str | None = None
        self._server: asyncio.Server | None = None
        self._notes: list[Path] = []

    async def __aenter__(self) -> Self:
        path = self._socket_path()
        self._server = await asyncio.start_unix_server(self._serve, path, limit=LINE_MAX)
        entry = index.Entry(self._job.name, str(self._run_dir), path, os.getpid())
        self._notes = [self._run_dir / index.NOTE]
        try:
            self._notes = index.publish(entry, os.environ)
        except OSError as error:
            self._warn(
                f"`paceline status` needs the folder {self._run_dir} to find this job: {error}"
            )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        index.remove(self._notes)
        assert self._server is not None
        self._server.close()
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)

    def _socket_path(self) -> str:
        folder = self._run_dir / SOCKETS
        if not has_room(folder, len("/control")):
            self._own_folder = tempfile.mkdtemp(prefix="paceline-", dir=sockets_base())
            folder = Path(self._own_folder)
        folder.mkdir(mode=0o700, exist_ok=True)
        return str(folder / "control")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ASK_S):
                line = await reader.readline()
                if line:  # else only somebody who looked whether this runner lives
                    writer.write(msgspec.json.encode(self._answer(line)) + b"\n")
                    await writer.drain()
        except (OSError, ValueError, TimeoutError):
            return  # who asked has gone, or sent no line in time
        finally:
            writer.close()

    def _answer(self, line: bytes) -> Answer:
        try:
            request = msgspec.json.decode(line, type=Request)
        except msgspec.MsgspecError as error:
            return Refusal(f"not understood: {error}", "use the same version of paceline")
        if isinstance(request, Look):
            return self._view()
        refused = self._check(request.replicas)
        return refused or Scaled(self._scale(request.replicas), request.replicas)

    def _check(self, replicas: int) -> Refusal | None:
        low, high, sizes = (
            self._job.min_replicas,
            self._job.max_replicas,
            self._job.elasticity.allowed_sizes,
        )
        status = self._view().status
        if status is not None and (status.stopping or status.outcome is not None):
            return Refusal("the job is ending", "start another run")
        if replicas < low:
            return Refusal(
                f"{replicas} replicas are less than spec.minReplicas = {low}", f"use {low} or more"
            )
        if high is not None and replicas > high:
            return Refusal(
                f"{replicas} replicas are more than spec.maxReplicas = {high}",
                f"use {high} or less, or start the job with a larger spec.maxReplicas",
            )
        if sizes and replicas not in sizes:
            listed = ", ".join(map(str, sizes))
            return Refusal(
                f"spec.elasticity.allowedSizes does not contain {replicas}", f"use one of {listed}"
            )
        return None


# ---- the other terminal's side ---------------------------------------------------------------


def look(entry: index.Entry) -> View:
    answer = ask(entry, Look())
    assert isinstance(answer, View), answer
    return answer


def scale(entry: index.Entry, replicas: int) -> Scaled:
    answer = ask(entry, ScaleRequest(replicas))
    assert isinstance(answer, Scaled), answer
    return answer


def ask(entry: index.Entry, request: Request) -> View | Scaled:
    """ControlError if the runner refuses or does not answer."""
    data = b""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(ASK_S)
        try:
            line.connect(entry.socket)
            line.sendall(msgspec.json.encode(request) + b"\n")
            while not data.endswith(b"\n") and (part := line.recv(2**16)):
                data += part
        except OSError as error:
            why = f"within {ASK_S:g} s" if isinstance(error, TimeoutError) else f"({error})"
            raise ControlError(
                f"job {entry.job}: its runner, process {entry.pid}, does not answer {why}",
                hint=f"see whether it is stopped; the logs are in {entry.run_dir}",
            ) from None
    if not data:
        raise ControlError(f"job {entry.job} ended in this moment")
    answer: Answer = msgspec.json.decode(data, type=Answer)
    if isinstance(answer, Refusal):
        raise ControlError(
            f"job {entry.job}: {answer.message}", hint=answer.hint, exit_code=EXIT_BAD_INPUT
        )
    return answer
