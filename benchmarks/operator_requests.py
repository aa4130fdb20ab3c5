"""Measure the operator's cost: requests, seconds and CPU per job, beside plain Indexed Jobs.

Each size has a control plane of its own. The request limits of the Job controller and the scheduler
are raised.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from benchmarks.harness import Report, benchmark
from benchmarks.operator_cluster import (
    JOBS,
    RAISED,
    Asked,
    Bench,
    Fleet,
    bench,
    first,
    gone,
    holds,
    indexed_job,
    pods_made,
    submit,
    until,
    until_quiet,
)
from testing.temporary import temporary_folder

SIZES: Final = ("1x8", "1x64", "100x8")
SMOKE: Final = ("1x2",)
READY_BAR: Final = 7
LIFE_BAR: Final = 12
CPU_BAR: Final = 1.5
REPLACED_BAR_S: Final = 0.2
SCALED_BAR_S: Final = 0.1
SCALED_WORKERS: Final = 8
"""Number of workers for which the bar on scaling holds; it is for 8 -> 12."""
PER_JOB_S: Final = 3.0
"""Time per job that a wait may take, beyond its fixed bound."""
COLUMNS: Final = (
    *("jobs x workers", "by", "all created s", "all ready s", "own requests/job"),
    *("CPU-s/job", "of it operator", "operator MiB"),
)


@dataclass
class Figures:
    """Figures of one size with one kind of object."""

    created_s: float = 0.0
    ready_s: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    life: Counter[tuple[str, str]] = field(default_factory=Counter)
    peak_mib: float = 0.0
    replaced_s: list[float] = field(default_factory=list)
    scaled_s: float = 0.0


def plain(b: Bench, jobs: int, workers: int) -> Figures:
    """Measure Indexed Jobs that are created directly: the lower bound."""
    with b.plane.namespace("plain") as namespace:
        b.begin()
        path = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        for number in range(jobs):
            b.plane.api.create(path, indexed_job(f"job-{number}", workers))
        requests = _all_ready(b, namespace, jobs * workers, jobs)
        begun_s = first(requests, namespace, "jobs")
        made_s, ready_s = max(pods_made(requests, namespace)), _last_ready(requests, namespace)
        cpu_s = b.spent_s(ready_s)
        cpu_s.pop("operator")
        figures = Figures(made_s - begun_s, ready_s - begun_s, cpu_s)
        b.plane.api.request("DELETE", f"{path}?propagationPolicy=Background")
        gone(b, namespace, _limit_s(jobs))
    return figures


def with_operator(b: Bench, jobs: int, workers: int) -> Figures:
    """Measure TrainingJobs from creation to removal, replacement and scaling included."""
    with (
        b.plane.namespace("training") as namespace,
        Fleet(b.plane, namespace, operator=b.own) as fleet,
    ):
        b.begin()
        for number in range(jobs):
            submit(b.plane, namespace, f"job-{number}", replicas=workers)
        requests = _all_ready(b, namespace, jobs * (workers + 1), jobs)
        begun_s = first(requests, namespace, "trainingjobs")
        _until_all(b, namespace, "RingReady", jobs)
        cpu_s = b.spent_s(_last_told(b, namespace))
        made = pods_made(requests, namespace)
        figures = Figures(max(made) - begun_s, _last_ready(requests, namespace) - begun_s, cpu_s)
        figures.requests = b.own_requests(namespace)
        quiet = b.own_requests(namespace)
        _reactions(b, namespace, workers, figures)
        extra = b.own_requests(namespace) - quiet
        for number in range(jobs):
            fleet.finish(f"job-{number}")
        _until_all(b, namespace, "Complete", jobs)
        gone(b, namespace, _limit_s(jobs), labels="paceline.dev/role=coordinator")
        # Replacing and scaling do not count here. With several jobs, count those of the others.
        if jobs == 1:
            figures.life = b.own_requests(namespace) - extra
        else:
            others = b.own_requests(namespace, but="job-0")
            figures.life = Counter({k: round(n * jobs / (jobs - 1)) for k, n in others.items()})
        figures.peak_mib = b.operator.memory_mib("VmHWM")
        assert fleet.wrong == [], fleet.wrong
    return figures


def _reactions(b: Bench, namespace: str, workers: int, figures: Figures) -> None:
    """Measure how soon deleted workers are replaced and a job is scaled.

    Both are times between two answers of the API server, without any time of the client.
    """
    pods, old = f"/api/v1/namespaces/{namespace}/pods", len(b.asked())
    for attempt in (1, 2, 3):
        name, next_one = f"job-0-1-{attempt}", f"job-0-1-{attempt + 1}"
        b.plane.api.delete(f"{pods}/{name}")
        until(partial(_created, b, old, next_one), f"{next_one} is made", 20)
        deleted_s = min(a.at_s for a in b.asked(since=old) if (a.verb, a.name) == ("delete", name))
        figures.replaced_s.append(_created(b, old, next_one) - deleted_s)
        _ready(b, namespace, workers)
    more = workers + max(1, workers // 2)
    b.plane.api.patch(f"{JOBS.format(namespace)}/job-0", {"spec": {"replicas": more}})
    _ready(b, namespace, more)
    asked = b.asked(since=old)
    patched_s = min(a.at_s for a in asked if (a.verb, a.kind) == ("patch", "trainingjobs"))
    new = [a.at_s for a in asked if (a.verb, a.kind) == ("create", "pods") and a.at_s > patched_s]
    assert len(new) == more - workers, new
    figures.scaled_s = max(new) - patched_s
    b.plane.api.patch(f"{JOBS.format(namespace)}/job-0", {"spec": {"replicas": workers}})
    _ready(b, namespace, workers)
    # The operator removes pods that have left only after the job is ready again.
    until_quiet(lambda: b.own_requests(namespace).total(), 3.0, 120)


def _ready(b: Bench, namespace: str, workers: int) -> None:
    """Wait until job-0 has `workers` ready workers and the operator is idle."""
    path = f"{JOBS.format(namespace)}/job-0"
    wanted = f"{workers}/{workers}"
    until(lambda: b.plane.api.get(path)["status"].get("ready") == wanted, f"ready {wanted}", 60)
    time.sleep(0.5)  # let the operator become idle before the next step


def _created(b: Bench, old: int, name: str) -> float:
    """Return when a pod was created, or 0 if it has not been created."""
    requests = b.asked(since=old)
    return next((a.at_s for a in requests if a.verb == "create" and a.name == name), 0.0)


def _all_ready(b: Bench, namespace: str, pods: int, jobs: int) -> list[Asked]:
    """Wait until the fake kubelets have reported all pods as ready, by the audit log alone.

    Returns:
        The requests so far.
    """
    requests: list[Asked] = []

    def ready() -> bool:
        time.sleep(0.2)
        requests[:] = b.asked()
        return len(_reports(requests, namespace)) >= pods

    until(ready, f"{pods} pods are ready", _limit_s(jobs) + pods / 20)
    return requests


def _reports(requests: list[Asked], namespace: str) -> list[float]:
    """Return when the fake kubelets first reported each pod as ready."""
    first_s: dict[str, float] = {}
    for a in requests:
        mine = a.user == "fake-kubelet" and a.kind == "pods/status" and a.namespace == namespace
        if mine and a.verb == "patch" and a.code == 200:
            first_s.setdefault(a.name, a.at_s)
    return list(first_s.values())


def _last_ready(requests: list[Asked], namespace: str) -> float:
    return max(_reports(requests, namespace))


def _until_all(b: Bench, namespace: str, kind: str, jobs: int) -> None:
    """Wait until all jobs have a condition."""

    def done() -> bool:
        time.sleep(1.0)  # a request costs CPU time that is counted
        items = b.plane.api.items(JOBS.format(namespace))
        return all(holds({"status": {}, **item}, kind) for item in items)

    until(done, f"all are {kind}", _limit_s(jobs))


def _last_told(b: Bench, namespace: str) -> float:
    """Return when the operator last wrote a status."""
    mine = (a for a in b.asked() if a.user == b.operator.user and a.namespace == namespace)
    return max(a.at_s for a in mine if (a.verb, a.kind) == ("patch", "trainingjobs/status"))


def _limit_s(jobs: int) -> float:
    return 120.0 + PER_JOB_S * jobs


def rows(out: Report, size: str, floor: Figures, ours: Figures, jobs: int, workers: int) -> None:
    """Add the rows, bars, checks and details of one size to the report."""
    spent, base = sum(ours.cpu_s.values()), sum(floor.cpu_s.values())
    ready = ours.requests.total() / jobs
    life = ours.life.total() / jobs
    out.rows.append(
        (size, "Indexed Job", floor.created_s, floor.ready_s, "-", base / jobs, "-", "-")
    )
    out.rows.append(
        (
            size,
            "TrainingJob",
            ours.created_s,
            ours.ready_s,
            f"{ready:.1f} to RingReady, {life:.1f} in all",
            spent / jobs,
            ours.cpu_s["operator"] / jobs,
            ours.peak_mib,
        )
    )
    out.at_most(f"{size}: own requests/job to RingReady", ready, workers + READY_BAR)
    out.at_most(f"{size}: own requests/job in all", life, workers + LIFE_BAR)
    out.at_most(f"{size}: CPU-seconds beside Indexed Jobs", spent / base, CPU_BAR)
    if ours.replaced_s:
        worst = max(ours.replaced_s)
        what = f"{size}: deleted worker to its replacement, s, worst of 3"
        out.at_most(what, worst, REPLACED_BAR_S)
        what = f"{size}: scale by half to the last new pod, s"
        if workers == SCALED_WORKERS:
            out.at_most(what, ours.scaled_s, SCALED_BAR_S)
        else:
            out.notes.append(f"{what}: {ours.scaled_s:.2f}")
        out.samples[f"{size}: replaced_s"] = ours.replaced_s
    out.checks[f"{size}: requests within their bars"] = (
        ready <= workers + READY_BAR and life <= workers + LIFE_BAR
    )
    out.checks[f"{size}: one creation per worker"] = ours.requests["create", "pods"] == jobs * (
        workers + 1
    )
    out.samples[f"{size}: cpu_s"] = {"TrainingJob": ours.cpu_s, "Indexed Job": floor.cpu_s}
    out.samples[f"{size}: requests"] = {
        f"{verb} {kind}": count for (verb, kind), count in sorted(ours.life.items())
    }
    listed = ", ".join(f"{v} {k} {n / jobs:.2g}" for (v, k), n in sorted(ours.life.items()))
    out.notes.append(f"{size}, requests/job in all: {listed}")


@benchmark(
    "The operator's requests",
    COLUMNS,
    {"--sizes": {"nargs": "+", "default": SIZES, "metavar": "JOBSxWORKERS"}},
)
def run(out: Report) -> None:
    """Measure all sizes."""
    for size in SMOKE if out.smoke else out.given.sizes:
        jobs, workers = (int(part) for part in size.split("x"))
        with temporary_folder() as folder, bench(folder / "operator.log") as b:
            floor = plain(b, jobs, workers)
            ours = with_operator(b, jobs, workers)
        rows(out, size, floor, ours, jobs, workers)
        sys.stderr.write(f"{size} done\n")
    out.notes.append(
        f"request limits of Job controller and scheduler: {RAISED.qps}/s, bursts of "
        f"{RAISED.burst}; etcd without fsync; nodes and coordinators are stand-ins whose CPU is "
        "not counted; counted are etcd, API server, controller manager, scheduler and operator"
    )
