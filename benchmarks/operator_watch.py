"""The operator's watch of pods beside kopf's event handlers and kopf's index.

The pods of `--jobs` jobs of 8 workers are created on a real API server, with the manifests that the
operator sends and without kubelets. Each way then follows them in a process of its own, in turns:
it lists them, hears of changes, loses its connection, and loses its history, because the API server
was restarted, while the pods of one job were deleted. CPU-seconds are those of its process; they
are taken when it has been idle for SETTLE_S, so that what ends later counts as well.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final

from paceline_api.access.access import access
from paceline_operator.cluster.kube import Kube, path, pause
from paceline_operator.core.job import JobObject, read_job
from paceline_operator.core.pods import children
from paceline_operator.metrics import OperatorMetrics

from benchmarks.harness import Report, benchmark, interleave, middle, share
from benchmarks.jobs import SCRIPTS
from benchmarks.operator_cluster import running
from testing.cluster.control_plane import (
    API_SERVER,
    CONTROLLER_MANAGER,
    SCHEDULER,
    ControlPlane,
)
from testing.fake_cluster.parts import job_body
from testing.fake_cluster.proxy import Proxy

NAMES: Final = {
    "own": "the operator's watch",
    "event": "kopf's event handler",
    "index": "kopf's index and event handler",
}
COLUMNS: Final = (
    *("pods", "followed by", "listed after s", "CPU-s to list", "MiB", "MiB at most"),
    *("CPU-s per 1,000 events", "an event, ms", "99 %, ms", "the next event after a cut, ms"),
    *("listed again after s", "CPU-s to list again", "deleted pods still known"),
)
WORKERS: Final = 8
JOBS: Final = (250, 1000)
SMOKE: Final = (2,)
UNDER_WAY: Final = 16
EVENTS: Final = 1000
PACED: Final = 200
PACE_S: Final = 0.02
"""Time between two of the changes whose latency is measured."""
SETTLE_S: Final = 7.0
"""Longer than kopf keeps a task for an object that rests, which is 5 s."""
LIMIT_S: Final = 180.0
SENT: Final = "paceline.dev/sent"
MERGE: Final = "application/merge-patch+json"


class Side:
    """One way to follow the pods, in a process of its own."""

    def __init__(self, way: str, kubeconfig: Path, pods: int, log: Path) -> None:
        words = [sys.executable, str(SCRIPTS / "pod_watch.py"), way, str(kubeconfig), str(pods)]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def read(self) -> dict[str, Any]:
        """Return the next answer; raise TimeoutError if there is none within LIMIT_S."""
        assert self._process.stdout is not None
        too_late = threading.Timer(LIMIT_S, self._process.kill)
        too_late.start()
        try:
            line = self._process.stdout.readline()
        finally:
            too_late.cancel()
        if not line and self._process.wait() == -signal.SIGKILL:
            raise TimeoutError(f"no answer within {LIMIT_S:g} s")
        assert line, f"the process ended with exit code {self._process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, what: str = "figures") -> dict[str, Any]:
        """Send a request and return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self.read()

    def until(self, check: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Ask until an answer passes `check`, and return it; raise TimeoutError after LIMIT_S."""
        until_s = time.monotonic() + LIMIT_S
        while not check(answer := self.ask()):
            if time.monotonic() > until_s:
                raise TimeoutError(f"{what}: not within {LIMIT_S:g} s")
            time.sleep(0.25)
        return answer


class Pods:
    """The pods of the jobs, created and changed as the operator's user."""

    def __init__(self, plane: ControlPlane, namespace: str, jobs: int) -> None:
        self._plane, self._namespace, self._jobs = plane, namespace, jobs
        self.names: list[str] = [
            self._manifest(number, slot)["metadata"]["name"]
            for number in range(jobs)
            for slot in range(WORKERS)
        ]

    def create(self, jobs: Iterable[int]) -> None:
        """Create the pods of these jobs."""
        asyncio.run(self._each(self._create, [(n, s) for n in jobs for s in range(WORKERS)]))

    def delete_first(self) -> None:
        """Delete the pods of the first job."""
        for name in self.names[:WORKERS]:
            self._plane.api.delete(f"{self._path(name)}?gracePeriodSeconds=0")

    def change(self, count: int) -> None:
        """Change `count` pods, several at a time, as fast as the API server takes it."""
        chosen = [self.names[number % len(self.names)] for number in range(count)]
        asyncio.run(self._each(self._change, chosen))

    def change_in_turn(self, count: int) -> None:
        """Change `count` pods one after the other, at an even pace."""
        chosen = [self.names[-1 - number % len(self.names)] for number in range(count)]
        asyncio.run(self._each(self._change, chosen, pace_s=PACE_S))

    def _path(self, name: str) -> str:
        return path("pods", self._namespace, name)

    async def _each(
        self,
        what: Callable[[Kube, Any], Awaitable[object]],
        of: Iterable[Any],
        *,
        pace_s: float = 0.0,
    ) -> None:
        """Call `what` for each item: one after the other with a pace, else several at a time."""
        free = asyncio.Semaphore(1 if pace_s else UNDER_WAY)

        async def one(kube: Kube, item: Any) -> None:
            async with free:
                await what(kube, item)
                await pause(pace_s)

        async with Kube(access(self._plane.kubeconfig), OperatorMetrics()) as kube:
            await asyncio.gather(*(one(kube, item) for item in of))

    async def _create(self, kube: Kube, place: tuple[int, int]) -> None:
        await kube.create("pods", self._namespace, self._manifest(*place))

    def _manifest(self, number: int, slot: int) -> dict[str, Any]:
        return children.worker(_job(self._namespace, number), slot, 1, key_id="key")

    async def _change(self, kube: Kube, name: str) -> None:
        body = {"metadata": {"annotations": {SENT: repr(time.time())}}}
        await kube.request("PATCH", self._path(name), body=body, content=MERGE)


def _job(namespace: str, number: int) -> JobObject:
    trainer = {"name": "trainer", "image": "trainer:1", "command": ["python3", "train.py"]}
    # No scheduler of this name works, so the pods stay as they are.
    template = {"spec": {"schedulerName": "nobody", "containers": [trainer]}}
    body = job_body(f"job-{number}", replicas=WORKERS, template=template)
    body["metadata"] |= {"namespace": namespace, "uid": f"{number:08x}-0000-4000-8000-000000000000"}
    return read_job(body)


def follow(way: str, plane: ControlPlane, pods: Pods, *, smoke: bool) -> dict[str, Any]:
    """Measure one way once; what it does not do within LIMIT_S is left out of the figures.

    Args:
        way: Key of NAMES.
        plane: Control plane with the pods.
        pods: The pods, which are all there again afterwards.
        smoke: True for few events.

    Returns:
        Figures by their names.
    """
    figures: dict[str, Any] = {}
    log = plane.folder / "logs" / f"{way}.log"
    with (
        Proxy(plane.url) as proxy,
        Side(way, proxy.kubeconfig(plane.kubeconfig), len(pods.names), log) as side,
    ):
        try:
            _measure(side, plane, proxy, pods, figures, smoke=smoke)
        except TimeoutError as late:
            figures["late"] = str(late)
    sys.stderr.write(f"{way}: { ({k: v for k, v in figures.items() if k != 'latencies_s'}) }\n")
    return figures


def _measure(
    side: Side,
    plane: ControlPlane,
    proxy: Proxy,
    pods: Pods,
    figures: dict[str, Any],
    *,
    smoke: bool,
) -> None:
    events, paced = (10, 10) if smoke else (EVENTS, PACED)
    total = len(pods.names)
    first = side.read()
    figures["listed_s"] = first["listed_s"] - first["begun_s"]
    time.sleep(SETTLE_S)
    listed = side.ask("clear")
    figures["list_cpu_s"], figures["mib"] = listed["cpu_s"], listed["mib"]
    assert listed["known"] == total, listed

    pods.change_in_turn(paced)
    answer = side.until(lambda a: len(a["latencies_s"]) >= paced, "the changes in turn")
    figures["latencies_s"] = answer["latencies_s"]
    side.ask("clear")
    pods.change(events)
    side.until(lambda a: len(a["latencies_s"]) >= events, "all changes")
    time.sleep(SETTLE_S)
    after = side.ask("clear")
    figures["event_cpu_s"] = (after["cpu_s"] - listed["cpu_s"]) * 1000 / (paced + events)

    proxy.cut()
    pods.change(1)
    answer = side.until(lambda a: bool(a["latencies_s"]), "a change after the cut")
    figures["cut_s"] = answer["latencies_s"][0]

    proxy.stall()
    pods.delete_first()
    try:
        plane.programs[API_SERVER].stop()
        plane.programs[API_SERVER].start()
        plane.wait_ready()
        before = side.ask(f"relist {total - WORKERS}")
        begun_s = time.time()
        proxy.cut()
        answer = side.until(lambda a: bool(a["listed_s"]), "a new list")
        figures["relisted_s"] = answer["listed_s"] - begun_s
        time.sleep(SETTLE_S)
        after = side.ask()
        figures["relist_cpu_s"] = after["cpu_s"] - before["cpu_s"]
        figures["stale"] = after["known"] - (total - WORKERS)
        figures["peak_mib"] = after["peak_mib"]
    finally:
        pods.create([0])


@benchmark(
    "Ways to follow pods",
    COLUMNS,
    {
        "--jobs": {
            "nargs": "+",
            "type": int,
            "default": JOBS,
            "help": f"numbers of jobs of {WORKERS} workers",
        }
    },
)
def run(out: Report) -> None:
    """Measure each way in turn, for each number of jobs on a control plane of its own."""
    for jobs in SMOKE if out.smoke else out.given.jobs:
        with running.control_plane() as plane, plane.namespace("jobs") as namespace:
            # Their own watches of the pods would use the processors, too.
            for name in (SCHEDULER, CONTROLLER_MANAGER):
                plane.programs[name].stop()
            pods = Pods(plane, namespace, jobs)
            begun_s = time.monotonic()
            pods.create(range(jobs))
            sys.stderr.write(f"{len(pods.names)} pods after {time.monotonic() - begun_s:.0f} s\n")
            sides = {way: partial(follow, way, plane, pods, smoke=out.smoke) for way in NAMES}
            by_way = interleave(out.rounds, sides)
        out.rows += [_row(len(pods.names), way, rounds) for way, rounds in by_way.items()]
        out.samples |= {f"{len(pods.names)} pods, {way}": each for way, each in by_way.items()}
        stale = [each["stale"] for each in by_way["own"]]
        text = f"{len(pods.names)} pods: the operator's watch forgets what was deleted meanwhile"
        out.checks[text] = not any(stale)
    out.notes.append(
        "MiB above the process before it begins, 7 s after the list and at most in all; times of "
        "events from before the request that causes them; a dash: not measured, since something "
        f"before it took longer than {LIMIT_S:g} s; etcd without fsync, pods without status, since "
        "there are no kubelets"
    )


def _row(pods: int, way: str, rounds: list[dict[str, Any]]) -> tuple[Any, ...]:
    paced = [value * 1000 for each in rounds for value in each.get("latencies_s", ())]

    def median(name: str, factor: float = 1.0) -> float | str:
        known = [each[name] * factor for each in rounds if name in each]
        return float(middle(known)) if known else "-"

    return (
        *(f"{pods:,}", NAMES[way]),
        median("listed_s") if "listed_s" in rounds[0] else f"> {LIMIT_S:g}",
        *(median("list_cpu_s"), median("mib"), median("peak_mib"), median("event_cpu_s")),
        *((middle(paced), share(paced, 0.99)) if paced else ("-", "-")),
        *(median("cut_s", 1000), median("relisted_s"), median("relist_cpu_s")),
        str(max(each["stale"] for each in rounds)) if "stale" in rounds[0] else "-",
    )
