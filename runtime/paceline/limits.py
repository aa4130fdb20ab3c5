"""What the machine lets this process have open: files and sockets, and callers that wait.

A job of a thousand ranks needs more of both than a shell or an image gives by default. How much, the
process knows from the size of the job; too little is an error at its start, with the figure and the
way out, instead of a connection that fails in the middle of training.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Final

from paceline_api.errors import EXIT_BAD_INPUT, PacelineError

LISTEN_BACKLOG: Final = 65_535
"""As many callers may wait as the kernel allows (net.core.somaxconn), which cuts this down."""
SPARE_FILES: Final = 256
"""Kept free beside what Paceline needs: the script opens files too."""
MORE_FILES: Final = "hint: raise the limit of open files (ulimit -n)"
SOMAXCONN: Final = Path("/proc/sys/net/core/somaxconn")


class LimitError(PacelineError):
    """The machine allows this process too little for a job of this size."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint, exit_code=EXIT_BAD_INPUT)


def ensure_files(who: str, needed: int) -> None:
    """Room for `needed` open files beside those that are open now: the soft limit is raised as far
    as that takes. Raises LimitError if the hard limit forbids it."""
    wanted = len(os.listdir("/proc/self/fd")) + needed + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    check_files(who, wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_files(who: str, wanted: int) -> None:
    """Whether a process may have so many files and sockets open, all told. Raises LimitError."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise LimitError(
            f"{who} needs up to {wanted} open files and sockets, and the limit is {hard}",
            hint=f"raise it to {wanted} or more: ulimit -n, LimitNOFILE= of the service that starts "
            "it or of the container runtime; or run fewer ranks",
        )


def ensure_callers(who: str, callers: int) -> None:
    """Room for so many who connect at the same moment. Raises LimitError."""
    allowed = _somaxconn()
    if callers > allowed:
        raise LimitError(
            f"up to {callers} connect to {who} at the same moment, and the kernel lets "
            f"{allowed} of them wait (net.core.somaxconn)",
            hint=f"sysctl net.core.somaxconn={callers}, in a pod under "
            "spec.template.spec.securityContext.sysctls; or run fewer ranks",
        )


def _somaxconn() -> int:
    try:
        return int(SOMAXCONN.read_text())
    except (OSError, ValueError):  # not to be seen here; the kernel decides then
        return LISTEN_BACKLOG
