"""Processes of a local run: each in its own session, watched by pidfd, and ended for certain.

The runner is their subreaper (D6). Every process that a dead agent leaves, even a stopped rank,
becomes a child of the runner, which kills it. So a pod leaves the inventory only when none of its
processes can still be alive (R25), and nothing is left over after a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from paceline import private_files, scratch

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
READ_BYTES: Final = 64 * 1024
"""Upper bound on one read from a pipe, and on an unfinished line."""
TAIL_BYTES: Final = 16 * 1024
"""Number of bytes at the end of a log that `tail` reads."""
KILLED_S: Final = 5.0
"""How long to wait for a process after SIGKILL, in seconds; the kernel may hold one for longer."""
ORPHAN_PASSES_MAX: Final = 50
"""Upper bound on passes over orphans: killing one may reveal its own children. A pass takes a few
milliseconds."""

_libc: Final = ctypes.CDLL(None, use_errno=True)


class Child:
    """One process that the runner has started. The kernel sends it SIGTERM if the runner ends.

    Args:
        name: Name of the process in messages.
        process: The process.
        log: File that its output goes to.
        output: Reader of its stdout, if lines go to a callback.
    """

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], log: Path, output: LineReader | None
    ) -> None:
        self.name = name
        self.log = log
        self._process = process
        self._output = output
        self._ended = asyncio.Event()
        self._pidfd = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    @classmethod
    def start(
        cls,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        on_line: Callable[[str], None] | None = None,
        keep_fds: Sequence[int] = (),
    ) -> Child:
        """Start a process in its own session, so that Ctrl-C in the terminal does not reach it.

        Args:
            name: Name of the process in messages.
            argv: Program and arguments.
            env: Its whole environment.
            log: File that its output is appended to.
            on_line: Called with each line of stdout, which then does not go to the log.
            keep_fds: File descriptors that it inherits.

        Returns:
            The running process.
        """
        with _open_log(log) as file:
            process = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file if on_line is None else subprocess.PIPE,
                stderr=file,
                start_new_session=True,
                pass_fds=keep_fds,
                preexec_fn=partial(_end_with_parent, os.getpid()),
            )
        output = None
        if on_line is not None:
            assert process.stdout is not None
            output = LineReader(process.stdout.fileno(), on_line)
        return cls(name, process, log, output)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True until the process has been reaped."""
        return not self._ended.is_set()

    @property
    def exit_code(self) -> int:
        """Exit code, negative for a signal; available only after the end."""
        assert self._process.returncode is not None, self.name
        return self._process.returncode

    async def ended(self) -> int:
        """Wait until the process has been reaped, and return its exit code."""
        await self._ended.wait()
        return self.exit_code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.alive:
            self._process.send_signal(number)

    async def end(self, *, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL after `grace_s` seconds; return when the process is reaped."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._ended.wait()
        self.signal(signal.SIGKILL)
        await self._ended.wait()

    def tail(self, lines: int) -> list[str]:
        """Return the last lines of its log, for an error message."""
        return tail(self.log, lines)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        if self._output is not None and self._process.stdout is not None:
            self._output.finish()
            self._process.stdout.close()
        self._ended.set()


def _open_log(path: Path) -> BinaryIO:
    try:
        return os.fdopen(private_files.append(path), "ab")
    except OSError:  # a full disk must not end the job
        return Path(os.devnull).open("ab")


class LineReader:
    """Reader that passes the lines of a pipe to a function as they come.

    Args:
        fd: Read end of the pipe; it is made non-blocking.
        on_line: Called with each line, on the event loop.
    """

    def __init__(self, fd: int, on_line: Callable[[str], None]) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._on_line = on_line
        self._partial = b""
        asyncio.get_running_loop().add_reader(fd, self._read)

    def _read(self) -> bool:
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            asyncio.get_running_loop().remove_reader(self._fd)
            return False
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > READ_BYTES:
            lines, self._partial = [*lines, self._partial], b""
        for line in lines:
            self._on_line(line.decode(errors="replace"))
        return True

    def finish(self) -> None:
        """Read the rest of the pipe; called when the process has ended."""
        while self._read():
            pass
        asyncio.get_running_loop().remove_reader(self._fd)
        if self._partial:
            self._on_line(self._partial.decode(errors="replace"))


def _end_with_parent(parent: int) -> None:
    """Ask the kernel to end this process with its parent; runs before the program starts."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent has ended already


def adopt_orphans(adopt: bool) -> None:
    """Make this process the subreaper of its descendants, or stop being it.

    Orphaned descendants become children of the subreaper instead of init.

    Raises:
        OSError: The kernel refuses.
    """
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


async def kill_orphans(known: Callable[[], set[int]]) -> int:
    """Kill and reap every child of this process that is not known.

    Processes that clean up after others (`scratch.cleans_up`) may end by themselves. They are
    killed if they take longer than CLEANERS_S.

    Args:
        known: Returns the pids of the children to spare; called in each pass.

    Returns:
        How many children were killed and reaped.
    """
    killed = 0
    loop = asyncio.get_running_loop()
    until_s = loop.time() + scratch.CLEANERS_S
    for _ in range(ORPHAN_PASSES_MAX):
        orphans = set(children_of(os.getpid())) - known()
        if not orphans:
            break
        patience_s = until_s - loop.time()
        spared = set(filter(scratch.cleans_up, orphans)) if patience_s > 0 else set()
        for pid in orphans - spared:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in orphans - spared:
            if await _reaped(pid, KILLED_S):
                killed += 1
        if spared == orphans:
            await asyncio.gather(*(_reaped(pid, patience_s) for pid in spared))
    return killed


async def _reaped(pid: int, patience_s: float) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pidfd, ended.set)
    try:
        async with asyncio.timeout(patience_s):
            await ended.wait()
    except TimeoutError:
        return False  # in an uninterruptible wait of the kernel; the next pass retries
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    return _collect(pid)


def _collect(pid: int) -> bool:
    scratch.remove_torch_memory(pid)
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False


def children_of(parent: int) -> list[int]:
    """Return the pids of all children of `parent`, including unreaped ones."""
    children = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue  # it has ended in the meantime
        # The name in parentheses may contain blanks and parentheses.
        if int(stat.rpartition(")")[2].split()[1]) == parent:
            children.append(int(entry.name))
    return children


def tail(path: Path, lines: int) -> list[str]:
    """Return the last lines of a file, from its last TAIL_BYTES; none if it cannot be read."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - TAIL_BYTES))
            text = stream.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-lines:]
