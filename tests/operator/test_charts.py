"""The charts: what they render, whom they let do what, and the operator under these rights."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import programs

ROOT = Path(__file__).parent.parent.parent
CHARTS = ROOT / "charts"
pytestmark = pytest.mark.processes


def helm(*words: str) -> str:
    done = subprocess.run(
        [programs.require("helm"), *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered(*options: str) -> list[dict[str, Any]]:
    text = helm("template", "x", str(CHARTS / "paceline"), "-n", "sys", *options)
    return [found for found in yaml.safe_load_all(text) if found]


ALL = (
    "--set=replicas=2,podDisruptionBudget.enabled=true,priorityClass.create=true",
    "--set=metrics.serviceMonitor.enabled=true,metrics.podMonitor.enabled=true",
    "--set=networkPolicy.jobNamespaces={a,b}",
)


@pytest.mark.parametrize("chart", ["paceline", "paceline-crds"])
def test_helm_finds_no_fault(chart: str) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHARTS / chart))


def test_the_definition_is_the_generated_one() -> None:
    generated = (ROOT / "crds/manifests/trainingjobs.yaml").read_text()
    file = CHARTS / "paceline-crds/files/trainingjobs.yaml"
    assert file.read_text() == generated, "copy crds/manifests/trainingjobs.yaml over it"
    (crd,) = yaml.safe_load_all(helm("template", "x", str(CHARTS / "paceline-crds")))
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert crd["spec"] == yaml.safe_load(generated)["spec"]


@pytest.mark.parametrize("options", [(), ("--set=scope.clusterWide=false",), ALL])
def test_nobody_may_read_the_secrets_of_users(options: tuple[str, ...]) -> None:
    for found in rendered(*options):
        for rule in found.get("rules", ()):
            assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
            if "secrets" in rule["resources"] and rule["verbs"] != ["create"]:
                assert rule["verbs"] == ["get"]
                assert rule["resourceNames"] == ["paceline-operator-key"]
                assert found["kind"] == "Role"


def test_a_namespaced_installation_has_no_right_beyond_its_namespace() -> None:
    found = rendered("--set=scope.clusterWide=false")
    assert not [f for f in found if f["kind"].startswith("Cluster")]
    (deployment,) = (f for f in found if f["kind"] == "Deployment")
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {"--namespace=sys", "--no-nodes"} <= set(args)


def test_the_switches_make_what_they_say() -> None:
    kinds = {f["kind"] for f in rendered(*ALL)} - {f["kind"] for f in rendered()}
    assert kinds == {"PodDisruptionBudget", "PriorityClass", "ServiceMonitor", "PodMonitor"}
    policies = [f for f in rendered(*ALL) if f["kind"] == "NetworkPolicy"]
    assert {p["metadata"]["namespace"] for p in policies} == {"sys", "a", "b"}


def test_the_operator_s_pod_is_restricted() -> None:
    (deployment,) = (f for f in rendered() if f["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    context = pod["containers"][0]["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize(
    ("wrong", "field"), [("replica=2", "replica"), ("logging.level=loud", "level")]
)
def test_a_misspelt_value_is_refused(wrong: str, field: str) -> None:
    words = ["template", "x", str(CHARTS / "paceline"), f"--set={wrong}"]
    done = subprocess.run(
        [programs.require("helm"), *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert field in done.stderr


def test_every_value_has_a_schema_and_most_a_comment() -> None:
    text = (CHARTS / "paceline/values.yaml").read_text()
    values = yaml.safe_load(text)
    schema = yaml.safe_load((CHARTS / "paceline/values.schema.json").read_text())
    assert set(values) == set(schema["properties"]) - {"global"}
    assert len(re.findall(r"^ *#", text, re.M)) >= len(values)
