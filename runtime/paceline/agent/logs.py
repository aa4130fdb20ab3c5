"""Output of the ranks, from their pipes to the agent's stdout, with a prefix, and to files.

Every rank writes into pipes of its own, so its last lines arrive however it dies. Nothing is lost,
and memory is bounded: if stdout or the disk is slow, the pipes are not read any further. Then the
rank waits, and never the agent. The end of stderr is kept for the message of a failure.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final

from paceline import private_files

log = logging.getLogger("paceline.agent")

READ_BYTES: Final = 64 * 1024
LINE_BYTES_MAX: Final = 64 * 1024
"""Length in bytes above which a line is cut in pieces."""
PENDING_BYTES_MAX: Final = 1024 * 1024
"""Bytes read but not written yet, above which pipes are not read any further."""
TAIL_LINES: Final = 20
TAIL_BYTES: Final = 2048
"""Bytes of stderr to keep. They fit a Kubernetes termination message (4096 bytes) together with the
text around them."""
FLUSH_S: Final = 5.0
"""Seconds for the output that is still unwritten when the agent ends."""


class LogOutput:
    """Writes to stdout and to files, in order, on a thread of its own. Called on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stdout_fd: int, folder: Path) -> None:
        self._loop = loop
        self._stdout_fd: int | None = stdout_fd
        self._folder: Path | None = folder
        self._thread = ThreadPoolExecutor(1, "output")
        self._pending = 0
        self._lock = threading.Lock()
        self._written = 0
        """Bytes written that the event loop does not know of yet."""
        self._waiting: list[Callable[[], None]] = []
        self._files: dict[str, io.FileIO] = {}

    @property
    def full(self) -> bool:
        """Return True if more than PENDING_BYTES_MAX are not written yet."""
        return self._pending > PENDING_BYTES_MAX

    def when_free(self, resume: Callable[[], None]) -> None:
        """Call `resume` once, on the event loop, when the output is not full any more."""
        self._waiting.append(resume)

    def write(self, name: str, shown: bytes, kept: bytes) -> None:
        """Queue `shown` for stdout and `kept` for the file of that name."""
        self._pending += len(shown) + len(kept)
        self._thread.submit(self._write, name, shown, kept)

    def close_file(self, name: str) -> None:
        """Close a file after what is queued for it."""
        self._thread.submit(self._close_file, name)

    def close(self) -> None:
        """Write what is queued, for at most FLUSH_S, since a reader of stdout may be stopped."""
        last = self._thread.submit(self._close_files)
        wait([last], FLUSH_S)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _tell(self, size: int) -> None:
        """Wake the event loop once, however much is written before it reads the count.

        Each wake-up is a byte in the pipe through which signals arrive too, and a signal that finds
        the pipe full is lost.

        Args:
            size: Bytes written.
        """
        with self._lock:
            began, self._written = self._written > 0, self._written + size
        if not began:
            self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        with self._lock:
            written, self._written = self._written, 0
        self._pending -= written
        if not self.full:
            waiting, self._waiting = self._waiting, []
            for resume in waiting:
                resume()

    def _write(self, name: str, shown: bytes, kept: bytes) -> None:
        self._show(shown)
        self._keep(name, kept)
        self._tell(len(shown) + len(kept))

    def _show(self, shown: bytes) -> None:
        if self._stdout_fd is not None and shown:
            try:
                view = memoryview(shown)
                while view:
                    view = view[os.write(self._stdout_fd, view) :]
            except OSError as error:
                self._stdout_fd = None  # nobody reads stdout any more; keep writing the files
                log.warning("output of the ranks goes to files only from now on: %s", error)

    def _keep(self, name: str, kept: bytes) -> None:
        if self._folder is not None and kept:
            try:
                file = self._files.get(name)
                if file is None:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    path = self._folder / name
                    # The umask decides who may read it: in a pod a sidecar may need to.
                    fd = private_files.append(path, 0o666)
                    file = self._files[name] = io.FileIO(fd, "ab")
                file.write(kept)
            except OSError as error:
                message = f"logs are not kept in {self._folder} from now on: {error.strerror}"
                log.warning("%s", message)
                self._show(f"warning: {message}\n".encode())
                self._folder = None

    def _close_file(self, name: str) -> None:
        file = self._files.pop(name, None)
        if file is not None:
            file.close()

    def _close_files(self) -> None:
        for name in list(self._files):
            self._close_file(name)


class Pump:
    """Reads one pipe of one process until its end."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        output: LogOutput,
        fd: int,
        *,
        prefix: str,
        name: str,
        shown: bool = True,
    ) -> None:
        os.set_blocking(fd, False)
        self._loop, self._output, self._fd = loop, output, fd
        self._prefix = prefix.encode()
        self._name = name
        self._shown = shown
        self._partial = b""
        self._tail: list[bytes] = []
        self.open = True
        self._resume()

    @property
    def tail(self) -> str:
        """The last lines of the output, at most TAIL_LINES and TAIL_BYTES."""
        lines = [*self._tail, self._partial] if self._partial else self._tail
        return b"\n".join(lines)[-TAIL_BYTES:].decode(errors="replace").strip()

    def drain(self) -> None:
        """Read what the pipe holds now, even if the output is full."""
        while self.open and self._read():
            pass

    def close(self) -> None:
        """Read what is left and close the pipe."""
        if not self.open:
            return
        self.drain()
        if self.open:
            self._end()

    def _resume(self) -> None:
        if self.open:
            self._loop.add_reader(self._fd, self._readable)

    def _readable(self) -> None:
        self._read()
        if self.open and self._output.full:
            self._loop.remove_reader(self._fd)
            self._output.when_free(self._resume)

    def _read(self) -> bool:
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._end()
            return False
        *lines, self._partial = (self._partial + data).split(b"\n")
        while len(self._partial) > LINE_BYTES_MAX:
            lines.append(self._partial[:LINE_BYTES_MAX])
            self._partial = self._partial[LINE_BYTES_MAX:]
        if lines:
            self._pass_on(lines)
        return True

    def _pass_on(self, lines: list[bytes]) -> None:
        self._tail = [*self._tail, *(line for line in lines if line.strip())][-TAIL_LINES:]
        kept = b"".join(line + b"\n" for line in lines)
        shown = b"".join(self._prefix + line + b"\n" for line in lines) if self._shown else b""
        self._output.write(self._name, shown, kept)

    def _end(self) -> None:
        self.open = False
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        if self._partial:
            lines, self._partial = [self._partial], b""
            self._pass_on(lines)
