"""The agent's use of the kernel: adopt orphans, reap children, and kill what they left behind.

The agent is a child subreaper, so every descendant whose parent ends becomes its child, and the
agent's `waitpid` is the only place where a death is observed (D6). A watched process leads a
process group. When it dies, the rest of its group is killed while the dead leader still holds the
group's number. The death counts only when the whole group is gone: a rank that was a shell script
is not dead as long as the Python below it lives. Members that remove the shared memory of others
(`scratch.cleans_up`) do not count. They end by themselves, at the latest with the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

from paceline import scratch

PR_SET_CHILD_SUBREAPER: Final = 36
REST_S: Final = 1.0
"""Seconds until processes that were sent SIGKILL are gone. The kernel may hold one for longer."""

OnEnd = Callable[[int], None]
"""Callback for the end of a process. Its argument is the exit code, negative for a signal."""


def become_subreaper() -> None:
    """Make this process adopt orphaned descendants.

    Raises:
        OSError: The kernel refuses it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class Reaper:
    """Reaps all children of this process. There is one per process."""

    def __init__(self) -> None:
        self._watched: dict[int, OnEnd] = {}
        self._sweeping: dict[int, tuple[int, OnEnd]] = {}
        """Dead leaders of which members are still ending, by pid, which is the number of the group.
        """
        self._collected = asyncio.Event()
        """Set when something has been reaped."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Reap on every SIGCHLD from now on."""
        loop.add_signal_handler(signal.SIGCHLD, self.collect)

    def watch(self, pid: int, on_end: OnEnd) -> None:
        """Call back when a process and its group have ended.

        Watching it again replaces the callback.

        Args:
            pid: A child, or a process that is being handed over. It leads a process group.
            on_end: Called on the event loop with the exit code.
        """
        self._watched[pid] = on_end

    def kill(self, pid: int) -> None:
        """Send SIGKILL to a watched process. Do nothing if it has been reaped."""
        if pid in self._watched:  # not reaped yet, so no other process has its pid
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def collect(self) -> None:
        """Reap every child that has ended, and call back for groups that are gone."""
        ended: list[tuple[OnEnd, int]] = []
        self._collected.set()
        while True:
            try:
                child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if child is None:
                break
            on_end = self._watched.pop(child.si_pid, None)
            if on_end is not None:
                _kill_group(child.si_pid)
            scratch.remove_torch_memory(child.si_pid)
            _, status = os.waitpid(child.si_pid, 0)
            if on_end is not None:
                self._sweeping[child.si_pid] = (os.waitstatus_to_exitcode(status), on_end)
        for pid in [pid for pid in self._sweeping if not _kill_members(pid)]:
            code, on_end = self._sweeping.pop(pid)
            ended.append((on_end, code))
        for on_end, code in ended:
            on_end(code)

    async def end_the_rest(self) -> None:
        """Kill all children and the children that they leave, and wait until they are reaped.

        These are processes that ranks had detached from themselves. Those that clean up after
        others first have CLEANERS_S to end by themselves. Then all are killed, with REST_S as the
        longest wait.
        """
        for spare, patience_s in ((True, scratch.CLEANERS_S), (False, REST_S)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    while _kill_children(spare=spare):
                        self._collected.clear()
                        await self._collected.wait()


def _kill_children(*, spare: bool) -> bool:
    """Kill all children, except cleaners if `spare`. Return True if there were any."""
    any_killed = False
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            for pid in (task / "children").read_text().split():
                any_killed = True
                if not (spare and scratch.cleans_up(int(pid))):
                    os.kill(int(pid), signal.SIGKILL)
    return any_killed


def _kill_group(leader: int) -> None:
    """Kill what is left of a group whose dead leader has not been reaped yet."""
    if any(map(scratch.cleans_up, _members(leader))):
        _kill_members(leader)
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _kill_members(leader: int) -> bool:
    """Kill the members of a group one by one, except those that clean up after the others.

    Args:
        leader: Pid of the dead leader.

    Returns:
        True if there were any: one may have been forked while the others were killed.
    """
    if not _group_exists(leader):
        return False
    members = [pid for pid in _members(leader) if not scratch.cleans_up(pid)]
    for pid in members:
        with contextlib.suppress(OSError):
            process = os.pidfd_open(pid)
            try:
                # Another process may have been given this pid since it was listed.
                if _is_member(pid, leader):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            finally:
                os.close(process)
    return bool(members)


def _members(leader: int) -> list[int]:
    """Return the pids of the living processes of a group whose leader also leads its session."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208
    return [pid for pid in pids if _is_member(pid, leader)]


def _is_member(pid: int, leader: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False  # it has ended meanwhile
    # The name in parentheses may contain spaces and parentheses.
    words = stat.rpartition(")")[2].split()
    state, group, session, threads = words[0], int(words[2]), int(words[3]), int(words[17])
    # A process whose first thread has ended lives as long as another thread runs.
    return group == session == leader and (state not in ("Z", "X") or threads > 1)


def _group_exists(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
