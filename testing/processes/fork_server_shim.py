"""The guard of `agent.shim`, for ranks that are forked by a fork server instead of executed.

It is run by path with `python -I -S`, by mpiexec or by the agent itself. Like the product's guard
it keeps the chain mpiexec - proxy - guard up and reports to the agent when the chain breaks. Unlike
that guard, it does not become the rank. It hands the environment and PMI's connection to the fork
server below the agent, which forks the rank as a child of the agent. The rank's first function is
`become_rank`.
"""

from __future__ import annotations

import importlib.util
import os
import select
import sys
from pathlib import Path
from typing import Any

ENV_FORK_SERVER = "PACELINE_TEST_FORK_SERVER"
HERE = Path(__file__).parent


def load(name: str, path: Path) -> Any:
    """Import a module from a file by its path."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Start the rank and wait for its end; argument 1 is the path of the product's shim."""
    shim = load("shim", Path(sys.argv[1]))
    fork_server = load("fork_server", HERE / "fork_server.py")
    name, key = os.environ.pop(shim.ENV_SOCKET), os.environ.pop(shim.ENV_KEY)
    agent = int(os.environ.pop(shim.ENV_AGENT))
    del os.environ[shim.ENV_GUARD]
    shim._die_with_parent(None)
    line = shim._connect(name, key, "guard")
    fds = {1: 1, 2: 2}
    if "PMI_FD" in os.environ:
        fds[int(os.environ["PMI_FD"])] = int(os.environ["PMI_FD"])
    pid = fork_server.ask(
        os.environ.pop(ENV_FORK_SERVER),
        "testing.processes.forked:become_rank",
        arguments=[name, key, agent],
        env=os.environ,
        fds=fds,
    )
    try:
        rank = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(0)
    if "PMI_FD" in os.environ:
        os.close(int(os.environ["PMI_FD"]))
    poll = select.poll()
    poll.register(rank, select.POLLIN)
    poll.register(line.fileno(), select.POLLIN)
    poll.poll()  # ends with the rank or with the agent, whichever is first
    os._exit(0)


if __name__ == "__main__":
    main()
