"""The parent of one forked call, which lives as long as any process of the call."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence

from testing.processes import fork_server

STATUS_FD = 3
READY_FD = 4


def keep(function: str, words: Sequence[str]) -> int:
    """Run one call as its parent, and never return.

    Report the pid of the call and, as soon as it has ended, its status as of `waitpid`. The keeper
    lives as long as any process of the call.

    Args:
        function: "module:function" that the call runs.
        words: its arguments.

    Raises:
        Become: in the process of the call.
    """
    ctypes.CDLL(None).prctl(fork_server.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    called = os.fork()
    if called == 0:
        os.close(STATUS_FD)
        os.setsid()
        raise fork_server.Become({"call": function, "arguments": list(words)})
    for fd in (*range(STATUS_FD), READY_FD):
        with contextlib.suppress(OSError):
            os.close(fd)
    with os.fdopen(STATUS_FD, "wb", buffering=0) as pipe:
        pipe.write(b"%d\n" % called)
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                os._exit(0)
            if pid == called:
                pipe.write(b"%d\n" % status)
