"""Fork ranks of a plain torch.distributed script from a process that has imported torch.

Paceline's ranks in the benchmarks are forked in the same way. `run` executes in the parent process
of the ranks and kills them all if one fails.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from benchmarks.jobs import SCRIPTS
from benchmarks.network import free_port


def run(order: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Run a script on several ranks and return what each rank wrote to `rank-<number>.json`.

    Args:
        order: `script` (file name in `benchmarks/scripts`), `ranks` (world size), and the script's
            own configuration.
        folder: Working folder of the ranks.

    Returns:
        One result per rank, ordered by rank.

    Raises:
        RuntimeError: A rank ended with an exit code other than 0.
    """
    port, size = free_port(), int(order["ranks"])
    ranks = [_fork(order, rank, size, port) for rank in range(size)]
    living = set(ranks)
    try:
        while living:
            pid, status = os.waitpid(-1, 0)
            living.discard(pid)
            if status:
                raise RuntimeError(
                    f"a rank of {order['script']} ended with {os.waitstatus_to_exitcode(status)}"
                )
    finally:
        for pid in living:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]


def _fork(order: dict[str, Any], rank: int, size: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {
        "BENCHMARK": json.dumps(order),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    status = 1
    try:
        runpy.run_path(str(SCRIPTS / order["script"]), run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
