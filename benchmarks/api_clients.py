"""The operator's client of the API server beside those of others: the hot path's cost per pod.

Each client works in a process of its own, in turns, on one control plane. `--lightkube` names an
interpreter that can import lightkube; without it, the report leaves that row out and notes that.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from typing import Final

from benchmarks.harness import Report, benchmark, interleave, middle
from benchmarks.jobs import SCRIPTS
from benchmarks.operator_cluster import running

NAMES: Final = {
    "own": "the operator's, on aiohttp and msgspec",
    "kubernetes": "kubernetes, CoreV1Api",
    "dynamic": "kubernetes, DynamicClient",
    "lightkube": "lightkube",
}
COLUMNS: Final = (
    *("create ms", "create cpu ms", "create, eight under way ms"),
    *("create, eight under way cpu ms", "list, per pod ms", "peak MiB"),
)
LIMIT_S: Final = 300.0


@benchmark(
    "Clients of the API server",
    ("client", *(column.replace(" ms", ", ms") for column in COLUMNS)),
    {
        "--pods": {"type": int, "default": 200},
        "--lightkube": {"metavar": "PYTHON", "default": "", "help": "that can import lightkube"},
    },
)
def run(out: Report) -> None:
    """Measure each client in turn."""
    pods = 3 if out.smoke else out.given.pods
    interpreters = dict.fromkeys(("own", "kubernetes", "dynamic"), sys.executable)
    if out.given.lightkube:
        interpreters["lightkube"] = out.given.lightkube
    else:
        out.notes.append("lightkube is left out: no --lightkube was given")
    with running.control_plane() as plane:

        def measure(name: str) -> dict[str, float]:
            with plane.namespace("clients") as namespace:
                words = [interpreters[name], str(SCRIPTS / "api_client.py"), name]
                words += [str(plane.kubeconfig), namespace, str(pods)]
                told: dict[str, float] = json.loads(subprocess.check_output(words, timeout=LIMIT_S))
                plane.api.delete(f"/api/v1/namespaces/{namespace}/pods?gracePeriodSeconds=0")
                return told

        found = interleave(out.rounds, {name: partial(measure, name) for name in interpreters})
    for name, rows in found.items():
        out.rows.append((NAMES[name], *(middle(row[column] for row in rows) for column in COLUMNS)))
    out.samples |= found
    out.notes.append(f"{pods} pods for each figure; etcd without fsync")
