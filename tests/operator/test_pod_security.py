"""Pods are held to the level of their namespace, whoever makes them and whatever admission does."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline_api.crdgen import PLURAL
from paceline_operator.cluster.api import ApiError
from paceline_operator.cluster.levels import FRESH_S, Levels
from paceline_operator.core.pods.children import coordinator, worker
from paceline_operator.core.pods.fabric import Fabric
from paceline_operator.core.pods.security import LABEL, Level, level_of, violations

from testing.fake_cluster.observations import job_of
from testing.fake_cluster.server import Server
from testing.fake_cluster.world import NAMESPACE, World, job_body

BASELINE, RESTRICTED = Level.BASELINE, Level.RESTRICTED
GOOD = {
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
UNCONFINED = {"type": "Unconfined"}
APP_ARMOR = "container.apparmor.security.beta.kubernetes.io/trainer"


def pod(**spec: Any) -> dict[str, Any]:
    container = {"name": "trainer", "image": "x", "securityContext": copy.deepcopy(GOOD)}
    return {"metadata": {}, "spec": {"containers": [container], **spec}}


def context(**fields: Any) -> dict[str, Any]:
    """Of the container: what is None is taken out of a good one."""
    made = pod()
    of = made["spec"]["containers"][0]["securityContext"]
    of.update(fields)
    for name in [name for name, value in of.items() if value is None]:
        del of[name]
    return made


def container(**fields: Any) -> dict[str, Any]:
    made = pod()
    made["spec"]["containers"][0].update(fields)
    return made


def beside(kind: str, **fields: Any) -> dict[str, Any]:
    more = {"name": "more", "image": "x", "securityContext": {**copy.deepcopy(GOOD), **fields}}
    made = pod()
    made["spec"].setdefault(kind, []).append(more)
    return made


def annotated(value: str) -> dict[str, Any]:
    return {**pod(), "metadata": {"annotations": {APP_ARMOR: value}}}


BROKEN_BASELINE: dict[str, tuple[dict[str, Any], str]] = {
    "host network": (pod(hostNetwork=True), "spec.hostNetwork"),
    "host PIDs": (pod(hostPID=True), "spec.hostPID"),
    "host IPC": (pod(hostIPC=True), "spec.hostIPC"),
    "a path of the node": (
        pod(volumes=[{"name": "a", "emptyDir": {}}, {"name": "b", "hostPath": {"path": "/"}}]),
        "spec.volumes[1]",
    ),
    "privileged": (context(privileged=True), "spec.containers[0].securityContext.privileged"),
    "another container": (beside("containers", privileged=True), "spec.containers[1]."),
    "an init container": (beside("initContainers", privileged=True), "spec.initContainers[0]."),
    "a debug container": (
        beside("ephemeralContainers", privileged=True),
        "spec.ephemeralContainers[0].",
    ),
    "a capability": (
        context(capabilities={"drop": ["ALL"], "add": ["CHOWN", "SYS_ADMIN"]}),
        "capabilities.add must not have SYS_ADMIN",
    ),
    "all capabilities": (context(capabilities={"drop": ["ALL"], "add": ["ALL"]}), "have ALL"),
    "a port of the node": (
        container(ports=[{"containerPort": 80}, {"containerPort": 81, "hostPort": 81}]),
        "ports[1].hostPort",
    ),
    "/proc": (context(procMount="Unmasked"), "procMount"),
    "SELinux's type": (context(seLinuxOptions={"type": "spc_t"}), "seLinuxOptions.type"),
    "SELinux's user": (context(seLinuxOptions={"user": "u"}), "seLinuxOptions.user"),
    "SELinux's role": (
        pod(securityContext={"seLinuxOptions": {"role": "r"}}),
        "seLinuxOptions.role",
    ),
    "seccomp": (context(seccompProfile=UNCONFINED), "containers[0].securityContext.seccompProfile"),
    "seccomp of the pod": (
        pod(securityContext={"seccompProfile": UNCONFINED}),
        "spec.securityContext.seccompProfile",
    ),
    "AppArmor": (pod(securityContext={"appArmorProfile": UNCONFINED}), "appArmorProfile"),
    "AppArmor of a container": (context(appArmorProfile=UNCONFINED), "appArmorProfile"),
    "AppArmor as an annotation": (annotated("unconfined"), "metadata.annotations"),
    "a sysctl": (
        pod(securityContext={"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}),
        "kernel.msgmax",
    ),
    "a process of a Windows host": (
        context(windowsOptions={"hostProcess": True}),
        "windowsOptions.hostProcess",
    ),
    "a Windows host, of the pod": (
        pod(securityContext={"windowsOptions": {"hostProcess": True}}),
        "spec.securityContext.windowsOptions",
    ),
    "a probe of another host": (
        container(livenessProbe={"httpGet": {"host": "169.254.169.254", "port": 80}}),
        "livenessProbe.httpGet.host",
    ),
    "a hook at another host": (
        container(lifecycle={"preStop": {"tcpSocket": {"host": "10.0.0.1", "port": 80}}}),
        "lifecycle.preStop.tcpSocket.host",
    ),
}
BROKEN_RESTRICTED: dict[str, tuple[dict[str, Any], str]] = {
    "a kind of volume": (
        pod(volumes=[{"name": "a", "nfs": {"server": "x", "path": "/"}}]),
        "spec.volumes[0] must not be of the kind nfs",
    ),
    "may escalate": (context(allowPrivilegeEscalation=None), "allowPrivilegeEscalation"),
    "escalates": (context(allowPrivilegeEscalation=True), "allowPrivilegeEscalation"),
    "may be root": (context(runAsNonRoot=None), "runAsNonRoot"),
    "is root": (context(runAsNonRoot=False), "runAsNonRoot"),
    "is root by its number": (context(runAsUser=0), "runAsUser"),
    "is root, says the pod": (
        pod(securityContext={"runAsUser": 0}),
        "spec.securityContext.runAsUser",
    ),
    "no seccomp": (context(seccompProfile=None), "seccompProfile"),
    "keeps capabilities": (context(capabilities=None), "capabilities.drop"),
    "keeps some": (context(capabilities={"drop": ["CHOWN"]}), "capabilities.drop"),
    "a capability of baseline": (
        context(capabilities={"drop": ["ALL"], "add": ["CHOWN"]}),
        "must not have CHOWN",
    ),
    "an init container": (beside("initContainers", runAsNonRoot=False), "initContainers[0]"),
}
ALLOWED: dict[str, dict[str, Any]] = {
    "nothing said that matters": pod(hostNetwork=False, hostPID=None),
    "ports": container(ports=[{"containerPort": 80, "hostPort": 0}]),
    "the one capability": context(capabilities={"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}),
    "SELinux of containers": context(seLinuxOptions={"type": "container_t", "level": "s0"}),
    "AppArmor of the runtime": annotated("runtime/default"),
    "AppArmor of the node": annotated("localhost/mine"),
    "a safe sysctl": pod(
        securityContext={"sysctls": [{"name": "net.ipv4.tcp_syncookies", "value": "1"}]}
    ),
    "seccomp of the node": context(seccompProfile={"type": "Localhost", "localhostProfile": "x"}),
    "volumes": pod(volumes=[{"name": "a", "emptyDir": {}}, {"name": "b", "secret": {}}]),
    "a probe of itself": container(livenessProbe={"httpGet": {"port": 80}}),
    "empty words of YAML": pod(volumes=None, securityContext=None, initContainers=None),
}


@pytest.mark.parametrize("name", BROKEN_BASELINE)
def test_each_control_of_baseline_is_held_at_both_levels(name: str) -> None:
    body, words = BROKEN_BASELINE[name]
    assert violations(body, Level.PRIVILEGED) == []
    for level in (BASELINE, RESTRICTED):
        assert any(words in text for text in violations(body, level)), violations(body, level)


@pytest.mark.parametrize("name", BROKEN_RESTRICTED)
def test_each_control_of_restricted_is_held_there_only(name: str) -> None:
    body, words = BROKEN_RESTRICTED[name]
    assert violations(body, BASELINE) == []
    found = violations(body, RESTRICTED)
    assert len(found) == 1, found
    assert words in found[0]


@pytest.mark.parametrize("name", ALLOWED)
def test_what_the_standards_allow_is_made(name: str) -> None:
    assert violations(ALLOWED[name], RESTRICTED) == []


def test_a_plain_job_s_pods_are_restricted() -> None:
    job = job_of()
    tcp = Fabric("tcp", "TCP", {})
    assert violations(worker(job, 0, 1, key_id="k", fabric=tcp), RESTRICTED) == []
    assert violations(coordinator(job, 1, key_id="k"), RESTRICTED) == []


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=3), below),
)


@given(st.dictionaries(st.sampled_from(["volumes", "securityContext", "initContainers"]), anything))
def test_a_template_of_any_shape_raises_nothing(spec: dict[str, Any]) -> None:
    violations({"metadata": {}, "spec": {**pod()["spec"], **spec}}, RESTRICTED)


@pytest.mark.parametrize(
    ("labels", "level"),
    [
        ({}, Level.PRIVILEGED),
        ({LABEL: "privileged"}, Level.PRIVILEGED),
        ({LABEL: "baseline"}, BASELINE),
        ({LABEL: "restricted"}, RESTRICTED),
        ({LABEL: "Baseline"}, RESTRICTED),
        ({LABEL: ""}, RESTRICTED),
        ({"pod-security.kubernetes.io/warn": "restricted"}, Level.PRIVILEGED),
    ],
)
def test_the_level_is_that_of_the_label_and_an_unknown_one_the_strictest(
    labels: dict[str, str], level: Level
) -> None:
    assert level_of(labels) is level


# ---- the job ------------------------------------------------------------------------------------


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def submit(world: World, **spec: Any) -> None:
    body = job_body(replicas=2)
    body["spec"]["template"]["spec"] |= spec
    world.server.insert(PLURAL, NAMESPACE, body)


def degraded(world: World) -> dict[str, Any]:
    status = world.server.find(PLURAL, NAMESPACE, "digits").get("status", {})
    return next((c for c in status.get("conditions", ()) if c["type"] == "Degraded"), {})


@pytest.mark.parametrize("level", [BASELINE, RESTRICTED])
def test_a_job_beyond_the_level_gets_no_pod_and_names_the_field(world: World, level: Level) -> None:
    world.level = level
    submit(world, hostNetwork=True)
    world.settle(20)
    assert world.server.of_kind("pods") == []
    assert degraded(world)["reason"] == "PodSecurity"
    assert "spec.template.spec.hostNetwork must not be true" in degraded(world)["message"]
    assert f'"{level}" of namespace {NAMESPACE}' in degraded(world)["message"]
    events = [e for e in world.server.of_kind("events") if e["reason"] == "PodSecurity"]
    assert len(events) == 1


def test_it_starts_when_the_template_is_corrected(world: World) -> None:
    world.level = BASELINE
    submit(world, hostNetwork=True)
    world.settle(20)
    body = copy.deepcopy(job_body(replicas=2)["spec"]["template"])
    world.server.change(PLURAL, NAMESPACE, "digits", spec={"template": body})
    world.settle(20)
    assert len(world.server.of_kind("pods")) == 3
    assert degraded(world).get("status") != "True"


def test_a_job_without_a_level_is_as_it_was(world: World) -> None:
    submit(world, hostNetwork=True)
    world.settle(20)
    assert len(world.server.of_kind("pods")) == 3


# ---- the label ----------------------------------------------------------------------------------


def test_a_label_is_looked_at_again_after_a_while_and_without_the_right_nobody_gets_pods() -> None:
    server, now_s = Server(lambda: 0.0), 0.0
    server.objects["namespaces", "", "a"] = {"metadata": {"name": "a", "labels": {}}}
    levels = Levels(server, lambda: now_s)
    assert asyncio.run(levels.of("a")) is Level.PRIVILEGED
    server.objects["namespaces", "", "a"]["metadata"]["labels"] = {LABEL: "baseline"}
    assert asyncio.run(levels.of("a")) is Level.PRIVILEGED
    assert server.requests["GET namespaces"] == 1
    now_s = FRESH_S
    assert asyncio.run(levels.of("a")) is BASELINE
    server.refusing["namespaces"] = ApiError(403, "Forbidden", "no")
    now_s *= 2
    with pytest.raises(ApiError):
        asyncio.run(levels.of("a"))
