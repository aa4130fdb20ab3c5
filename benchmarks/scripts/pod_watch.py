"""Follow the pods of jobs in one way, in a process of its own, and answer with figures as JSON.

`python pod_watch.py WAY KUBECONFIG PODS` begins to follow the pods and prints the first answer when
it knows PODS of them. Each line on stdin then asks for one more answer: `figures`, `clear` before
events that are to be timed, and `relist N` before a list of N pods that is to be timed.

    own    the operator's watch of pods, which feeds its store
    event  kopf's event handler, which feeds the same store
    index  kopf's index, which holds the pods, and an event handler that starts decisions

All ways keep the same fields of a pod, and let the API server select by the operator's label.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import kopf
import msgspec
from paceline_api.access.access import access
from paceline_api.names import DEFAULT_MANAGER, LABEL_MANAGER, manager_label
from paceline_operator.cluster.kube import Kube
from paceline_operator.cluster.observe import Watch, pod_source
from paceline_operator.cluster.store import Store
from paceline_operator.cluster.wire import PodObject, pod_of
from paceline_operator.handlers import JobsWatch, make_settings
from paceline_operator.metrics import OperatorMetrics

SENT: Final = "paceline.dev/sent"
"""Annotation with the time at which a change was sent."""


class Meter:
    """What has been seen so far, and when a list was complete."""

    def __init__(self, target: int) -> None:
        self.known: Callable[[], int] = lambda: 0
        """Returns the number of pods that are known now."""
        self.latencies_s: list[float] = []
        self.listed = asyncio.Event()
        self._begun = time.time(), time.process_time()
        self._base_mib = memory_mib("VmRSS")
        self.relist(target)

    def relist(self, target: int) -> None:
        """Expect a list of `target` pods."""
        self._target, self._listed, self.listed_s = target, 0, 0.0

    def list_item(self, count: int = 1) -> None:
        """Record `count` pods of a list that have been stored."""
        self._listed += count
        if not self.listed_s and self._listed >= self._target:
            self.listed_s = time.time()
            self.listed.set()

    def change(self, annotations: Mapping[str, str] | None) -> None:
        """Record that a change of a pod has been stored."""
        if sent := (annotations or {}).get(SENT):
            self.latencies_s.append(time.time() - float(sent))

    def figures(self) -> dict[str, Any]:
        """Return all figures; times since the process began to follow the pods."""
        return {
            "begun_s": self._begun[0],
            "cpu_s": time.process_time() - self._begun[1],
            "listed_s": self.listed_s,
            "known": self.known(),
            "mib": memory_mib("VmRSS") - self._base_mib,
            "peak_mib": memory_mib("VmHWM") - self._base_mib,
            "latencies_s": self.latencies_s,
        }


def memory_mib(figure: str) -> float:
    """Return a memory figure of this process from /proc."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{figure}:")[2].split()[0]) / 1024


def nothing(_: object) -> None:
    """Take the place of the operator's decisions."""


async def own(kubeconfig: Path, meter: Meter) -> None:
    """Follow the pods by the operator's own watch."""
    store, metrics = Store(nothing), OperatorMetrics()
    meter.known = store.pod_count
    source = pod_source(store, time.time, "")
    put, listed = source.put, source.listed

    def put_and_note(item: PodObject) -> None:
        put(item)
        meter.change(item.metadata.annotations)

    def listed_and_note(items: list[PodObject]) -> None:
        listed(items)
        meter.list_item(len(items))

    source.put, source.listed = put_and_note, listed_and_note
    async with Kube(access(kubeconfig), metrics) as kube:
        await Watch(kube, source, time.time, metrics).run()


async def event(kubeconfig: Path, meter: Meter) -> None:
    """Follow the pods by kopf's event handler."""
    store, registry = Store(nothing), kopf.OperatorRegistry()
    meter.known = store.pod_count

    @kopf.on.event("", "v1", "pods", registry=registry)
    async def on_event(type: str | None, body: kopf.Body, **_: Any) -> None:  # noqa: A002
        entry = pod_of(msgspec.convert(dict(body), PodObject), time.time())
        assert entry is not None
        namespace, job, pod = entry
        if type == "DELETED":
            store.drop_pod((namespace, job), pod.name, pod.uid)
        else:
            store.put_pod((namespace, job), pod)
        note(meter, type, body)

    await by_kopf(kubeconfig, registry)


async def index(kubeconfig: Path, meter: Meter) -> None:
    """Follow the pods by kopf's index."""
    registry = kopf.OperatorRegistry()

    @kopf.index("", "v1", "pods", id="pods", registry=registry)
    async def pods(body: kopf.Body, **_: Any) -> Any:
        entry = pod_of(msgspec.convert(dict(body), PodObject), time.time())
        assert entry is not None
        return {entry[:2]: entry[2]}

    @kopf.on.event("", "v1", "pods", registry=registry)
    async def on_event(type: str | None, body: kopf.Body, **more: Any) -> None:  # noqa: A002
        meter.known = lambda: sum(len(of_job) for of_job in more["pods"].values())
        note(meter, type, body)

    await by_kopf(kubeconfig, registry)


def note(meter: Meter, what: str | None, body: kopf.Body) -> None:
    """Record an event of kopf."""
    if what is None:
        meter.list_item()
    elif what != "DELETED":
        meter.change(body["metadata"].get("annotations"))


async def by_kopf(kubeconfig: Path, registry: kopf.OperatorRegistry) -> None:
    """Run kopf with the operator's settings and session, and a label selector."""
    watch = JobsWatch(access(kubeconfig), time.monotonic)

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        return await watch.let_in()

    settings = make_settings()
    selector = f"{LABEL_MANAGER}={manager_label(DEFAULT_MANAGER)}"
    settings.watching.label_selectors["", "v1", "pods"] = selector
    await kopf.operator(registry=registry, settings=settings, standalone=True, clusterwide=True)


async def answers(meter: Meter) -> None:
    """Answer each line on stdin, after a first answer for the first list."""
    loop = asyncio.get_running_loop()
    await meter.listed.wait()
    while True:
        sys.stdout.write(json.dumps(meter.figures()) + "\n")
        sys.stdout.flush()
        line = await loop.run_in_executor(None, sys.stdin.readline)
        if not line:
            return
        what, _, count = line.strip().partition(" ")
        if what == "clear":
            meter.latencies_s.clear()
        elif what == "relist":
            meter.relist(int(count))


WAYS = {"own": own, "event": event, "index": index}


async def main() -> None:
    """Follow the pods until stdin ends."""
    way, kubeconfig, pods = sys.argv[1:]
    logging.basicConfig(level=logging.WARNING)
    meter = Meter(int(pods))
    following = asyncio.create_task(WAYS[way](Path(kubeconfig), meter))
    answering = asyncio.create_task(answers(meter))
    done, _ = await asyncio.wait([following, answering], return_when=asyncio.FIRST_COMPLETED)
    if following in done:
        following.result()
        sys.exit("the pods are no longer followed")
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


asyncio.run(main())
