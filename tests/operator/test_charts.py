"""The charts: what they render, which rights they grant, and which values they accept."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from paceline_api.crdgen import DEFINITIONS
from paceline_api.reading.load import job_from_mapping
from paceline_api.runtimes.reading import problems_of, runtime_from_mapping

from scripts.operator_reference import JOBS, OWN, RIGHTS, values_of
from testing.cluster import programs
from testing.cluster.fixtures import or_skip
from tests.layers import exhaustive

ROOT = Path(__file__).parent.parent.parent
CHARTS = ROOT / "charts"
pytestmark = [pytest.mark.cluster_programs, pytest.mark.processes]


def helm(*words: str) -> str:
    with or_skip():
        program = programs.require("helm")
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered(*options: str) -> list[dict[str, Any]]:
    text = helm("template", "x", str(CHARTS / "paceline"), "-n", "sys", *options)
    return [body for body in yaml.load_all(text, yaml.CSafeLoader) if body]


GOLDEN = Path(__file__).parent / "golden"
ALL = (
    "--set=replicas=2,podDisruptionBudget.enabled=true,priorityClass.create=true",
    "--set=metrics.serviceMonitor.enabled=true,metrics.podMonitor.enabled=true",
    "--set=metrics.secure=true",
    "--set=networkPolicy.jobNamespaces={a,b}",
    "--set=imagePullSecrets[0].name=registry,nodeSelector.pool=system,podLabels.team=a",
    "--set=tolerations[0].key=system,tolerations[0].operator=Exists,podAnnotations.note=b",
    "--set=serviceAccount.annotations.owner=c,metrics.podMonitor.labels.prometheus=d",
    "--set=tenantPolicy.enabled=true,tenantPolicy.namespaceSelector.matchLabels.group=tenants",
    "--set=tenantPolicy.capabilities={SYS_NICE},tenantPolicy.fabricProfiles={aws-efa}",
    "--set=commonLabels.team=b,commonLabels.cost=c,image.registry=registry.example.com",
    "--set=client.qps=50,client.burst=80",
    "--set=ports.http=18080,ports.metrics=18443",
    "--set=env[0].name=HTTPS_PROXY,env[0].value=http://proxy:3128,envFrom[0].secretRef.name=more",
    "--set=volumes[0].name=authority,volumes[0].configMap.name=authority",
    "--set=volumeMounts[0].name=authority,volumeMounts[0].mountPath=/authority",
    "--set=podSecurityContext.runAsUser=65532,securityContext.runAsGroup=65532",
    "--set=livenessProbe.timeoutSeconds=5,readinessProbe.failureThreshold=2",
    "--set=topologySpreadConstraints[0].maxSkew=1,topologySpreadConstraints[0].topologyKey=zone",
    "--set=topologySpreadConstraints[0].whenUnsatisfiable=ScheduleAnyway",
    "--set=runtimes.enabled=true,runtimes.images.transformers=registry.example.com/hf:1",
    "--set=runtimes.cacheClaim=models,runtimes.gpu.nodeSelector.pool=h100",
    "--set=metrics.certificate.certManager.enabled=true,metrics.rules.enabled=true",
)
NAMESPACED = ("--set=scope.clusterWide=false",)
VARIANTS = {"default": (), "namespaced": NAMESPACED, "everything": ALL}


@pytest.mark.parametrize("chart", ["paceline", "paceline-crds"])
def test_helm_lint_finds_no_fault(chart: str) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHARTS / chart))


def test_the_chart_ships_the_generated_definitions() -> None:
    crds = {
        crd["spec"]["names"]["plural"]: crd
        for crd in yaml.load_all(
            helm("template", "x", str(CHARTS / "paceline-crds")), yaml.CSafeLoader
        )
    }
    assert set(crds) == set(DEFINITIONS)
    for plural, crd in crds.items():
        generated = (ROOT / f"crds/manifests/{plural}.yaml").read_text()
        file = CHARTS / f"paceline-crds/files/{plural}.yaml"
        assert file.read_text() == generated, f"copy crds/manifests/{plural}.yaml over it"
        assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        assert crd["spec"] == yaml.load(generated, yaml.CSafeLoader)["spec"]


@pytest.mark.parametrize("options", [(), NAMESPACED, ALL])
def test_nobody_may_read_the_secrets_of_users(options: tuple[str, ...]) -> None:
    for body in rendered(*options):
        for rule in body.get("rules", ()):
            assert "*" not in [word for words in rule.values() for word in words]
            if "secrets" in rule.get("resources", ()) and rule["verbs"] != ["create"]:
                assert rule["verbs"] == ["get"]
                assert rule["resourceNames"] == ["paceline-operator-key"]
                assert body["kind"] == "Role"


@pytest.mark.parametrize("options", [(), NAMESPACED, ALL])
def test_the_operator_may_change_only_its_own_service(options: tuple[str, ...]) -> None:
    rules = [rule for body in rendered(*options) for rule in body.get("rules", ())]
    (services,) = (rule for rule in rules if "services" in rule.get("resources", ()))
    assert services["resourceNames"] == ["paceline-jobs"]


def test_a_namespaced_installation_has_no_right_beyond_its_namespace() -> None:
    objects = rendered("--set=scope.clusterWide=false")
    assert not [f for f in objects if f["kind"].startswith("Cluster")]
    (deployment,) = (f for f in objects if f["kind"] == "Deployment")
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {"--namespace=sys", "--no-nodes"} <= set(args)


def test_optional_values_render_their_objects() -> None:
    kinds = {f["kind"] for f in rendered(*ALL)} - {f["kind"] for f in rendered()}
    assert kinds == {
        *("PodDisruptionBudget", "PriorityClass", "ServiceMonitor", "PodMonitor"),
        *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
        *("PrometheusRule", "Certificate", "Issuer", "ClusterTrainingRuntime"),
    }
    assert "podgroups" in str(rendered())
    assert "podgroups" not in str(rendered("--set=rbac.gangs=false"))
    policies = [f for f in rendered(*ALL) if f["kind"] == "NetworkPolicy"]
    assert {p["metadata"]["namespace"] for p in policies} == {"sys", "a", "b"}


CATALOG = ("torch-cpu", "torch-cuda", "transformers")


def runtimes_of(*options: str) -> dict[str, dict[str, Any]]:
    objects = rendered("--set=runtimes.enabled=true", *options)
    return {f["metadata"]["name"]: f for f in objects if f["kind"].endswith("TrainingRuntime")}


@pytest.mark.parametrize("options", [(), NAMESPACED, ALL])
@pytest.mark.parametrize("name", CATALOG)
def test_a_job_of_an_image_and_a_command_is_valid_with_each_runtime_of_the_catalog(
    name: str, options: tuple[str, ...]
) -> None:
    body = runtimes_of(*options)[name]
    runtime = runtime_from_mapping(body)
    assert problems_of(runtime) == []
    trainer = {"name": "trainer", "image": "own:1", "command": ["python", "train.py"]}
    short = {"runtimeRef": {"name": name, "kind": body["kind"]}, "replicas": 4}
    job = job_from_mapping(
        {
            "apiVersion": "paceline.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "digits"},
            "spec": short | {"template": {"spec": {"containers": [trainer]}}},
        },
        runtime,
    )
    container = job.spec.trainer()
    assert container is not None
    assert container.image == "own:1"
    on_gpus = name != "torch-cpu"
    limits = container.resources.limits if container.resources else None
    assert (limits is not None and limits.gpus == 1) == on_gpus
    volumes = job.to_mapping()["spec"]["template"]["spec"].get("volumes", [])
    assert [volume["name"] for volume in volumes] == ["cache"] * (name == "transformers")


def test_the_catalog_is_of_the_kind_that_the_operator_sees() -> None:
    assert not [f for f in rendered() if "Runtime" in f["kind"]], "none is made unasked"
    assert {f["kind"] for f in runtimes_of().values()} == {"ClusterTrainingRuntime"}
    own = runtimes_of(*NAMESPACED)
    assert sorted(own) == sorted(CATALOG)
    assert {(f["kind"], f["metadata"]["namespace"]) for f in own.values()} == {
        ("TrainingRuntime", "sys")
    }
    claim = runtimes_of("--set=runtimes.cacheClaim=models")["transformers"]
    (cache,) = claim["spec"]["template"]["spec"]["volumes"]
    assert cache["persistentVolumeClaim"] == {"claimName": "models"}


@pytest.mark.parametrize("options", [(), NAMESPACED, ALL])
def test_network_policies_admit_only_scrapers_to_metrics(options: tuple[str, ...]) -> None:
    """Namespaces with the usual label may by default scrape the metrics of operator and jobs."""
    scrapes = [{"namespaceSelector": {"matchLabels": {"metrics": "enabled"}}}]
    here = "--set=networkPolicy.metricsFrom[0].ipBlock.cidr=10.0.0.1/32"
    for more, peers in (((), scrapes), ((here,), [{"ipBlock": {"cidr": "10.0.0.1/32"}}])):
        policies = [f for f in rendered(*options, *more) if f["kind"] == "NetworkPolicy"]
        assert policies
        for policy in policies:
            for rule in policy["spec"]["ingress"]:
                assert rule.get("from"), f"{policy['metadata']['name']} admits everybody"
            metrics = [
                rule
                for rule in policy["spec"]["ingress"]
                if rule.get("ports")
                in ([{"port": p, "protocol": "TCP"}] for p in (8080, 18443, "metrics"))
            ]
            assert [rule["from"] for rule in metrics] == [peers], policy["metadata"]["name"]


@pytest.mark.parametrize("wrong", ["metricsFrom=null", "metricsFrom={}", "metricsFrom[0]=x"])
def test_a_metrics_peer_that_would_admit_everybody_is_refused(wrong: str) -> None:
    with or_skip():
        program = programs.require("helm")
    words = ["template", "x", str(CHARTS / "paceline"), f"--set=networkPolicy.{wrong}"]
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "metricsFrom" in done.stderr


def test_monitors_and_rules_have_the_configured_labels() -> None:
    kinds = ("serviceMonitor", "podMonitor", "rules")
    on = "--set=metrics.{0}.enabled=true,metrics.{0}.labels.release={0}"
    labels = [on.format(kind) for kind in kinds]
    by_kind = {f["kind"]: f["metadata"]["labels"].get("release") for f in rendered(*labels)}
    assert by_kind["ServiceMonitor"] == "serviceMonitor"
    assert by_kind["PodMonitor"] == "podMonitor"
    assert by_kind["PrometheusRule"] == "rules"
    assert set(by_kind.values()) == {None, *kinds}


def test_the_operator_pod_is_restricted() -> None:
    (deployment,) = (f for f in rendered() if f["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    context = pod["containers"][0]["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("variant", VARIANTS)
def test_templates_match_the_golden_file(variant: str) -> None:
    """To accept a change, rm tests/operator/golden/chart-*, run again, read the difference."""
    file = GOLDEN / f"chart-{variant}.yaml"
    text = helm("template", "paceline", str(CHARTS / "paceline"), "-n", "sys", *VARIANTS[variant])
    if not file.exists():
        file.write_text(text)
        pytest.fail(f"{file.name} was missing and has been written; read it and run again")
    assert text == file.read_text()


def deployment(*options: str) -> dict[str, Any]:
    (body,) = (f for f in rendered(*options) if f["kind"] == "Deployment")
    return body


def names_in(body: Any) -> Iterator[str]:
    """Yield every value of a key `name` of an object's metadata, and of what refers to one."""
    yield body["metadata"]["name"]
    yield from (subject["name"] for subject in body.get("subjects", ()))
    if "roleRef" in body:
        yield body["roleRef"]["name"]


@pytest.mark.parametrize("length", range(35, 54))
def test_names_are_valid_for_release_names_of_any_length(length: int) -> None:
    """Helm admits release names of 53 characters; the name of a Service has 63 at most."""
    text = helm("template", "r" * length, str(CHARTS / "paceline"), "-n", "sys", *ALL)
    for body in yaml.load_all(text, yaml.CSafeLoader):
        for name in names_in(body):
            assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name), name
        assert len(body["metadata"]["name"]) <= (63 if body["kind"] == "Service" else 253)


def test_overrides_rename_every_object_and_what_refers_to_it() -> None:
    for options, name in (
        ("--set=nameOverride=pace", "x-pace-operator"),
        ("--set=fullnameOverride=it", "it"),
    ):
        for body in rendered(options):
            own = [each for each in names_in(body) if each != "paceline-operator"]
            assert all(each.removeprefix("sys-").startswith(name) for each in own), own
        assert deployment(options)["spec"]["template"]["spec"]["serviceAccountName"] == name


def test_common_labels_are_on_every_object_and_pod_but_not_in_selectors() -> None:
    for body in [*rendered(*ALL), deployment(*ALL)["spec"]["template"]]:
        assert body["metadata"]["labels"]["cost"] == "c", body["metadata"]
    assert set(deployment(*ALL)["spec"]["selector"]["matchLabels"]) == {
        *("app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component")
    }
    assert deployment(*ALL)["metadata"]["labels"]["team"] == "b"
    assert deployment(*ALL)["spec"]["template"]["metadata"]["labels"]["team"] == "a"


@pytest.mark.parametrize(
    ("options", "image"),
    [
        ("image.repository=a/b,image.tag=t", "a/b:t"),
        ("image.repository=a/b,image.tag=t,image.registry=r.io", "r.io/a/b:t"),
        ("image.repository=a/b,image.registry=r.io,global.imageRegistry=g.io/", "g.io/a/b:t"),
        (f"image.tag=t,image.digest=sha256:{'0' * 64}", f"paceline/operator@sha256:{'0' * 64}"),
    ],
)
def test_the_image_is_named_by_registry_tag_and_digest(options: str, image: str) -> None:
    body = deployment(f"--set=image.tag=t,{options}")
    assert body["spec"]["template"]["spec"]["containers"][0]["image"] == image


def test_pods_in_the_network_of_their_nodes_still_find_services() -> None:
    pod = deployment("--set=hostNetwork=true")["spec"]["template"]["spec"]
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    pod = deployment("--set=hostNetwork=true,dnsPolicy=Default")["spec"]["template"]["spec"]
    assert pod["dnsPolicy"] == "Default"
    assert "dnsPolicy" not in deployment()["spec"]["template"]["spec"]


def leaves(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))


@pytest.mark.parametrize(
    ("more", "every"),
    [exhaustive((), 1), exhaustive(ALL, 1), (ALL, 7)],
    ids=["default", "everything", "some"],
)
def test_a_removed_value_is_refused_by_name_or_renders(more: tuple[str, ...], every: int) -> None:
    """`--set x=null` removes a default; no template may fail on what is not there."""
    values = yaml.safe_load((CHARTS / "paceline/values.yaml").read_text())
    with or_skip():
        program = programs.require("helm")
    for path in list(leaves(values))[::every]:
        option = f"--set={'.'.join(path)}=null"
        words = [str(program), "template", "x", str(CHARTS / "paceline"), *more, option]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        if done.returncode:
            messages = ("missing property", "execution error at")  # by the schema, by `fail`
            assert any(words in done.stderr for words in messages), (option, done.stderr)
            assert path[-1] in done.stderr, (option, done.stderr)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ("replica=2", "replica"),
        ("replicas=two", "replicas"),
        ("replicas=0", "replicas"),
        ("logging.level=loud", "level"),
        ("image.repo=x", "repo"),
        ("scope.clusterWide=maybe", "clusterWide"),
        ("leaderElection.leaseDurationSeconds=1", "leaseDurationSeconds"),
        ("resources.limit.memory=1Gi", "limit"),
        ("networkPolicy.jobNamespaces=a", "jobNamespaces"),
        ("metrics.podMonitor.interval=15", "interval"),
        ("metrics.dashboards.labels.grafana_dashboard=1", "grafana_dashboard"),
        ("metrics.rules.enable=true", "enable"),
        ("nodeSelector.pool=3", "nodeSelector"),
        ("metrics.serviceMonitor.enabled=true,metrics.service=false", "metrics.service"),
        ("metrics.secure=true,scope.clusterWide=false", "metrics.secure needs scope.clusterWide"),
        ("tenantPolicy.enabled=true", "needs tenantPolicy.namespaceSelector"),
        ("tenantPolicy.enabled=true,scope.clusterWide=false", "needs scope.clusterWide: true"),
        ("tenantPolicy.validationActions={Refuse}", "validationActions"),
        ("tenantPolicy.capabilities={sys_nice}", "capabilities"),
        ("fullnameOverride=Upper", "fullnameOverride"),
        ("image.digest=latest", "digest"),
        ("ports.http=0", "ports/http"),
        ("client.qps=-1", "qps"),
        ("runtimes.gpu.resource=gpu", "resource"),
        ("runtimes.images.torch=x", "torch"),
        ("dnsPolicy=Cluster", "dnsPolicy"),
        ("livenessProbe.period=3", "period"),
        ("volumes[0].emptyDir.medium=Memory", "name"),
        ("topologySpreadConstraints[0].maxSkew=1", "topologyKey"),
        ("serviceAccount.create=false", "needs serviceAccount.name"),
        ("metrics.certificate.secretName=x", "needs metrics.secure"),
        ("metrics.certificate.certManager.enabled=true", "needs metrics.secure"),
        (r"podLabels.app\.kubernetes\.io/name=x", "podLabels: app.kubernetes.io/name"),
        (
            r"commonLabels.app\.kubernetes\.io/component=x",
            "commonLabels: app.kubernetes.io/component",
        ),
    ],
)
def test_a_wrong_value_is_refused(wrong: str, field: str) -> None:
    words = ["template", "x", str(CHARTS / "paceline"), f"--set={wrong}"]
    with or_skip():
        program = programs.require("helm")
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert field in done.stderr


def test_the_values_schema_is_strict_and_complete() -> None:
    """Every value has an entry, and every mapping refuses unknown keys."""
    for chart in ("paceline", "paceline-crds"):
        values = yaml.safe_load((CHARTS / chart / "values.yaml").read_text())
        schema = json.loads((CHARTS / chart / "values.schema.json").read_text())
        _covers(schema, values, schema, chart)


def _covers(schema: dict[str, Any], values: Any, root: dict[str, Any], path: str) -> None:
    if "$ref" in schema:
        schema = root["definitions"][schema["$ref"].rpartition("/")[2]]
    if not isinstance(values, dict):
        return
    if path.removeprefix("paceline.") in OF_KUBERNETES and "properties" not in schema:
        return
    assert "additionalProperties" in schema, f"{path} takes anything"
    fields = schema.get("properties", {})
    if schema["additionalProperties"] is False:
        assert set(values) <= set(fields), path
        assert path.removeprefix("paceline").removeprefix(".") in OF_KUBERNETES or set(
            fields
        ) - set(values) <= {"global"}, path
    for name, value in values.items():
        _covers(fields.get(name, {"additionalProperties": {}}), value, root, f"{path}.{name}")


OF_KUBERNETES = {
    *("resources", "affinity", "podSecurityContext", "securityContext"),
    "runtimes.cpu.resources",
    *("podSecurityContext.seccompProfile", "securityContext.capabilities"),
    *("livenessProbe", "readinessProbe", "metrics.certificate.certManager.issuerRef"),
}
"""Values that have the fields of an object of Kubernetes or cert-manager, most of them unset."""


def test_every_value_has_a_comment() -> None:
    values = list(values_of((CHARTS / "paceline/values.yaml").read_text()))
    assert len(values) > 30
    assert [value.path for value in values if not value.text] == []


def test_the_rights_match_the_reference() -> None:
    granted = set()
    made = rendered()
    bound = [body["roleRef"] for body in made if "roleRef" in body]
    of_operator = {(role["kind"], role["name"]) for role in bound}
    for role in made:
        if (role["kind"], role["metadata"]["name"]) in of_operator:
            for rule in role["rules"]:
                names = rule.get("resourceNames", [""])
                for resource in rule["resources"]:
                    granted.add((role["kind"], resource, tuple(rule["verbs"]), names[0]))
    kinds = {JOBS: "ClusterRole", OWN: "Role"}
    documented = {
        (kinds.get(right.where, "ClusterRole"), resource, right.verbs, right.name)
        for right in RIGHTS
        for resource in right.resources
    }
    assert granted == documented
