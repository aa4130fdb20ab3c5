"""What the machine lets this process have: files and sockets, callers that wait, memory.

A job of a thousand ranks needs more of them than a shell or an image gives by default. How much,
the size of the job tells (`core.demand`); too little is an error at the start, with the figure and
the way out, instead of a connection that fails in the middle of training.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from paceline_api.errors import EXIT_BAD_INPUT, PacelineError

LISTEN_BACKLOG: Final = 65_535
"""As many callers may wait as the kernel allows (net.core.somaxconn), which cuts this down."""
SPARE_FILES: Final = 256
"""Kept free beside what Paceline needs: the script opens files too."""
MORE_FILES: Final = "hint: raise the limit of open files (ulimit -n)"
MIB: Final = 1 << 20
CGROUPS: Final = Path("/sys/fs/cgroup")
SOMAXCONN: Final = Path("/proc/sys/net/core/somaxconn")


class LimitError(PacelineError):
    """The machine allows this process too little for a job of this size."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint, exit_code=EXIT_BAD_INPUT)


def ensure_files(who: str, needed: int, *, all_that_is_allowed: bool = False) -> None:
    """Room for `needed` open files beside those that are open now: the soft limit is raised as far
    as that takes. Raises LimitError if the hard limit forbids it.

    `all_that_is_allowed`: raise it to the hard limit, since this process starts no program of the
    user, which would inherit it, and cannot know how far the job may grow.
    """
    wanted = len(list(Path("/proc/self/fd").iterdir())) + needed + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    check_files(who, wanted)
    if all_that_is_allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    elif soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_files(who: str, wanted: int) -> None:
    """Whether a process may have so many files and sockets open, all told. Raises LimitError."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise LimitError(
            f"{who} needs up to {wanted} open files and sockets, and the limit is {hard}",
            hint=f"allow {wanted} or more: ulimit -n {wanted}, or LimitNOFILE= of the service or "
            "container runtime that starts it; or run fewer ranks",
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


def ensure_memory(who: str, needed_bytes: int, *, hint: str) -> None:
    """Room for so much beside what this process holds now, in the control groups that it is in.
    Raises LimitError."""
    wanted, allowed = own_bytes() + needed_bytes, min(cgroup_limits("memory.max"), default=None)
    if allowed is not None and allowed < wanted:
        raise LimitError(
            f"{who} needs {wanted // MIB} MiB of memory at least, and the limit is "
            f"{allowed // MIB} MiB",
            hint=hint,
        )


def cgroup_limits(name: str) -> Iterator[int]:
    """Those of the control groups that hold this process; version 2, where one is set."""
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
    """Memory of this process that is no file's, so nobody else has it too."""
    return figures_bytes(Path("/proc/self/status"), "RssAnon")


def figures_bytes(file: Path, *keys: str) -> int:
    """The sum of these lines of a file of the kernel, which counts in KiB."""
    lines = (line.partition(":") for line in file.read_text().splitlines())
    return 1024 * sum(int(value.split()[0]) for key, _, value in lines if key in keys)


def _somaxconn() -> int:
    try:
        return int(SOMAXCONN.read_text())
    except (OSError, ValueError):  # not to be seen here; the kernel decides then
        return LISTEN_BACKLOG
