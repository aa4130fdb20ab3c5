"""Measure the memory of the operator's process while many jobs train.

It adds jobs of 8 workers to one operator until there are `--jobs`. The operator is the program as
it is delivered, with its watches, its Lease and a TLS connection to every coordinator. The API
server and the coordinators are stand-ins in this process (testing/fake_cluster/loopback.py,
stub.py), since real ones need more of the machine than is measured here. The stand-ins keep track
of field owners, which make up most of an object's text.
"""

from __future__ import annotations

import gc
import http.client
import re
import sys
import time
from contextlib import closing
from typing import Final

from benchmarks.harness import Report, benchmark
from testing.fake_cluster.beside import OPERATOR, Running, submit, until
from testing.fake_cluster.loopback import Loopback
from testing.fake_cluster.stub import Fleet
from testing.temporary import temporary_folder

JOBS: Final = (100, 300, 1000)
SMOKE: Final = (2, 4)
WORKERS: Final = 8
NAMESPACE: Final = "training"
OWN: Final = "paceline-system"
BAR_MIB: Final = 250
BAR_JOBS: Final = 1000
STEADY_S: Final = 60
"""Time for which all jobs train before figures are taken; each status has been written once by
then."""
SMOKE_S: Final = 2
ROUND_S: Final = 1.0
LEASE_S: Final = 60
"""Duration of the operator's Lease; it is long because the stand-ins may answer slowly."""
PER_JOB_S: Final = 2.0
"""Time per job that the wait may take, beyond a minute."""
LOG_SHOWN: Final = 5000
"""Characters of the operator's log that are shown after an error."""


@benchmark(
    "The operator's memory",
    (
        *("jobs", "pods", "TLS connections", "MiB", "MiB at most", "KiB per further job"),
        *("all train after s", "cores while they train"),
    ),
    {"--jobs": {"nargs": "+", "type": int, "default": JOBS, "help": "rising numbers"}},
)
def run(out: Report) -> None:
    """Measure the operator with each number of jobs."""
    gc.disable()  # a full collection would stop the stand-ins for seconds
    with temporary_folder() as folder, Loopback(folder) as plane:
        operator = Running(plane, OWN, folder / "operator.log")
        try:
            operator.started(f"--lease-duration={LEASE_S}", program=OPERATOR)
            time.sleep(SMOKE_S)
            before = (0, operator.memory_mib())
            out.rows.append((0, 0, 0, before[1], operator.memory_mib("VmHWM"), "-", "-", "-"))
            with Fleet(plane, NAMESPACE, operator=OWN) as fleet:
                for jobs in SMOKE if out.smoke else out.given.jobs:
                    before = _grow(out, plane, operator, fleet, before, jobs)
                out.checks["no coordinator was told less than there was"] = not fleet.wrong
        except BaseException:
            sys.stderr.write(operator.log.read_text()[-LOG_SHOWN:])
            raise
        finally:
            operator.end()


def _grow(
    out: Report,
    plane: Loopback,
    operator: Running,
    fleet: Fleet,
    before: tuple[int, float],
    jobs: int,
) -> tuple[int, float]:
    """Add jobs until there are `jobs` of them, measure the operator, and add a row."""
    had, had_mib = before
    begun_s = time.monotonic()
    for number in range(had, jobs):
        submit(plane, NAMESPACE, f"job-{number}", replicas=WORKERS)

    def all_train() -> bool:
        time.sleep(0.5)
        return _figures(operator)["training"] >= jobs

    until(all_train, f"{jobs} jobs train", 60 + PER_JOB_S * jobs)
    took_s = time.monotonic() - begun_s
    spent_s, since_s = operator.cpu_seconds(), time.monotonic()
    while time.monotonic() - since_s < (SMOKE_S if out.smoke else STEADY_S):
        fleet.train()
        time.sleep(ROUND_S)
    cores = (operator.cpu_seconds() - spent_s) / (time.monotonic() - since_s)
    figures, mib = _figures(operator), operator.memory_mib()
    connected = int(figures["connected"])
    per_job = (mib - had_mib) * 1024 / (jobs - had)
    highest = operator.memory_mib("VmHWM")
    pods = int(figures["pods"])
    out.rows.append((jobs, pods, connected, mib, highest, per_job, took_s, cores))
    out.checks[f"{jobs} jobs: a connection to each coordinator"] = connected == jobs
    out.checks[f"{jobs} jobs: all pods are known"] = pods == jobs * (WORKERS + 1)
    if jobs == BAR_JOBS:
        text = f"MiB at most with {jobs} jobs of {WORKERS} workers"
        out.at_most(text, highest, BAR_MIB)
    return jobs, mib


def _figures(operator: Running) -> dict[str, float]:
    """Return the operator's own counts from its /metrics."""
    with closing(http.client.HTTPConnection("127.0.0.1", operator.port, timeout=30)) as asked:
        asked.request("GET", "/metrics")
        page = asked.getresponse().read().decode()
    lines = {
        "training": 'paceline_operator_jobs_in_state{state="Training"}',
        "connected": "paceline_operator_coordinators_connected",
        "pods": "paceline_operator_pods",
    }
    matches = {
        name: re.search(rf"^{re.escape(line)} (\S+)$", page, re.M) for name, line in lines.items()
    }
    return {name: float(hit[1]) if hit else 0.0 for name, hit in matches.items()}
