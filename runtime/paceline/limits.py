"""Limits of the machine for this process: files and sockets, waiting callers, memory.

A job of a thousand ranks needs more of them than a shell or an image gives by default. The size of
the job says how much (`core.demand`). If it is too little, the process fails at the start, with the
figure and the remedy, instead of losing a connection in the middle of training.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from paceline_api.errors import EXIT_BAD_INPUT, PacelineError

LISTEN_BACKLOG: Final = 65_535
"""Number of callers that may wait at a listening socket. The kernel reduces it to
net.core.somaxconn."""
SPARE_FILES: Final = 256
"""Number of files to keep free beside what Paceline needs, since the script opens files too."""
PORTS_TRIED: Final = 256
"""Number of further ports that an agent tries for its metrics on a laptop, where the agents of
several replicas share one machine."""
MORE_FILES: Final = "hint: raise the limit of open files (ulimit -n)"
MIB: Final = 1 << 20
CGROUPS: Final = Path("/sys/fs/cgroup")
SOMAXCONN: Final = Path("/proc/sys/net/core/somaxconn")


class LimitError(PacelineError):
    """Raised if the machine allows this process too little for a job of this size."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint, exit_code=EXIT_BAD_INPUT)


def ensure_files(who: str, needed: int, *, all_that_is_allowed: bool = False) -> None:
    """Raise the soft limit of open files as far as this process needs.

    It raises LimitError if the hard limit is too low.

    Args:
        who: Name of this process, for the error message.
        needed: Number of files to be opened beside those that are open now.
        all_that_is_allowed: True to raise the limit up to the hard one. This is for a process that
            starts no program of the user, which would inherit the limit, and that cannot know how
            far the job grows.
    """
    wanted = len(list(Path("/proc/self/fd").iterdir())) + needed + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    check_files(who, wanted)
    if all_that_is_allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    elif soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_files(who: str, wanted: int) -> None:
    """Check that a process may have so many files and sockets open.

    Args:
        who: Name of the process, for the error message.
        wanted: Number of files and sockets in all.

    Raises:
        LimitError: The hard limit is lower.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise LimitError(
            f"{who} needs up to {wanted} open files and sockets, and the limit is {hard}",
            hint=f"allow {wanted} or more: ulimit -n {wanted}, or LimitNOFILE= of the service or "
            "container runtime that starts it; or run fewer ranks",
        )


def ensure_callers(who: str, callers: int) -> None:
    """Check that so many callers may connect at the same moment.

    Args:
        who: Name of the process that they connect to, for the error message.
        callers: Number of callers.

    Raises:
        LimitError: The kernel lets fewer of them wait.
    """
    allowed = _somaxconn()
    if callers > allowed:
        raise LimitError(
            f"up to {callers} connect to {who} at the same moment, and the kernel lets "
            f"{allowed} of them wait (net.core.somaxconn)",
            hint=f"sysctl net.core.somaxconn={callers}, in a pod under "
            "spec.template.spec.securityContext.sysctls; or run fewer ranks",
        )


def ensure_memory(who: str, needed_bytes: int, *, hint: str) -> None:
    """Check that the control groups of this process allow more memory.

    Args:
        who: Name of the process, for the error message.
        needed_bytes: Bytes needed beside what this process holds now.
        hint: Remedy, for the error message.

    Raises:
        LimitError: A limit is lower.
    """
    wanted, allowed = own_bytes() + needed_bytes, min(cgroup_limits("memory.max"), default=None)
    if allowed is not None and allowed < wanted:
        raise LimitError(
            f"{who} needs {wanted // MIB} MiB of memory at least, and the limit is "
            f"{allowed // MIB} MiB",
            hint=hint,
        )


def cgroup_limits(name: str) -> Iterator[int]:
    """Yield a limit of each control group (version 2) that holds this process, where one is set.

    Args:
        name: File with the limit, such as `memory.max`.

    Yields:
        The limits.
    """
    try:
        inside = Path("/proc/self/cgroup").read_text().partition("0::/")[2].partition("\n")[0]
    except OSError:
        return
    group = CGROUPS / inside
    for folder in (group, *group.parents):
        if folder.is_relative_to(CGROUPS):
            try:
                yield int((folder / name).read_text())
            except (OSError, ValueError):  # no such group in this view, or "max"
                continue


def own_bytes() -> int:
    """Return the anonymous memory of this process in bytes, which no other process shares."""
    return figures_bytes(Path("/proc/self/status"), "RssAnon")


def figures_bytes(file: Path, *keys: str) -> int:
    """Return the sum in bytes of lines of a kernel file that counts in KiB."""
    lines = (line.partition(":") for line in file.read_text().splitlines())
    return 1024 * sum(int(value.split()[0]) for key, _, value in lines if key in keys)


def _somaxconn() -> int:
    try:
        return int(SOMAXCONN.read_text())
    except (OSError, ValueError):  # unreadable here; the kernel decides then
        return LISTEN_BACKLOG
