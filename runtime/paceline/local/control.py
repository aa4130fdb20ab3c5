"""Requests of another terminal to the runner of a job: read its status, change its size.

The runner owns the agents, so it takes the requests: it starts and drains agents, and it knows the
speed of the run besides the coordinator's status. It listens on a Unix socket in a folder that only
its user may enter. Each connection carries one line of JSON as the request and one as the answer. A
request may wait for news, so that nobody has to poll. The connection ends with the runner.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self, TypeVar

import msgspec
from paceline_api.decoding import UNDECODABLE
from paceline_api.errors import EXIT_BAD_INPUT, PacelineError
from paceline_api.settings import ResolvedJob
from paceline_api.status import Status

from paceline.local import index
from paceline.local.room import MachineLimits, check_room
from paceline.local.rundir import CONTROL
from paceline.peer_credentials import credentials_of

LINE_MAX: Final = 16 * 2**20
"""Upper bound on a line in bytes."""
ROOT: Final = 0
"""Uid of root, who may always ask."""
ASK_S: Final = 5.0
"""Timeout of a request in seconds, on top of the time that the request waits for news."""
WAIT_S: Final = 30.0
"""Longest time in seconds that a request waits for news; then the present state is the answer."""
Asked = TypeVar("Asked", "View", "Scaled", "Lines", "Done")
"""Type of the answer that a request expects."""


class ControlError(PacelineError):
    """Raised if the runner refuses a request or does not answer."""


class EndedError(ControlError):
    """Raised if the runner has ended during the request."""


class ControlRefusedError(ControlError):
    """Raised if the runner refuses the request."""


# ---- messages --------------------------------------------------------------------------------


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Request for a View."""

    after: int | None = None
    """Revision that is known. The answer comes when the revision differs, or after `wait_s`. None:
    at once."""
    wait_s: float = WAIT_S


class AskLines(msgspec.Struct, frozen=True, tag="lines"):
    """Request for Lines, answered when there are more or after WAIT_S."""

    size: int
    """Number of bytes of the file that are known."""


class ScaleRequest(msgspec.Struct, frozen=True, tag="scale"):
    """Request for another number of replicas."""

    replicas: int


class SuspendRequest(msgspec.Struct, frozen=True, tag="suspend"):
    """Request to suspend the job, or to resume it from its newest checkpoint; answered by Done."""

    suspend: bool


class EndRequest(msgspec.Struct, frozen=True, tag="end"):
    """Request to end as Ctrl-C does and to remove the run folder; answered by Done."""


class View(msgspec.Struct, frozen=True, tag="view"):
    """State of a run as the runner's own table shows it."""

    job: str
    run_dir: str
    status: Status | None
    """Status of the job; None until the coordinator has answered for the first time."""
    replicas: int
    """Number of intended replicas; the coordinator may not know it yet."""
    rounds_per_s_now: float
    left_s: float | None
    revision: int = 0
    """Number that grows with each change of the view."""
    suspended: str = ""
    """Suspending, Suspended or empty."""
    started_wall_s: float = 0.0


class Lines(msgspec.Struct, frozen=True, tag="printed"):
    """Answer with the number of bytes that the ranks have printed (`local.rundir`)."""

    size: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Answer that the request is being carried out."""


class Scaled(msgspec.Struct, frozen=True, tag="scaled"):
    """Answer to a ScaleRequest: the number of replicas before and after."""

    before: int
    after: int


class ControlRefusal(msgspec.Struct, frozen=True, tag="refused"):
    """Answer that the runner refuses the request, and why."""

    message: str
    hint: str


Request = Look | AskLines | ScaleRequest | SuspendRequest | EndRequest
Answer = View | Lines | Scaled | Done | ControlRefusal


# ---- the runner's side -----------------------------------------------------------------------


class Pulse:
    """Wakes all requests that wait for news."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Event] = set()

    def ring(self) -> None:
        """Wake all waiting requests, so that they check their conditions."""
        for event in self._waiting:
            event.set()

    async def until(self, holds: Callable[[], bool], timeout_s: float) -> None:
        """Wait until a condition holds or the time is over.

        Args:
            holds: The condition, checked at first and after each ring.
            timeout_s: Longest time to wait in seconds.
        """
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    await event.wait()
                    event.clear()
        except TimeoutError:
            return
        finally:
            self._waiting.discard(event)


class Controlled(Protocol):
    """Part of the runner that other terminals may use."""

    def view(self) -> View:
        """Return the state of the run."""

    def printed_bytes(self) -> int:
        """Return how many bytes the ranks have printed."""

    def scale(self, replicas: int) -> int:
        """Change the number of intended replicas; return the one before."""

    def suspend(self, suspend: bool) -> None:
        """Suspend the job, or resume it."""

    def remove(self) -> None:
        """End the run, and remove its folder afterwards."""


class Control:
    """Server for the requests of other terminals; an async context manager.

    Inside the block it listens, and the notes by which other terminals find the socket exist.

    Args:
        job: The job.
        run_dir: Folder of the run.
        runner: The runner that carries out the requests.
        sockets: The run's folder for sockets.
        warn: Shows a warning to the user.
    """

    def __init__(
        self,
        job: ResolvedJob,
        run_dir: Path,
        runner: Controlled,
        *,
        sockets: Path,
        warn: Callable[[str], None],
    ) -> None:
        self.pulse = Pulse()
        """Must be rung whenever the view has another revision or more was printed."""
        self._job = job
        self._run_dir = run_dir
        self._runner, self._warn = runner, warn
        self._asked: set[asyncio.Task[None]] = set()
        self._path = sockets / CONTROL
        self._server: asyncio.Server | None = None
        self._notes: list[Path] = []

    async def __aenter__(self) -> Self:
        path = self._path
        self._server = await asyncio.start_unix_server(self._connected, path, limit=LINE_MAX)
        entry = index.RunEntry(self._job.name, str(self._run_dir), str(path), os.getpid())
        self.entry = entry
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
        for task in self._asked:
            task.cancel()
        self._path.unlink(missing_ok=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection in a task of its own.

        It is not a coroutine, because asyncio would print a traceback when that is canceled at the
        end.
        """
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if credentials_of(writer.get_extra_info("socket")).uid not in (os.geteuid(), ROOT):
                return
            async with asyncio.timeout(ASK_S):
                line = await reader.readline()
            if line:  # without a line it was only a check that this runner is alive
                answer = await self._answer(line)
                async with asyncio.timeout(ASK_S):
                    writer.write(msgspec.json.encode(answer) + b"\n")
                    await writer.drain()
        except (OSError, ValueError, TimeoutError):
            return  # the client has gone, or has sent no line in time
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> Answer:
        try:
            request = msgspec.json.decode(line, type=Request)
        except UNDECODABLE as error:
            return ControlRefusal(f"not understood: {error}", "use the same version of paceline")
        runner = self._runner
        match request:
            case Look(after=after, wait_s=wait_s):
                if after is not None:
                    await self.pulse.until(
                        lambda: runner.view().revision != after, min(wait_s, WAIT_S)
                    )
                return runner.view()
            case AskLines(size=size):
                await self.pulse.until(lambda: runner.printed_bytes() > size, WAIT_S)
                return Lines(runner.printed_bytes())
            case ScaleRequest(replicas=replicas):
                refused = self._ending() or self._check(replicas)
                return refused or Scaled(runner.scale(replicas), replicas)
            case SuspendRequest(suspend=suspend):
                if (refused := self._ending()) is not None:
                    return refused
                runner.suspend(suspend)
            case EndRequest():
                runner.remove()
        return Done()

    def _ending(self) -> ControlRefusal | None:
        view = self._runner.view()
        status = view.status
        if not view.suspended and status and (status.stopping or status.outcome is not None):
            return ControlRefusal("the job is ending", "start another run")
        return None

    def _check(self, replicas: int) -> ControlRefusal | None:
        low, high, sizes = (
            self._job.min_replicas,
            self._job.max_replicas,
            self._job.elasticity.allowed_sizes,
        )
        if replicas < low:
            return ControlRefusal(
                f"{replicas} replicas are less than spec.minReplicas = {low}", f"use {low} or more"
            )
        if high is not None and replicas > high:
            return ControlRefusal(
                f"{replicas} replicas are more than spec.maxReplicas = {high}",
                f"use {high} or less, or start the job with a larger spec.maxReplicas",
            )
        if sizes and replicas not in sizes:
            listed = ", ".join(map(str, sizes))
            return ControlRefusal(
                f"spec.elasticity.allowedSizes does not contain {replicas}", f"use one of {listed}"
            )
        if replicas > self._runner.view().replicas:
            try:
                check_room(self._job, replicas, MachineLimits.of_this_machine())
            except PacelineError as error:
                return ControlRefusal(error.message, error.hint)
        return None


# ---- the other terminal's side ---------------------------------------------------------------


def look(entry: index.RunEntry, after: int | None = None, wait_s: float = WAIT_S) -> View:
    """Return the state of a run; with `after`, wait until it has changed.

    Args:
        entry: The note that the runner has left.
        after: Revision that is known; None: do not wait.
        wait_s: Longest time to wait in seconds, up to WAIT_S.

    Returns:
        The present state.
    """
    return ask(entry, Look(after, wait_s), View, wait_s=0.0 if after is None else wait_s)


def scale(entry: index.RunEntry, replicas: int) -> Scaled:
    """Change the number of replicas of a job."""
    return ask(entry, ScaleRequest(replicas), Scaled)


def more_lines(entry: index.RunEntry, size: int) -> int:
    """Return how many bytes the ranks have printed; wait until they are more than `size`.

    Args:
        entry: The note that the runner has left.
        size: Number of bytes that are known.

    Returns:
        The present number; it may be `size` after WAIT_S.
    """
    return ask(entry, AskLines(size), Lines, wait_s=WAIT_S).size


def suspend(entry: index.RunEntry, suspend: bool) -> None:
    """Suspend a job, or resume it."""
    ask(entry, SuspendRequest(suspend), Done)


def end(entry: index.RunEntry) -> None:
    """End a job as Ctrl-C does, and remove its run folder."""
    ask(entry, EndRequest(), Done)


def ask(
    entry: index.RunEntry, request: Request, kind: type[Asked], *, wait_s: float = 0.0
) -> Asked:
    """Send a request to a runner, which may wait `wait_s` for news, and return its answer."""
    data = b""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(ASK_S + wait_s)
        try:
            line.connect(entry.socket)
            if credentials_of(line).uid != os.geteuid():
                raise ConnectionError("somebody else listens there")
            line.sendall(msgspec.json.encode(request) + b"\n")
            while not data.endswith(b"\n") and (part := line.recv(2**16)):
                data += part
                if len(data) > LINE_MAX:
                    raise OSError(f"in less than {LINE_MAX:,} bytes")
        except (ConnectionError, FileNotFoundError):
            pass  # the runner is gone; a partial answer is useless
        except OSError as error:
            why = f"within {ASK_S:g} s" if isinstance(error, TimeoutError) else f"({error})"
            raise ControlError(
                f"job {entry.job}: its runner, process {entry.pid}, does not answer {why}",
                hint=f"see whether it is stopped; the logs are in {entry.run_dir}",
            ) from None
    if not data.endswith(b"\n"):  # it ended before its answer was complete
        raise EndedError(f"job {entry.job} ended in this moment")
    return read_answer(entry, data, kind)


def read_answer(entry: index.RunEntry, data: bytes, kind: type[Asked]) -> Asked:
    """Return the answer in one line of JSON; ControlError if it is refused or of another kind."""
    try:
        answer: Answer = msgspec.json.decode(data, type=Answer)
    except UNDECODABLE as error:
        raise _not_understood(entry, str(error)) from None
    if isinstance(answer, ControlRefusal):
        raise ControlRefusedError(
            f"job {entry.job}: {answer.message}", hint=answer.hint, exit_code=EXIT_BAD_INPUT
        )
    if not isinstance(answer, kind):
        raise _not_understood(entry, f"{type(answer).__name__} instead of {kind.__name__}")
    return answer


def _not_understood(entry: index.RunEntry, why: str) -> ControlError:
    return ControlError(
        f"job {entry.job}: the answer of its runner, process {entry.pid}, is not understood: {why}",
        hint="use the version of paceline that has started the job; "
        f"its logs are in {entry.run_dir}",
    )
