"""A HorizontalPodAutoscaler sets the size of a job with the sample of examples/autoscaling.

Kubernetes' own controller decides. It reads a stand-in for prometheus-adapter, which is registered
with the API server as one.
"""

from __future__ import annotations

import base64
import json
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import yaml

from testing.cluster.control_plane import ControlPlane
from testing.fake_cluster.beside import ROOT, Running, change, job, submit, until
from testing.fake_cluster.stub import Fleet

pytestmark = pytest.mark.processes

SAMPLES = ROOT / "examples/autoscaling"
HPA = yaml.safe_load((SAMPLES / "hpa.yaml").read_text())
METRIC = HPA["spec"]["metrics"][0]["external"]["metric"]["name"]
GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
APIS = "/apis/apiregistration.k8s.io/v1/apiservices"
NAME = f"{VERSION}.{GROUP}"
SCALED_S = 90.0


class Adapter:
    """External metrics of one job whose speed is proportional to its training workers."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self._plane, self._namespace = plane, namespace
        self.samples_per_worker: float | None = 500.0
        """Samples per second of each worker; None if nothing is known."""
        self.asked: list[str] = []
        adapter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = adapter.answer(self.path)
                self.send_response(404 if body is None else 200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(body or {}).encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        pair = plane.authority.server("figures", (f"figures.{namespace}.svc",))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.certificate, pair.key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Adapter:
        self._thread.start()
        api, (_, port) = self._plane.api, self._server.server_address[:2]
        meta = {"name": "figures", "namespace": self._namespace}
        spec = {"type": "ExternalName", "externalName": "localhost"}
        service = {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec}
        api.create(f"/api/v1/namespaces/{self._namespace}/services", service)
        registered = {
            "group": GROUP,
            "version": VERSION,
            "service": {**meta, "port": port},
            "caBundle": base64.b64encode(self._plane.authority.certificate.read_bytes()).decode(),
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
        }
        kind = {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService"}
        api.create(APIS, {**kind, "metadata": {"name": NAME}, "spec": registered})
        try:
            api.wait(f"{APIS}/{NAME}", _available, 60.0, "available")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # Otherwise the API server would look for this API forever, and end no namespace.
        self._plane.api.delete(f"{APIS}/{NAME}")
        self._plane.api.wait_gone(f"{APIS}/{NAME}", 20)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def answer(self, path: str) -> dict[str, Any] | None:
        path = path.partition("?")[0]
        if path == f"/apis/{GROUP}/{VERSION}":
            resource = {"name": METRIC, "namespaced": True, "kind": "ExternalMetricValueList"}
            return {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": f"{GROUP}/{VERSION}",
                "resources": [{**resource, "singularName": "", "verbs": ["get"]}],
            }
        if path != f"/apis/{GROUP}/{VERSION}/namespaces/{self._namespace}/{METRIC}":
            return None
        self.asked.append(path)
        return {
            "kind": "ExternalMetricValueList",
            "apiVersion": f"{GROUP}/{VERSION}",
            "metadata": {},
            "items": [self._figure(value)] if (value := self._seconds()) is not None else [],
        }

    def _seconds(self) -> float | None:
        """Return the seconds for 1,000 samples, or None if nothing is known."""
        workers = job(self._plane, self._namespace).get("status", {}).get("readyReplicas")
        if not workers or self.samples_per_worker is None:
            return None
        return float(1000 / (self.samples_per_worker * workers))

    def _figure(self, value: float) -> dict[str, Any]:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        metric = {"metricName": METRIC, "metricLabels": {}, "timestamp": at}
        return {**metric, "value": f"{round(1000 * value)}m"}


def _available(body: dict[str, Any]) -> bool:
    conditions = body.get("status", {}).get("conditions", ())
    return any(c["type"] == "Available" and c["status"] == "True" for c in conditions)


@pytest.fixture
def adapter(plane: ControlPlane, namespace: str) -> Iterator[Adapter]:
    with Adapter(plane, namespace) as adapter:
        yield adapter


def hpa(**bounds: int) -> dict[str, Any]:
    """Return the sample, changed so that it scales without delay."""
    spec = {**HPA["spec"], **bounds}
    at_once = {"stabilizationWindowSeconds": 0}
    always = {"policies": [{"type": "Percent", "value": 900, "periodSeconds": 15}]}
    spec["behavior"] = {"scaleUp": {**at_once, **always}, "scaleDown": {**at_once, **always}}
    return {**HPA, "spec": spec}


@pytest.mark.exhaustive
def test_the_autoscaler_sizes_a_job_by_its_speed_within_its_bounds(
    plane: ControlPlane, namespace: str, running: Running, adapter: Adapter
) -> None:
    path = f"/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers"

    def sized(replicas: int) -> bool:
        body = job(plane, namespace)
        status = body.get("status", {})
        return bool(body["spec"]["replicas"] == replicas == status.get("readyReplicas"))

    def stays(replicas: int) -> bool:
        """Return True if the size is the same after the controller has asked twice more."""
        count = len(adapter.asked)
        until(lambda: len(adapter.asked) >= count + 2, "the controller asks on", SCALED_S)
        return sized(replicas)

    with plane.fake_nodes(2), Fleet(plane, namespace):
        submit(plane, namespace, replicas=2, minReplicas=2, maxReplicas=6)
        until(lambda: sized(2), "two workers train")
        plane.api.create(path, hpa(maxReplicas=6))
        until(lambda: sized(4), "4 x 500 samples a second are the 2,000 wanted", SCALED_S)
        assert stays(4)
        adapter.samples_per_worker = 250.0
        until(lambda: sized(6), "8 would be fast enough, 6 are allowed", SCALED_S)
        adapter.samples_per_worker = None
        assert stays(6), "nothing is known, and nothing is scaled"
        adapter.samples_per_worker = 2000.0
        until(lambda: sized(2), "one would be fast enough, 2 are the fewest", SCALED_S)


def test_the_autoscaler_cannot_exceed_the_bounds_of_the_job(
    plane: ControlPlane, namespace: str, running: Running, adapter: Adapter
) -> None:
    """The API server refuses, and the autoscaler reports it."""
    path = f"/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers"
    adapter.samples_per_worker = 250.0
    with plane.fake_nodes(2), Fleet(plane, namespace):
        submit(plane, namespace, replicas=2, minReplicas=2, maxReplicas=6)
        plane.api.create(path, hpa(maxReplicas=8))

        def refused(body: dict[str, Any]) -> bool:
            conditions = body.get("status", {}).get("conditions", ())
            return any(
                c["type"] == "AbleToScale" and "maxReplicas" in c["message"] for c in conditions
            )

        plane.api.wait(f"{path}/digits", refused, SCALED_S, "refused")
        assert job(plane, namespace)["spec"]["replicas"] == 2
        change(plane, namespace, maxReplicas=8)
        until(lambda: job(plane, namespace)["spec"]["replicas"] == 8, "8 workers", SCALED_S)
