"""The coordinator's own pod: where it may run, and what is reported when it cannot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from paceline_api.pods.coordinator import RESOURCES
from paceline_operator.core.changes import Changes
from paceline_operator.core.decide import backoff
from paceline_operator.core.observed import NOT_STARTED, Observed, Pod, PodEnd, Sent
from paceline_operator.core.pods import children
from paceline_operator.core.pods.fabric import ChosenFabric
from paceline_operator.core.reconcile import reconcile

from testing.fake_cluster.observations import COORDINATOR, NOW, RUNNING, job_of, training, worker
from testing.fake_cluster.parts import KEY, job_body

ON_GPUS = {
    "requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [
            {"matchExpressions": [{"key": "pool", "operator": "In", "values": ["jobs"]}]}
        ]
    }
}
APART = {
    "requiredDuringSchedulingIgnoredDuringExecution": [
        {"labelSelector": {}, "topologyKey": "kubernetes.io/hostname"}
    ]
}


def condition(changes: Changes, kind: str) -> dict[str, Any]:
    assert changes.status is not None
    return next(c for c in changes.status["conditions"] if c["type"] == kind)


def with_coordinator(*pods: Pod) -> Observed:
    return Observed(pods=(worker(0), worker(1), *pods), sent=Sent(secret=True))


@pytest.mark.parametrize("words", ["ErrImagePull: no such image", "CrashLoopBackOff: no module"])
def test_a_coordinator_that_cannot_start_is_reported_like_a_worker(words: str) -> None:
    pod = replace(COORDINATOR, phase="Pending", waiting=words, created_s=NOW)
    degraded = condition(reconcile(job_of(), with_coordinator(pod), NOW), "Degraded")
    assert degraded["reason"] == "PodNotStarting"
    assert degraded["message"] == f"digits-coordinator-1: {words}"


def test_an_unschedulable_coordinator_quotes_the_scheduler() -> None:
    words = "0/3 nodes are available: 3 Insufficient cpu"
    pod = replace(COORDINATOR, phase="Pending", node="", unschedulable=words)
    changes = reconcile(job_of(), with_coordinator(pod), NOW)
    scheduled = condition(changes, "Scheduled")
    assert (scheduled["status"], scheduled["reason"]) == ("False", "Unschedulable")
    assert scheduled["message"] == f"digits-coordinator-1: {words}"
    placed = reconcile(job_of(), with_coordinator(COORDINATOR), NOW)
    assert condition(placed, "Scheduled")["status"] == "True"


# ---- refused by its node ------------------------------------------------------------------------


def refused(attempt: int, **fields: Any) -> Pod:
    base = replace(
        COORDINATOR,
        name=f"digits-coordinator-{attempt}",
        uid=f"coordinator-{attempt}",
        attempt=attempt,
        phase="Failed",
        end=PodEnd(NOT_STARTED, "OutOfcpu", "Node didn't have enough resource: cpu"),
        ended_seen_s=NOW,
        created_s=NOW - 1,
    )
    return replace(base, **fields)


def test_a_coordinator_refused_by_its_node_is_recreated_after_a_pause() -> None:
    """Without the pause a node that refuses it would be asked without end."""
    job, observed = job_of(), with_coordinator(refused(1))
    first = reconcile(job, observed, NOW)
    assert first.coordinator is not None, "nothing after the first refusal"
    notes = first.coordinator.manifest["metadata"]["annotations"]
    assert notes[backoff.NOTE_SLOT_FAILURES] == "1"
    again = with_coordinator(refused(1), refused(2, notes={backoff.NOTE_SLOT_FAILURES: "1"}))
    waits = reconcile(job, again, NOW)
    assert waits.coordinator is None
    degraded = condition(waits, "Degraded")
    assert degraded["reason"] == "PodNotStarting"
    assert "digits-coordinator-2 was refused by its node" in degraded["message"]
    assert "enough resource: cpu" in degraded["message"]
    assert waits.look_again_s is not None
    later = reconcile(job, again, waits.look_again_s)
    assert later.coordinator is not None
    assert later.coordinator.name == "digits-coordinator-3"


def test_an_evicted_coordinator_is_recreated_at_once() -> None:
    evicted = refused(2, end=PodEnd(137, "Evicted"), notes={backoff.NOTE_SLOT_FAILURES: "5"})
    changes = reconcile(job_of(RUNNING), with_coordinator(evicted), NOW)
    assert changes.coordinator is not None


def test_only_the_last_ended_coordinators_are_kept() -> None:
    old = [refused(attempt, ended_seen_s=NOW - 90) for attempt in range(1, 7)]
    present = replace(COORDINATOR, attempt=7, name="digits-coordinator-7")
    observed = training(3)
    workers = tuple(pod for pod in observed.pods if pod.is_worker)
    changes = reconcile(
        job_of(RUNNING, replicas=3), replace(observed, pods=(*workers, *old, present)), NOW
    )
    gone = sorted(deletion.name for deletion in changes.delete)
    assert gone == [f"digits-coordinator-{n}" for n in range(1, 7 - backoff.KEPT)]


# ---- settings inherited from the worker's template ----------------------------------------------


def spec_of(template: dict[str, Any], **coordinator: Any) -> dict[str, Any]:
    spec = job_body()["spec"]["template"]["spec"] | template
    job = job_of(template={"spec": spec}, **({"coordinator": coordinator} if coordinator else {}))
    assert not job.problems, job.problems
    made: dict[str, Any] = children.coordinator(job, 1, key_id=KEY)["spec"]
    return made


def test_the_coordinator_has_the_template_service_account_without_a_token() -> None:
    made = spec_of({"serviceAccountName": "trainer"})
    assert made["serviceAccountName"] == "trainer"
    assert made["automountServiceAccountToken"] is False, "the secrets, not the rights"


def test_the_coordinator_inherits_only_the_node_affinity() -> None:
    affinity = {"nodeAffinity": ON_GPUS, "podAntiAffinity": APART, "podAffinity": APART}
    assert spec_of({"affinity": affinity})["affinity"] == {"nodeAffinity": ON_GPUS}
    assert "affinity" not in spec_of({"affinity": {"podAntiAffinity": APART}})


@pytest.mark.parametrize(
    "own", [{"nodeSelector": {"pool": "small"}}, {"affinity": {"podAffinity": APART}}]
)
def test_a_placement_of_its_own_replaces_the_inherited_affinity(own: dict[str, Any]) -> None:
    made = spec_of({"affinity": {"nodeAffinity": ON_GPUS}}, **own)
    assert made.get("affinity") == own.get("affinity")


def test_its_own_priority_tolerations_and_resources_win() -> None:
    tolerated = [{"key": "small", "operator": "Exists"}]
    room = {"limits": {"memory": "1Gi"}, "requests": {"cpu": "100m"}}
    template = {
        "priorityClassName": "low",
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    }
    own = {"priorityClassName": "high", "tolerations": tolerated, "resources": room}
    made = spec_of(template, **own)
    assert (made["priorityClassName"], made["tolerations"]) == ("high", tolerated)
    assert made["containers"][0]["resources"] == room
    inherited = spec_of(template)
    assert inherited["priorityClassName"] == "low"
    assert inherited["tolerations"] == template["tolerations"]
    assert inherited["containers"][0]["resources"] == RESOURCES


def metadata_of(
    labels: dict[str, str], annotations: dict[str, str] | None = None, **spec: Any
) -> dict[str, Any]:
    template = job_body()["spec"]["template"]
    template["metadata"] = {"labels": labels, "annotations": annotations or {}}
    template["spec"] |= spec
    made: dict[str, Any] = children.coordinator(job_of(template=template), 1, key_id=KEY)
    return dict(made["metadata"])


def test_a_coordinator_has_the_labels_and_annotations_that_policies_want() -> None:
    labels = {"team": "vision", "cost-center": "7", "app.kubernetes.io/component": "ranks"}
    made = metadata_of(labels, {"owner": "a@b.c", "kubernetes.io/egress-bandwidth": "1G"})
    assert (made["labels"]["team"], made["labels"]["cost-center"]) == ("vision", "7")
    assert made["labels"]["app.kubernetes.io/component"] == "coordinator"
    assert made["annotations"]["owner"] == "a@b.c"
    assert made["annotations"]["kubernetes.io/egress-bandwidth"] == "1G"


@pytest.mark.parametrize(
    "name",
    [
        "kueue.x-k8s.io/queue-name",
        "kueue.x-k8s.io/pod-group-name",
        "scheduling.x-k8s.io/pod-group",
        "scheduling.k8s.io/group-name",
        "pod-group-name",
        "k8s.v1.cni.cncf.io/networks",
        "networking.gke.io/interfaces",
        "devices.gke.io/container.tcpxo-daemon",
        "container.apparmor.security.beta.kubernetes.io/trainer",
        "kubectl.kubernetes.io/default-container",
        "prometheus.io/scrape",
        "karpenter.sh/do-not-disrupt",
        "vault.hashicorp.com/agent-inject",
        "instrumentation.opentelemetry.io/inject-python",
        "gke-gcsfuse/volumes",
    ],
)
def test_a_coordinator_lacks_what_would_have_an_effect_of_its_own(name: str) -> None:
    made = metadata_of({name: "x", "team": "a"}, {name: "x", "team": "a"})
    assert name not in made["labels"]
    assert name not in made["annotations"]
    assert made["labels"]["team"] == made["annotations"]["team"] == "a"


def test_a_coordinator_may_be_moved_whatever_the_template_says_of_workers() -> None:
    note = "cluster-autoscaler.kubernetes.io/safe-to-evict"
    assert metadata_of({}, {note: "false"})["annotations"][note] == "true"


@pytest.mark.parametrize(
    "selector",
    [
        {"matchLabels": {"app": "ranks"}},
        {"matchExpressions": [{"key": "app", "operator": "In", "values": ["ranks"]}]},
        {"matchExpressions": [{"key": "app", "operator": "Exists"}]},
    ],
)
def test_a_coordinator_lacks_the_label_by_which_workers_keep_apart(
    selector: dict[str, Any],
) -> None:
    """The label would make an anti-affinity of one worker per node take a node from the workers."""
    term = {"labelSelector": selector, "topologyKey": "kubernetes.io/hostname"}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    weighted = [{"weight": 1, "podAffinityTerm": term}]
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": weighted}
    placements: list[dict[str, Any]] = [
        {"affinity": {"podAntiAffinity": required}},
        {"affinity": {"podAffinity": preferred}},
        {"topologySpreadConstraints": [{**term, "maxSkew": 1}]},
    ]
    for placement in placements:
        made = metadata_of({"app": "ranks", "team": "a"}, **placement)
        assert "app" not in made["labels"], placement
        assert made["labels"]["team"] == "a"


def test_a_coordinator_tolerates_the_taint_that_admission_lets_workers_tolerate() -> None:
    """ExtendedResourceToleration adds it to pods that ask for the device, which it does not."""
    template = {
        "nodeSelector": {"pool": "gpus"},
        "containers": [
            {
                "name": "trainer",
                "image": "t",
                "command": ["x"],
                "resources": {"limits": {"cpu": 4, "nvidia.com/gpu": 8, "vendor.example/nic": 1}},
            }
        ],
    }
    tolerations = [
        {"key": key, "operator": "Exists", "effect": "NoSchedule"}
        for key in ("nvidia.com/gpu", "vendor.example/nic")
    ]
    assert spec_of(template)["tolerations"] == tolerations
    own = [{"key": "small", "operator": "Exists"}]
    assert spec_of(template, tolerations=own)["tolerations"] == own
    network = ChosenFabric("ib", "RDMA", {"tolerations": [{"key": "ib", "operator": "Exists"}]})
    made = children.coordinator(job_of(), 1, key_id=KEY, fabric=network)["spec"]
    assert made["tolerations"] == [{"key": "ib", "operator": "Exists"}]


def test_a_coordinator_names_each_resource_that_a_quota_can_demand() -> None:
    made = spec_of({})["containers"][0]["resources"]
    assert {part: set(made[part]) for part in made} == {
        "requests": {"cpu", "memory"},
        "limits": {"cpu", "memory"},
    }
    trainer = job_body()["spec"]["template"]["spec"]["containers"][0]
    trainer["resources"] = {"limits": {"ephemeral-storage": "50Gi"}}
    made = spec_of({"containers": [trainer]})["containers"][0]["resources"]
    assert made["limits"]["ephemeral-storage"] == "1Gi"
    assert "ephemeral-storage" not in made["requests"]


def test_a_coordinator_has_no_sysctls_of_the_workers() -> None:
    sysctls = [{"name": "net.core.somaxconn", "value": "1024"}]
    made = spec_of({"securityContext": {"sysctls": sysctls, "fsGroup": 7}})
    assert made["securityContext"]["fsGroup"] == 7
    assert "sysctls" not in made["securityContext"]
