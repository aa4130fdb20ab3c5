"""The chart's objects of other projects' kinds, checked by a real API server that serves them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from testing.cluster import foreign
from testing.cluster.commands import CommandError, kubectl
from testing.cluster.control_plane import ControlPlane
from testing.cluster.fixtures import or_skip

pytestmark = pytest.mark.processes

GOLDEN = Path(__file__).parent.parent / "golden"
KINDS = {"PodMonitor", "ServiceMonitor", "PrometheusRule", "Certificate", "Issuer"}


@pytest.fixture(scope="module")
def served(plane: ControlPlane) -> Iterator[ControlPlane]:
    """Serve the kinds of the Prometheus operator and of cert-manager."""
    with or_skip():
        made = foreign.definitions()
    names = [f"crd/{each['metadata']['name']}" for each in made]
    try:
        kubectl(plane.kubeconfig, "create", "-f", "-", stdin=yaml.safe_dump_all(made))
        ready = "--for=condition=Established"
        kubectl(plane.kubeconfig, "wait", ready, "--timeout=60s", *names)
        yield plane
    finally:
        kubectl(plane.kubeconfig, "delete", "--ignore-not-found", "--wait=false", *names)


def monitors() -> dict[str, str]:
    """Return the objects of other projects' kinds in the golden file with every value set."""
    text = (GOLDEN / "chart-everything.yaml").read_text()
    objects = {each["kind"]: each for each in yaml.load_all(text, yaml.CSafeLoader) if each}
    for kind in KINDS:
        objects[kind]["metadata"]["namespace"] = "default"
    return {kind: yaml.safe_dump(objects[kind]) for kind in KINDS}


def create(plane: ControlPlane, text: str) -> str:
    words = ("create", "--dry-run=server", "--validate=strict", "-f", "-")
    return kubectl(plane.kubeconfig, *words, stdin=text)


@pytest.mark.exhaustive
def test_monitors_rules_and_certificates_conform_to_their_definitions(served: ControlPlane) -> None:
    for kind, text in monitors().items():
        assert "created (server dry run)" in create(served, text), kind


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("PodMonitor", "podMetricsEndpoints", "podMetricEndpoints"),
        ("ServiceMonitor", "interval: 30s", "interval: half"),
        ("Certificate", "secretName", "secretname"),
    ],
)
def test_the_check_detects_a_wrong_field(
    served: ControlPlane, kind: str, right: str, wrong: str
) -> None:
    text = monitors()[kind]
    assert right in text
    with pytest.raises(CommandError, match=r"unknown field|should match|Required"):
        create(served, text.replace(right, wrong))
