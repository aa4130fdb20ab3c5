"""The process that mpiexec starts as a rank: it has the rank forked by a fork server.

Run by path with `python -I -S`. The arguments are the name of the fork server, then those of
`rank_main`. It passes on its environment and PMI's connection, and ends with the rank, as if it
were the rank.
"""

from __future__ import annotations

import importlib.util
import os
import select
import sys
from pathlib import Path

START_S = 200.0
"""Longest wait for the fork server, which may still be importing torch on a busy machine."""
FORK_SERVER = Path(__file__).parents[2] / "testing/processes/fork_server.py"


def main() -> None:
    spec = importlib.util.spec_from_file_location("fork_server", FORK_SERVER)
    assert spec is not None
    assert spec.loader is not None
    fork_server = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fork_server)
    told_read, told_write = os.pipe()
    pmi = int(os.environ["PMI_FD"])
    name, *words = sys.argv[1:]
    keeper = os.pidfd_open(
        fork_server.ask(
            *(name, "testing.processes.keeper:keep"),
            arguments=["tests.transport.rank_main:main", words],
            env=os.environ,
            limit_s=START_S,
            fds={1: 1, 2: 2, 3: told_write, pmi: pmi},
        )
    )
    os.close(told_write)
    os.close(pmi)
    select.select([keeper], [], [])
    os.close(told_read)


if __name__ == "__main__":
    main()
