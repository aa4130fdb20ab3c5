"""How another terminal talks to the runner of a job: asks for its status, changes what it wants.

The runner owns the agents, so it is the one to ask: it starts and drains them, and it knows the
speed of the run beside the coordinator's status. It listens on a Unix socket in a folder that only
its user may enter; one line of JSON is asked and one is answered per connection. A question may
wait for news, so that nobody has to ask again and again; the connection ends with the runner.
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

from paceline.core.status import Status
from paceline.local import index
from paceline.local.room import Room, check_room
from paceline.local.rundir import CONTROL
from paceline.peer_credentials import credentials_of

LINE_MAX: Final = 16 * 2**20
ROOT: Final = 0
"""Uid of who may ask whatever the kernel lets it."""
ASK_S: Final = 5.0
WAIT_S: Final = 30.0
"""For news, at most; then what is known is the answer."""
Asked = TypeVar("Asked", "View", "Scaled", "Lines", "Done")


class ControlError(PacelineError):
    """The runner refuses, or does not answer."""


class EndedError(ControlError):
    """The runner has ended while it was asked."""


class RefusedError(ControlError):
    """The runner does not do it."""


# ---- words -----------------------------------------------------------------------------------


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Asks for a View."""

    after: int | None = None
    """Answered as soon as its revision is another one, or after `wait_s`. None: at once."""
    wait_s: float = WAIT_S


class AskLines(msgspec.Struct, frozen=True, tag="lines"):
    """Asks for Lines, as soon as there are more, or after WAIT_S."""

    size: int
    """Bytes of the file that are known."""


class ScaleRequest(msgspec.Struct, frozen=True, tag="scale"):
    """Asks for another number of replicas."""

    replicas: int


class SuspendRequest(msgspec.Struct, frozen=True, tag="suspend"):
    """Asks for a stop after a checkpoint, from which a later request goes on. Answered by Done."""

    suspend: bool


class EndRequest(msgspec.Struct, frozen=True, tag="end"):
    """Asks for the end, as Ctrl-C does, and for the removal of the run folder. Answered by Done."""


class View(msgspec.Struct, frozen=True, tag="view"):
    """What the runner's own table shows."""

    job: str
    run_dir: str
    status: Status | None
    """None until the coordinator has answered for the first time."""
    replicas: int
    """That are wanted, also while the coordinator has still to hear of it."""
    rounds_per_s_now: float
    left_s: float | None
    revision: int = 0
    """Grows with each change of the view."""
    suspended: str = ""
    """Suspending, Suspended or empty."""
    started_wall_s: float = 0.0


class Lines(msgspec.Struct, frozen=True, tag="printed"):
    """How much the ranks have printed (`local.printed`)."""

    size: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """What was asked for is under way."""


class Scaled(msgspec.Struct, frozen=True, tag="scaled"):
    before: int
    after: int


class Refusal(msgspec.Struct, frozen=True, tag="refused"):
    message: str
    hint: str


Request = Look | AskLines | ScaleRequest | SuspendRequest | EndRequest
Answer = View | Lines | Scaled | Done | Refusal


# ---- the runner's side -----------------------------------------------------------------------


class Pulse:
    """Wakes all who wait for news."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Event] = set()

    def ring(self) -> None:
        for event in self._waiting:
            event.set()

    async def until(self, holds: Callable[[], bool], timeout_s: float) -> None:
        """Until it holds, looked at after each ring, or `timeout_s` is over."""
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
    """The runner, as far as others may ask it."""

    def view(self) -> View: ...

    def printed_bytes(self) -> int: ...

    def scale(self, replicas: int) -> int:
        """Change the number of replicas; the one before."""

    def suspend(self, suspend: bool) -> None: ...

    def remove(self) -> None:
        """End, and leave no run folder."""


class Control:
    """`async with`: listens, and leaves the notes by which others find the socket."""

    def __init__(
        self,
        job: ResolvedJob,
        run_dir: Path,
        runner: Controlled,
        *,
        sockets: Path,
        warn: Callable[[str], None],
    ) -> None:
        """`sockets`: the run's folder for them."""
        self.pulse = Pulse()
        """To be rung whenever a view has another revision, or more was printed."""
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
        entry = index.Entry(self._job.name, str(self._run_dir), str(path), os.getpid())
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
        """No coroutine: of one that is cancelled at the end asyncio would print a traceback."""
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if credentials_of(writer.get_extra_info("socket")).uid not in (os.geteuid(), ROOT):
                return
            async with asyncio.timeout(ASK_S):
                line = await reader.readline()
            if line:  # else only somebody who looked whether this runner lives
                answer = await self._answer(line)
                async with asyncio.timeout(ASK_S):
                    writer.write(msgspec.json.encode(answer) + b"\n")
                    await writer.drain()
        except (OSError, ValueError, TimeoutError):
            return  # who asked has gone, or sent no line in time
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> Answer:
        try:
            request = msgspec.json.decode(line, type=Request)
        except UNDECODABLE as error:
            return Refusal(f"not understood: {error}", "use the same version of paceline")
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

    def _ending(self) -> Refusal | None:
        view = self._runner.view()
        status = view.status
        if not view.suspended and status and (status.stopping or status.outcome is not None):
            return Refusal("the job is ending", "start another run")
        return None

    def _check(self, replicas: int) -> Refusal | None:
        low, high, sizes = (
            self._job.min_replicas,
            self._job.max_replicas,
            self._job.elasticity.allowed_sizes,
        )
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
        if replicas > self._runner.view().replicas:
            try:
                check_room(self._job, replicas, Room.of_this_machine())
            except PacelineError as error:
                return Refusal(error.message, error.hint)
        return None


# ---- the other terminal's side ---------------------------------------------------------------


def look(entry: index.Entry, after: int | None = None, wait_s: float = WAIT_S) -> View:
    """`after`: wait for another revision than that, for `wait_s` and WAIT_S at most."""
    return ask(entry, Look(after, wait_s), View, wait_s=0.0 if after is None else wait_s)


def scale(entry: index.Entry, replicas: int) -> Scaled:
    return ask(entry, ScaleRequest(replicas), Scaled)


def more_lines(entry: index.Entry, size: int) -> int:
    """Bytes that are printed, as soon as they are more than `size`, or after a while."""
    return ask(entry, AskLines(size), Lines, wait_s=WAIT_S).size


def suspend(entry: index.Entry, suspend: bool) -> None:
    ask(entry, SuspendRequest(suspend), Done)


def end(entry: index.Entry) -> None:
    """And remove the run folder."""
    ask(entry, EndRequest(), Done)


def ask(entry: index.Entry, request: Request, kind: type[Asked], *, wait_s: float = 0.0) -> Asked:
    """Ask the runner of a job.

    Args:
        entry: The note that the runner has left.
        request: What to ask.
        kind: Type of the answer.
        wait_s: How long the request itself lets the runner wait for news.

    Raises:
        RefusedError: The runner does not do it.
        EndedError: The runner has ended meanwhile.
        ControlError: The runner does not answer, or with what is no answer to this request.
    """
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
            pass  # it is gone; nothing that it said is of use
        except OSError as error:
            why = f"within {ASK_S:g} s" if isinstance(error, TimeoutError) else f"({error})"
            raise ControlError(
                f"job {entry.job}: its runner, process {entry.pid}, does not answer {why}",
                hint=f"see whether it is stopped; the logs are in {entry.run_dir}",
            ) from None
    if not data.endswith(b"\n"):  # it ended before it had said all of its answer
        raise EndedError(f"job {entry.job} ended in this moment")
    return read_answer(entry, data, kind)


def read_answer(entry: index.Entry, data: bytes, kind: type[Asked]) -> Asked:
    """Return what a runner, perhaps of another version, has answered.

    Args:
        entry: The note that the runner has left.
        data: One line of JSON, of at most LINE_MAX bytes.
        kind: Type of the answer.

    Raises:
        RefusedError: The runner does not do what it was asked for.
        ControlError: The bytes are no answer of this kind.
    """
    try:
        answer: Answer = msgspec.json.decode(data, type=Answer)
    except UNDECODABLE as error:
        raise _not_understood(entry, str(error)) from None
    if isinstance(answer, Refusal):
        raise RefusedError(
            f"job {entry.job}: {answer.message}", hint=answer.hint, exit_code=EXIT_BAD_INPUT
        )
    if not isinstance(answer, kind):
        raise _not_understood(entry, f"{type(answer).__name__} instead of {kind.__name__}")
    return answer


def _not_understood(entry: index.Entry, why: str) -> ControlError:
    return ControlError(
        f"job {entry.job}: the answer of its runner, process {entry.pid}, is not understood: {why}",
        hint="use the version of paceline that has started the job; "
        f"its logs are in {entry.run_dir}",
    )
