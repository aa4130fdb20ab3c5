"""The settings that a fabric profile adds to a worker's pod."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from paceline_api.types.enums import FabricRequirement
from paceline_api.types.fabric import FabricPod, FabricSpec
from paceline_operator.core.decide.fabric import fabric_of
from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Node
from paceline_operator.core.pods import children
from paceline_operator.core.pods.fabric import ChosenFabric
from paceline_operator.fabrics import built_in

from testing.fake_cluster.fabrics import GPU, cluster_of, gpu_job
from testing.fake_cluster.observations import job_of
from testing.fake_cluster.parts import KEY

GOLDEN = Path(__file__).parent / "golden"


def pod_with(chosen: ChosenFabric, job: JobObject) -> dict[str, Any]:
    return children.worker(job, 0, 1, fabric=chosen, key_id=KEY)


def added(before: Any, after: Any) -> Any:
    """Return what `after` has and `before` has not."""
    if isinstance(before, dict) and isinstance(after, dict):
        fields = {key: added(before.get(key), value) for key, value in after.items()}
        return {key: value for key, value in fields.items() if value not in (None, {}, [])}
    if isinstance(before, list) and isinstance(after, list):
        if len(before) == len(after) and all(isinstance(x, dict) for x in after):
            changed = [added(old, new) for old, new in zip(before, after, strict=True)]
            return [change for change in changed if change not in (None, {}, [])]
        return [item for item in after if item not in before]
    return None if before == after else after


def test_pods_with_each_built_in_profile_match_the_golden_file() -> None:
    """To accept a change, delete the file, run again and read the difference."""
    job = gpu_job()
    plain = pod_with(ChosenFabric("tcp", "Any", {}), job)
    by_profile: dict[str, Any] = {}
    for name in sorted(built_in()):
        offers = GPU | dict.fromkeys(resources_of(name), 8)
        chosen = fabric_of(
            gpu_job(profile=name), cluster_of({"node-1": Node("node-1", offers=offers)})
        )
        assert isinstance(chosen, ChosenFabric)
        by_profile[name] = added(plain, pod_with(chosen, job))
    file = GOLDEN / "fabrics.yaml"
    text = yaml.safe_dump(by_profile, sort_keys=True, width=100)
    if not file.exists():
        file.write_text(text)
        pytest.fail(f"{file.name} was missing and has been written; read it and run again")
    assert text == file.read_text()


def resources_of(name: str) -> list[str]:
    pod = built_in()[name].pod
    return list((pod.resources if pod else None) or {})


EVERYTHING = FabricSpec(
    carries=FabricRequirement.RDMA,
    pod=FabricPod.model_validate(
        {
            "annotations": {"k8s.v1.cni.cncf.io/networks": "ib0", "note": "profile"},
            "nodeSelector": {"fabric": "ib", "pool": "profile"},
            "tolerations": [{"key": "rdma", "operator": "Exists"}],
            "resources": {"rdma/hca": 1, "nvidia.com/gpu": 4},
            "resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "nic"}],
            "hostNetwork": True,
            "dnsPolicy": "ClusterFirstWithHostNet",
            "capabilities": ["IPC_LOCK"],
            "runAsUser": 0,
            "env": [
                {"name": "NCCL_IB_HCA", "value": "mlx5"},
                {"name": "LR", "value": "9"},
                {"name": "RAIL", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            ],
            "volumes": [{"name": "gib", "hostPath": {"path": "/gib"}}],
            "volumeMounts": [{"name": "gib", "mountPath": "/usr/local/gib"}],
            "initContainers": [{"name": "daemon", "image": "d", "restartPolicy": "Always"}],
        }
    ),
)


def test_a_profile_applies_all_its_settings_to_a_worker() -> None:
    chosen = fabric_of(gpu_job(profile="own"), cluster_of(own=EVERYTHING))
    assert isinstance(chosen, ChosenFabric)
    pod = pod_with(chosen, gpu_job())
    spec, trainer = pod["spec"], pod["spec"]["containers"][0]
    assert pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "ib0"
    assert spec["nodeSelector"] == {"fabric": "ib", "pool": "profile"}
    assert {"key": "rdma", "operator": "Exists"} in spec["tolerations"]
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert trainer["resources"]["limits"] == {"nvidia.com/gpu": 8, "rdma/hca": "1"}
    assert trainer["resources"]["claims"] == [{"name": "nic"}]
    assert trainer["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert trainer["securityContext"]["runAsUser"] == 0
    assert trainer["securityContext"]["runAsNonRoot"] is False
    assert {"name": "NCCL_IB_HCA", "value": "mlx5"} in trainer["env"]
    rail = {"name": "RAIL", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    assert rail in trainer["env"]
    assert {"name": "gib", "hostPath": {"path": "/gib"}} in spec["volumes"]
    assert {"name": "gib", "mountPath": "/usr/local/gib"} in trainer["volumeMounts"]
    assert [c["name"] for c in spec["initContainers"]] == ["daemon"]
    # The coordinator does not train, so the profile does not apply to it.
    pod = children.coordinator(gpu_job(), 1, key_id=KEY)["spec"]
    assert "resourceClaims" not in pod
    assert "add" not in pod["containers"][0]["securityContext"]["capabilities"]


def test_settings_of_the_template_win_over_the_profile() -> None:
    job = gpu_job(
        nodeSelector={"pool": "a"},
        hostNetwork=False,
        dnsPolicy="ClusterFirst",
        securityContext={"runAsNonRoot": True},
        trainer={
            "env": [{"name": "LR", "value": "0.1"}],
            "resources": {"limits": {"rdma/hca": "2", "nvidia.com/gpu": 8}},
            "securityContext": {"capabilities": {"drop": ["NET_RAW"], "add": ["SYS_PTRACE"]}},
        },
    )
    chosen = fabric_of(gpu_job(profile="own"), cluster_of(own=EVERYTHING))
    assert isinstance(chosen, ChosenFabric)
    spec = pod_with(chosen, job)["spec"]
    trainer = spec["containers"][0]
    assert spec["nodeSelector"] == {"fabric": "ib", "pool": "a"}
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (False, "ClusterFirst")
    assert trainer["resources"]["limits"] == {"nvidia.com/gpu": 8, "rdma/hca": "2"}
    assert [item for item in trainer["env"] if item["name"] == "LR"] == [
        {"name": "LR", "value": "0.1"}
    ]
    context = trainer["securityContext"]
    assert context["capabilities"] == {"drop": ["NET_RAW"], "add": ["SYS_PTRACE", "IPC_LOCK"]}
    assert "runAsUser" not in context
    assert spec["securityContext"]["runAsNonRoot"] is True


def test_parts_of_the_template_with_the_same_name_are_kept() -> None:
    own: dict[str, Any] = {
        "volumes": [{"name": "gib", "emptyDir": {}}],
        "initContainers": [{"name": "daemon", "image": "mine"}],
        "resourceClaims": [{"name": "nic", "resourceClaimName": "mine"}],
    }
    mounts = [{"name": "gib", "mountPath": "/usr/local/gib", "readOnly": True}]
    job = gpu_job(trainer={"volumeMounts": mounts}, **own)
    chosen = fabric_of(gpu_job(profile="own"), cluster_of(own=EVERYTHING))
    assert isinstance(chosen, ChosenFabric)
    spec = pod_with(chosen, job)["spec"]
    for part, (item,) in own.items():
        named = [each for each in spec[part] if each["name"] == item["name"]]
        assert [{**each, **item} for each in named] == named, part
        assert len(named) == 1, part
    mounted = spec["containers"][0]["volumeMounts"]
    assert [m for m in mounted if m["mountPath"] == "/usr/local/gib"] == mounts


def test_a_privileged_profile_keeps_what_the_template_says_of_privileges() -> None:
    own = FabricSpec(
        carries=FabricRequirement.RDMA,
        pod=FabricPod(privileged=True, run_as_user=0, capabilities=("IPC_LOCK",)),
    )
    chosen = fabric_of(gpu_job(profile="own"), cluster_of(own=own))
    assert isinstance(chosen, ChosenFabric)
    (trainer,) = pod_with(chosen, gpu_job())["spec"]["containers"]
    context = trainer["securityContext"]
    assert context["privileged"] is True
    assert (context["runAsUser"], context["runAsNonRoot"]) == (0, False)
    assert "allowPrivilegeEscalation" not in context, "the API server refuses both together"
    less = gpu_job(trainer={"securityContext": {"privileged": False}})
    (trainer,) = pod_with(chosen, less)["spec"]["containers"]
    assert trainer["securityContext"]["privileged"] is False
    assert trainer["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]


def test_a_daemon_that_the_template_has_as_a_container_is_not_added_again() -> None:
    daemon = {"name": "daemon", "image": "mine"}
    trainer = {"name": "trainer", "image": "i", "command": ["train"]}
    job = job_of(template={"spec": {"containers": [daemon, trainer]}})
    chosen = fabric_of(gpu_job(profile="own"), cluster_of(own=EVERYTHING))
    assert isinstance(chosen, ChosenFabric)
    spec = pod_with(chosen, job)["spec"]
    assert "initContainers" not in spec, "two containers of one name are refused"


def test_a_null_field_counts_as_absent() -> None:
    """Helm templates leave such fields, and the API server keeps them below unknown fields."""
    parts = ("tolerations", "securityContext", "volumes", "initContainers", "nodeSelector")
    trainer = dict.fromkeys(("env", "ports", "volumeMounts", "securityContext"))
    nothing: dict[str, Any] = dict.fromkeys(parts)
    job = gpu_job(trainer=trainer, **nothing)
    chosen = fabric_of(gpu_job(profile="own"), cluster_of(own=EVERYTHING))
    assert isinstance(chosen, ChosenFabric)
    assert pod_with(chosen, job) == pod_with(chosen, gpu_job())


def test_tcp_adds_only_an_annotation() -> None:
    pod = pod_with(ChosenFabric("tcp", "Any", {}), job_of())
    bare = children.worker(job_of(), 0, 1, key_id=KEY)
    del pod["metadata"]["annotations"]["paceline.dev/fabric"]
    assert pod == bare
