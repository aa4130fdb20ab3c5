"""The operator's client of the API server beside those of others: the hot path's cost per pod.

`python -m benchmarks.api_clients [--pods 200] [--rounds 3] [--lightkube PYTHON]`. Each client works
in a process of its own, in turns, on one control plane. `--lightkube` names an interpreter that can
import lightkube; without it, the report leaves that row out and notes that.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Final

from benchmarks.operator_cluster import running
from benchmarks.report import Report, middle

RESULTS: Final = Path(__file__).parent / "results"
SCRIPT: Final = Path(__file__).parent / "scripts" / "api_client.py"
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


def run(pods: int, rounds: int, interpreters: dict[str, str], *, smoke: bool) -> Report:
    """Measure each client in turn and return the report; `interpreters` maps client to Python."""
    columns = ("client", *(c.replace(" ms", ", ms") for c in COLUMNS))
    out = Report("api_clients", "Clients of the API server", columns, smoke=smoke)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in interpreters}
    with running.control_plane() as plane:
        for _ in range(rounds):
            for name, python in interpreters.items():
                with plane.namespace("clients") as namespace:
                    words = [python, str(SCRIPT), name, str(plane.kubeconfig), namespace, str(pods)]
                    told = subprocess.check_output(words, timeout=LIMIT_S)
                    found[name].append(json.loads(told))
                    path = f"/api/v1/namespaces/{namespace}/pods?gracePeriodSeconds=0"
                    plane.api.delete(path)
    for name, rows in found.items():
        out.rows.append((NAMES[name], *(middle(row[column] for row in rows) for column in COLUMNS)))
    out.details = dict(found)
    out.notes.append(f"{pods} pods for each figure, {rounds} rounds in turns; etcd without fsync")
    if "lightkube" not in interpreters:
        out.notes.append("lightkube is left out: no --lightkube was given")
    return out


def main() -> int:
    """Run the benchmark from the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pods", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lightkube", metavar="PYTHON", default="")
    parser.add_argument("--smoke", action="store_true", help="smallest size")
    parser.add_argument("--out", type=Path, default=None, help="folder of the result files")
    given = parser.parse_args()
    interpreters = dict.fromkeys(("own", "kubernetes", "dynamic"), sys.executable)
    if given.lightkube:
        interpreters["lightkube"] = given.lightkube
    pods, rounds = (3, 1) if given.smoke else (given.pods, given.rounds)
    report = run(pods, rounds, interpreters, smoke=given.smoke)
    return report.publish(given.out or (None if given.smoke else RESULTS))


if __name__ == "__main__":
    sys.exit(main())
