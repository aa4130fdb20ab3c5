"""Run one client of the API server in a process of its own and print its figures as JSON.

`python api_client.py NAME KUBECONFIG NAMESPACE COUNT` creates COUNT pods one after the other,
creates COUNT more with eight requests in flight, and lists all of them as typed objects. The
program imports only the client's own package, so that its peak memory can be attributed to it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

UNDER_WAY = 8
Figures = dict[str, float]


def pod(name: str) -> dict[str, Any]:
    """Return the manifest of a pod that stays unscheduled, about as large as a worker's."""
    env = [{"name": f"VARIABLE_{n}", "value": "x" * 20} for n in range(30)]
    container = {"name": "trainer", "image": "none", "command": ["sleep", "1"], "env": env}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"made-for": "a-benchmark"}},
        "spec": {"containers": [container], "schedulerName": "nobody", "restartPolicy": "Never"},
    }


class Meter:
    """Wall time and CPU time per piece of work."""

    def __init__(self) -> None:
        self.found: Figures = {}

    def note(self, what: str, begun: tuple[float, float], pieces: int) -> None:
        """Record the times per piece since `begun`."""
        wall, cpu = time.perf_counter() - begun[0], time.process_time() - begun[1]
        self.found[f"{what} ms"] = 1000 * wall / pieces
        self.found[f"{what} cpu ms"] = 1000 * cpu / pieces


def now() -> tuple[float, float]:
    """Return wall time and CPU time."""
    return time.perf_counter(), time.process_time()


def blocking(
    create: Callable[[dict[str, Any]], Any], list_all: Callable[[], Iterable[Any]], count: int
) -> Figures:
    """Measure a blocking client and return its figures."""
    meter = Meter()
    create(pod("first"))
    begun = now()
    for number in range(count):
        create(pod(f"one-{number}"))
    meter.note("create", begun, count)
    begun = now()
    with ThreadPoolExecutor(UNDER_WAY) as pool:
        list(pool.map(create, [pod(f"eight-{number}") for number in range(count)]))
    meter.note("create, eight under way", begun, count)
    begun = now()
    found = sum(1 for _ in list_all())
    meter.note("list, per pod", begun, found)
    assert found == 2 * count + 1, found
    return meter.found


def typed(kubeconfig: str, namespace: str, count: int) -> Figures:
    """Measure kubernetes.client.CoreV1Api."""
    from kubernetes import client, config

    config.load_kube_config(kubeconfig)
    core = client.CoreV1Api()
    return blocking(
        partial(core.create_namespaced_pod, namespace),
        lambda: core.list_namespaced_pod(namespace).items,
        count,
    )


def dynamic(kubeconfig: str, namespace: str, count: int) -> Figures:
    """Measure kubernetes.dynamic.DynamicClient."""
    from kubernetes import client, config
    from kubernetes.dynamic import DynamicClient

    config.load_kube_config(kubeconfig)
    pods = DynamicClient(client.ApiClient()).resources.get(api_version="v1", kind="Pod")
    return blocking(
        lambda body: pods.create(body=body, namespace=namespace),
        lambda: pods.get(namespace=namespace).items,
        count,
    )


def lightkube(kubeconfig: str, namespace: str, count: int) -> Figures:
    """Measure lightkube's client."""
    from lightkube import Client, KubeConfig
    from lightkube.resources.core_v1 import Pod

    client = Client(KubeConfig.from_file(kubeconfig), namespace=namespace)
    return blocking(
        lambda body: client.create(Pod.from_dict(body)), lambda: client.list(Pod), count
    )


def own(kubeconfig: str, namespace: str, count: int) -> Figures:
    """Measure the operator's own client."""
    return asyncio.run(_own(kubeconfig, namespace, count))


async def _own(kubeconfig: str, namespace: str, count: int) -> Figures:
    import msgspec
    from paceline_api.access.access import access
    from paceline_operator.cluster.kube import Kube, path
    from paceline_operator.cluster.observe import Listed
    from paceline_operator.cluster.wire import PodObject
    from paceline_operator.metrics import OperatorMetrics

    meter, decoder = Meter(), msgspec.json.Decoder(Listed[PodObject])
    async with Kube(access(Path(kubeconfig)), OperatorMetrics()) as kube:
        create = partial(kube.create, "pods", namespace)
        await create(pod("first"))
        begun = now()
        for number in range(count):
            await create(pod(f"one-{number}"))
        meter.note("create", begun, count)

        begun, free = now(), asyncio.Semaphore(UNDER_WAY)

        async def one(body: dict[str, Any]) -> None:
            async with free:
                await create(body)

        await asyncio.gather(*(one(pod(f"eight-{number}")) for number in range(count)))
        meter.note("create, eight under way", begun, count)
        begun = now()
        async with kube.stream(path("pods", namespace), {}, silence_s=60.0) as answer:
            found = decoder.decode(await answer.read())
        meter.note("list, per pod", begun, len(found.items))
        assert len(found.items) == 2 * count + 1
    return meter.found


CLIENTS = {"own": own, "kubernetes": typed, "dynamic": dynamic, "lightkube": lightkube}


def main() -> None:
    """Measure the client that the command line names."""
    name, kubeconfig, namespace, count = sys.argv[1:]
    found = CLIENTS[name](kubeconfig, namespace, int(count))
    # VmHWM counts this program alone; getrusage() starts at its parent's memory.
    status = Path("/proc/self/status").read_text()
    found["peak MiB"] = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    os.write(1, json.dumps(found).encode() + b"\n")


if __name__ == "__main__":
    main()
