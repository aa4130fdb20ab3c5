"""Fabric profiles: which one a job gets, and what this means for its pods and status."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from paceline_api.pods.devices import amount_of
from paceline_api.types.enums import FabricRequirement
from paceline_api.types.fabric import (
    PLAIN_SPEC,
    FabricMatch,
    FabricPod,
    FabricProfile,
    FabricSpec,
)
from paceline_operator import fabrics
from paceline_operator.cluster.store import Store
from paceline_operator.cluster.wire import FabricObject, fabric_from
from paceline_operator.core.decide import fabric
from paceline_operator.core.decide.fabric import NoFabric, fabric_of
from paceline_operator.core.observed import Node, Observed, Sent
from paceline_operator.core.pods.fabric import ChosenFabric
from paceline_operator.core.reconcile import reconcile
from paceline_operator.core.refusals import CreationRefusal, RefusalKind
from paceline_operator.fabrics import built_in

from testing.bad_fabrics import BREAKING
from testing.fake_cluster.fabrics import GPU, IB, NODES, cluster_of, free, gpu_job, name_of
from testing.fake_cluster.observations import NOW, coordinator_status, job_of, worker

# ---- choice of the profile ------------------------------------------------------------------


def test_auto_chooses_what_all_nodes_of_the_job_offer() -> None:
    assert name_of(fabric_of(gpu_job(), free())) == "rdma-hca-shared-devices-a"


def test_auto_gives_tcp_to_a_job_without_devices() -> None:
    assert name_of(fabric_of(job_of(), free())) == "tcp"


def test_auto_gives_tcp_if_some_nodes_lack_the_network() -> None:
    mixed = NODES | {"node-9": Node("node-9", offers=GPU)}
    assert name_of(fabric_of(gpu_job(), free(mixed))) == "tcp"
    # If it is required, the job waits for the nodes that have it.
    assert name_of(fabric_of(gpu_job("RDMA"), free(mixed))) == "rdma-hca-shared-devices-a"


@pytest.mark.parametrize(
    "other",
    [
        Node("node-9", offers=GPU, labels={"pool": "b"}),
        Node("node-9", offers=GPU, labels={"pool": "a"}, cordoned=True),
        Node("node-9", offers=GPU, labels={"pool": "a"}, ready=False),
        Node("node-9", labels={"pool": "a"}),
    ],
)
def test_nodes_on_which_no_worker_can_run_do_not_count(other: Node) -> None:
    job = gpu_job(nodeSelector={"pool": "a"})
    assert name_of(fabric_of(job, free(NODES | {"node-9": other}))) == "rdma-hca-shared-devices-a"


@pytest.mark.parametrize(
    ("gpus", "offers", "wanted"),
    [
        (8, {"vpc.amazonaws.com/efa": 4}, "aws-efa"),
        (1, {"vpc.amazonaws.com/efa": 4}, "tcp"),
        (1, {"rdma/hca_shared_devices_a": 63}, "rdma-hca-shared-devices-a"),
        (1, {"rdma/hca_shared_devices_a": 4}, "tcp"),
    ],
)
def test_auto_leaves_devices_for_other_workers_of_a_node(
    gpus: int, offers: dict[str, int], wanted: str
) -> None:
    """A worker of one GPU that took all adapters of its node would leave none for the next one."""
    job = gpu_job(trainer={"resources": {"limits": {"nvidia.com/gpu": gpus}}})
    nodes = {"node-1": Node("node-1", offers=GPU | offers)}
    assert name_of(fabric_of(job, free(nodes))) == wanted


def test_a_limit_of_zero_gpus_does_not_require_gpu_nodes() -> None:
    job = gpu_job("RDMA", trainer={"resources": {"limits": {"nvidia.com/gpu": 0}}})
    assert name_of(fabric_of(job, free({"n": Node("n", offers=IB)}))) == "rdma-hca-shared-devices-a"


def test_a_profile_fits_only_nodes_that_its_selector_matches() -> None:
    pod = FabricPod(resources=dict.fromkeys(IB, 1), node_selector={"rack": "b"})
    own = FabricSpec(carries=FabricRequirement.RDMA, priority=99, pod=pod)
    assert name_of(fabric_of(gpu_job(), free(own=own))) == "rdma-hca-shared-devices-a"


def test_a_job_that_trains_without_a_profile_continues_without_one() -> None:
    """It was started by a release that knew no profiles, and its workers must not differ."""
    job = replace(gpu_job(), status={"startTime": "2027-01-15T08:00:00Z"})
    assert name_of(fabric_of(job, free())) == "tcp"


@pytest.mark.parametrize(
    ("text", "amount"), [("8", 8), ("1k", 1000), ("2M", 2_000_000), ("1.5", 0), ("x", 0)]
)
def test_kubernetes_quantities_are_parsed(text: str, amount: int) -> None:
    assert amount_of(text) == amount


def test_the_highest_priority_wins_and_a_tie_is_reported() -> None:
    own = FabricSpec(carries=FabricRequirement.RDMA, pod=FabricPod(resources=dict.fromkeys(IB, 1)))
    assert name_of(fabric_of(gpu_job(), free(own=replace_priority(own, 11)))) == "own"
    assert name_of(fabric_of(gpu_job(), free(own=own))) == "rdma-hca-shared-devices-a"
    tied = fabric_of(gpu_job(), free(own=replace_priority(own, 10)))
    assert isinstance(tied, ChosenFabric)
    assert tied.profile == "tcp"
    assert "own and rdma-hca-shared-devices-a fit the nodes alike" in tied.message


def replace_priority(spec: FabricSpec, priority: int) -> FabricSpec:
    return spec.model_copy(update={"priority": priority})


def test_a_profile_that_carries_less_than_required_is_not_chosen() -> None:
    own = FabricSpec(
        carries=FabricRequirement.RDMA, priority=99, pod=FabricPod(resources=dict.fromkeys(IB, 1))
    )
    choice = fabric_of(gpu_job("GPUDirect"), free(own=own))
    assert name_of(choice) == "rdma-hca-shared-devices-a"
    named = fabric_of(gpu_job("GPUDirect", "own"), free(own=own))
    assert isinstance(named, NoFabric)
    assert "carries RDMA" in named.why


def test_a_profile_that_matches_nothing_is_never_chosen_by_auto() -> None:
    own = FabricSpec(carries=FabricRequirement.GPU_DIRECT, priority=99)
    assert name_of(fabric_of(gpu_job(), free(own=own))) == "rdma-hca-shared-devices-a"
    assert name_of(fabric_of(gpu_job(profile="own"), free(own=own))) == "own"


@pytest.mark.parametrize(("rack", "taken"), [("b", "own"), ("c", "rdma-hca-shared-devices-a")])
def test_a_profile_matches_nodes_by_their_labels(rack: str, taken: str) -> None:
    own = FabricSpec(
        carries=FabricRequirement.RDMA, priority=99, match=FabricMatch(node_labels={"rack": rack})
    )
    racks = {name: replace(node, labels={"rack": "b"}) for name, node in NODES.items()}
    assert name_of(fabric_of(gpu_job(), free(racks, own=own))) == taken


@pytest.mark.parametrize(
    ("expression", "fits"),
    [
        ({"key": "rack", "operator": "In", "values": ["a", "b"]}, True),
        ({"key": "rack", "operator": "In", "values": ["c"]}, False),
        ({"key": "hall", "operator": "In", "values": ["b"]}, False),
        ({"key": "rack", "operator": "NotIn", "values": ["c"]}, True),
        ({"key": "rack", "operator": "NotIn", "values": ["b"]}, False),
        ({"key": "hall", "operator": "NotIn", "values": ["b"]}, True),
        ({"key": "rack", "operator": "Exists"}, True),
        ({"key": "hall", "operator": "Exists"}, False),
        ({"key": "hall", "operator": "DoesNotExist"}, True),
        ({"key": "rack", "operator": "DoesNotExist"}, False),
    ],
)
def test_a_profile_matches_nodes_by_expressions_on_labels(
    expression: dict[str, Any], fits: bool
) -> None:
    match = FabricMatch.model_validate({"nodeExpressions": [expression]})
    own = FabricSpec(carries=FabricRequirement.RDMA, priority=99, match=match)
    racks = {name: replace(node, labels={"rack": "b"}) for name, node in NODES.items()}
    profile = name_of(fabric_of(gpu_job(), free(racks, own=own)))
    assert profile == ("own" if fits else "rdma-hca-shared-devices-a")


def test_a_missing_required_fabric_is_reported_with_what_was_looked_for() -> None:
    choice = fabric_of(gpu_job("RDMA"), free({"node-1": Node("node-1", offers=GPU)}))
    assert isinstance(choice, NoFabric)
    assert "rdma/hca_shared_devices_a" in choice.why
    assert "FabricProfile" in choice.why


def test_an_unknown_profile_name_lists_the_known_ones() -> None:
    choice = fabric_of(gpu_job(profile="rmda"), free())
    assert isinstance(choice, NoFabric)
    assert "rdma-hca-shared-devices-a" in choice.why


def test_all_means_the_smallest_amount_that_a_node_offers() -> None:
    nodes = {
        "node-1": Node("node-1", offers=GPU | {"vpc.amazonaws.com/efa": 32}),
        "node-2": Node("node-2", offers=GPU | {"vpc.amazonaws.com/efa": 16}),
    }
    chosen = fabric_of(gpu_job(), free(nodes))
    assert isinstance(chosen, ChosenFabric)
    assert (chosen.profile, chosen.pod["resources"]) == ("aws-efa", {"vpc.amazonaws.com/efa": 16})
    unseen = fabric_of(gpu_job(profile="aws-efa"), free({}))
    assert isinstance(unseen, NoFabric)
    assert "vpc.amazonaws.com/efa" in unseen.why


def test_a_chosen_profile_is_kept_after_the_profile_is_gone() -> None:
    first = fabric_of(gpu_job(), free())
    assert isinstance(first, ChosenFabric)
    later = replace(gpu_job(), status={"fabric": first.status()})
    gone = Observed(nodes={}, fabrics={})
    assert fabric_of(later, gone) == first


def test_after_a_crash_the_choice_is_read_from_the_pods() -> None:
    """Pods were created, and the operator died before it wrote the status."""
    made = worker(0, notes={"paceline.dev/fabric": "azure-shared-ib"})
    assert name_of(fabric_of(gpu_job(), replace(free(), pods=(made,)))) == "azure-shared-ib"


@pytest.mark.parametrize(
    "pod",
    [
        FabricPod(resources=dict.fromkeys(IB, 1), capabilities=("IPC_LOCK",)),
        FabricPod(resources=dict.fromkeys(IB, 1), run_as_user=0),
        FabricPod.model_validate(
            {"resources": dict.fromkeys(IB, 1), "volumes": [{"name": "v", "hostPath": {}}]}
        ),
        FabricPod.model_validate(
            {
                "resources": dict.fromkeys(IB, 1),
                "initContainers": [{"name": "i", "securityContext": {"privileged": True}}],
            }
        ),
        FabricPod(resources=dict.fromkeys(IB, 1), privileged=True),
        FabricPod(resources=dict.fromkeys(IB, 1), host_network=True),
    ],
    ids=["capability", "root", "host", "init", "privileged", "host network"],
)
def test_a_privileged_profile_is_used_only_if_asked_for(pod: FabricPod) -> None:
    """All nodes offer the network, but that is no reason to run a job's pods as root."""
    own = FabricSpec(carries=FabricRequirement.RDMA, priority=99, pod=pod)
    only = Observed(nodes=NODES, fabrics={"tcp": PLAIN_SPEC, "own": own})
    chosen = fabric_of(gpu_job(), only)
    assert isinstance(chosen, ChosenFabric)
    assert (chosen.profile, chosen.pod) == ("tcp", {})
    assert "spec.fabric.profile: own" in chosen.message
    assert "spec.fabric.required: RDMA" in chosen.message
    for asked in (gpu_job("RDMA"), gpu_job(profile="own")):
        assert name_of(fabric_of(asked, only)) == "own"
    assert name_of(fabric_of(gpu_job(), free(own=own))) == "rdma-hca-shared-devices-a"


def test_an_event_names_the_network_that_a_job_does_not_use() -> None:
    changes = reconcile(gpu_job(), replace(cluster_of(), sent=Sent(secret=True)), NOW)
    assert len(changes.workers) == 2
    assert changes.status is not None
    assert changes.status["fabric"]["profile"] == "tcp"
    (reported,) = (event for event in changes.events if event.reason == "FabricUnavailable")
    assert "rdma-hca-shared-devices-a" in reported.message
    trainer = changes.workers[0].manifest["spec"]["containers"][0]
    assert trainer["securityContext"].get("runAsUser") is None


def test_the_hint_about_a_network_hides_no_refusal_of_pods() -> None:
    refusal = CreationRefusal(
        RefusalKind.TEMPLATE, "spec.nodeNam: unknown field", NOW, 1, generation=3
    )
    refused = replace(cluster_of(), refusal=refusal, sent=Sent(secret=True))
    changes = reconcile(gpu_job(), refused, NOW)
    assert changes.workers == ()
    assert changes.status is not None
    assert changes.status["state"] == "TemplateInvalid"


# ---- in the decision ------------------------------------------------------------------------


def test_a_job_without_its_required_network_gets_no_pods() -> None:
    job = gpu_job("RDMA")
    changes = reconcile(job, replace(free({}), sent=Sent(secret=True)), NOW)
    assert changes.workers == ()
    assert changes.coordinator is None
    assert changes.status is not None
    assert changes.status["state"] == "FabricUnavailable"
    assert "fabric" not in changes.status
    assert [event.reason for event in changes.events] == ["FabricUnavailable"]
    assert changes.look_again_s is not None
    assert changes.look_again_s <= NOW + fabric.SEARCH_S


def test_status_and_pods_record_the_chosen_profile() -> None:
    changes = reconcile(gpu_job("RDMA"), replace(free(), sent=Sent(secret=True)), NOW)
    assert len(changes.workers) == 2
    assert changes.status is not None
    assert changes.status["fabric"]["profile"] == "rdma-hca-shared-devices-a"
    for create in changes.workers:
        note = create.manifest["metadata"]["annotations"]["paceline.dev/fabric"]
        assert note == "rdma-hca-shared-devices-a"


def test_a_running_job_goes_on_when_its_profile_is_deleted() -> None:
    first = fabric_of(gpu_job("RDMA"), free())
    assert isinstance(first, ChosenFabric)
    status = {"startTime": "2027-01-15T08:00:00Z", "fabric": first.status()}
    job = replace(gpu_job("RDMA"), status=status)
    one = (worker(0),)
    now = Observed(
        pods=one,
        coordinator=coordinator_status([*one]),
        coordinator_heard_s=NOW,
        sent=Sent(secret=True),
        fabrics={},
    )
    (made,) = reconcile(job, now, NOW).workers
    assert made.manifest["metadata"]["annotations"]["paceline.dev/fabric"] == first.profile


def test_a_forbidden_profile_that_is_not_required_is_replaced_by_tcp() -> None:
    words = 'pods "j-0-1" is forbidden: violates PodSecurity "restricted:latest": unrestricted'
    refusal = CreationRefusal(RefusalKind.TEMPLATE, words, NOW, 1, generation=3)
    refused = replace(free(), refusal=refusal, sent=Sent(secret=True))
    changes = reconcile(gpu_job(), refused, NOW)
    assert len(changes.workers) == 2
    trainer = changes.workers[0].manifest["spec"]["containers"][0]
    assert "add" not in trainer["securityContext"]["capabilities"]
    assert changes.status is not None
    assert changes.status["fabric"]["profile"] == "tcp"
    assert "pod-security.kubernetes.io" in changes.status["fabric"]["message"]
    assert "FabricUnavailable" in [event.reason for event in changes.events]
    assert changes.status["state"] != "TemplateInvalid"
    assert "TemplateInvalid" not in [event.reason for event in changes.events]
    # After a second refusal the template itself is at fault: it is reported, not retried.
    again = replace(refused, refusal=replace(refusal, count=2))
    assert reconcile(gpu_job(), again, NOW).workers == ()
    # A required fabric is not replaced silently.
    asked = reconcile(gpu_job("RDMA"), refused, NOW)
    assert asked.workers == ()
    assert asked.status is not None
    assert asked.status["state"] == "TemplateInvalid"


@pytest.mark.parametrize(
    ("kind", "words", "profile"),
    [
        (RefusalKind.FORBIDDEN, "unable to validate against any security context", "tcp"),
        (
            RefusalKind.QUOTA,
            "exceeded quota: q, requested: requests.rdma/hca_shared_devices_a=1",
            "tcp",
        ),
        (RefusalKind.QUOTA, "exceeded quota: q, requested: pods=1", "rdma-hca-shared-devices-a"),
        (RefusalKind.TEMPLATE, "spec.nodeNam: unknown field", "rdma-hca-shared-devices-a"),
    ],
)
def test_only_a_refusal_caused_by_the_profile_changes_the_choice(
    kind: RefusalKind, words: str, profile: str
) -> None:
    refusal = CreationRefusal(kind, words, NOW, 1, generation=3)
    assert name_of(fabric_of(gpu_job(), replace(free(), refusal=refusal))) == profile


# ---- profiles of the cluster ----------------------------------------------------------------


def test_built_in_profiles_are_valid_objects_with_their_sources() -> None:
    folder = Path(fabrics.__file__).parent
    files = sorted(folder.glob("*.yaml"))
    assert len(files) >= 19
    for file in files:
        profile = FabricProfile.model_validate(yaml.safe_load(file.read_text()))
        assert profile.metadata.name == file.stem
        assert profile.spec.description
        assert "ource: " in file.read_text(), "say where its settings come from"


def test_a_cluster_profile_overrides_a_built_in_one_until_deleted() -> None:
    changed: list[tuple[str, str]] = []
    store = Store(changed.append)
    store.put_job({"metadata": {"name": "j", "uid": "u", "resourceVersion": "1"}})
    own = FabricSpec(carries=FabricRequirement.ANY)
    changed.clear()
    store.put_fabric("aws-efa", own)
    assert store.fabrics["aws-efa"] is own
    store.drop_fabric("aws-efa")
    assert store.fabrics["aws-efa"] is built_in()["aws-efa"]
    store.put_fabric("mine", own)
    store.drop_fabric("mine")
    assert "mine" not in store.fabrics
    assert changed == [("default", "j")] * 4


def test_a_new_node_wakes_the_jobs_that_wait_for_one() -> None:
    changed: list[tuple[str, str]] = []
    store = Store(changed.append)
    store.put_job({"metadata": {"name": "j", "uid": "u", "resourceVersion": "1"}})
    changed.clear()
    store.put_node(Node("n"))
    store.put_node(Node("n"))
    assert changed == [("default", "j")]
    store.put_node(Node("n", offers=GPU))
    assert changed == [("default", "j")] * 2


def test_an_invalid_profile_is_reported() -> None:
    wrong = fabric_from(FabricObject(spec={"carries": "RDMA", "pod": {"resources": {"a/b": 0}}}))
    assert isinstance(wrong, str)
    assert "resources" in wrong
    parts: list[dict[str, Any]] = [{"resourceClaims": [{}]}, {"volumes": [{"name": ["a"]}]}]
    for part in (*parts, {"volumeMounts": [{}]}):
        assert isinstance(fabric_from(FabricObject(spec={"carries": "RDMA", "pod": part})), str)
    for rule, spec in BREAKING.items():
        message = fabric_from(FabricObject(spec={"carries": "RDMA", **spec}))
        assert isinstance(message, str)
        assert message.startswith(f"{rule} ")
    right = fabric_from(FabricObject(spec={"carries": "RDMA", "priority": None}))
    assert right == FabricSpec(carries=FabricRequirement.RDMA)
