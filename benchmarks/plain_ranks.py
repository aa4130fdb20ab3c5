"""Ranks of a plain script on torch.distributed: forked from the process that has imported torch, as
Paceline's.

`run` is the life of the process above them. It ends them all if one fails.
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

from benchmarks.lab import SCRIPTS
from benchmarks.network import free_port


def run(order: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """What each of `ranks` processes of `script` has found, by rank: what it wrote to
    `rank-<number>.json`."""
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
