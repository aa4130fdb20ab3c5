"""Security settings of pods: a default never contradicts what the template says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from paceline_api.pods.security import Level, violations
from paceline_operator.core.job import read_job
from paceline_operator.core.pods import children
from paceline_operator.core.pods.fabric import ChosenFabric

from testing.fake_cluster.observations import UID, job_of
from testing.fake_cluster.parts import KEY, job_body
from testing.security_templates import ROWS, SECCOMP, Row

LEVELS = [Level.PRIVILEGED, Level.BASELINE, Level.RESTRICTED]


def pods_of(row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pods of a worker and of the coordinator."""
    body = row.body
    body["metadata"] |= {"uid": UID, "generation": 1}
    job = read_job(body)
    assert not job.problems, job.problems
    return children.worker(job, 0, 1, key_id=KEY), children.coordinator(job, 1, key_id=KEY)


@pytest.mark.parametrize("name", ROWS)
def test_defaults_are_set_only_where_the_template_is_silent(name: str) -> None:
    row = ROWS[name]
    spec = pods_of(row)[0]["spec"]
    assert spec["securityContext"] == row.expected_pod
    containers = [*spec["containers"], *spec.get("initContainers", ())]
    assert containers[0].get("securityContext") == row.expected_trainer
    assert [c.get("securityContext") for c in containers[1:]] == [row.expected_more] * bool(
        row.more[0]
    )


@pytest.mark.parametrize("name", ROWS)
def test_the_operator_holds_the_pods_to_the_level_that_they_fit(name: str) -> None:
    worker = pods_of(ROWS[name])[0]
    fits = [level for level in LEVELS if not violations(worker, level)]
    assert fits == LEVELS[: LEVELS.index(Level(ROWS[name].level)) + 1]


@pytest.mark.parametrize("name", ROWS)
def test_the_coordinator_runs_as_the_user_of_the_trainer_without_its_privileges(
    name: str,
) -> None:
    """It has the same image, whose user may be root where the trainer may be."""
    worker, coordinator = (pod["spec"] for pod in pods_of(ROWS[name]))

    def users(spec: dict[str, Any]) -> dict[str, Any]:
        own = {**spec["securityContext"], **(spec["containers"][0].get("securityContext") or {})}
        return {key: own.get(key) for key in ("runAsUser", "runAsGroup", "runAsNonRoot")}

    assert users(coordinator) == users(worker)
    context = coordinator["containers"][0]["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert not context.get("privileged")
    assert not any(coordinator.get(field) for field in ("hostNetwork", "hostPID", "hostIPC"))


def test_the_coordinator_runs_as_the_user_that_a_fabric_profile_gives_the_trainer() -> None:
    network = ChosenFabric("ib", "RDMA", {"capabilities": ["IPC_LOCK"], "runAsUser": 0})
    made = children.coordinator(job_of(), 1, key_id=KEY, fabric=network)["spec"]
    assert made["securityContext"] == SECCOMP
    context = made["containers"][0]["securityContext"]
    assert (context["runAsUser"], context["runAsNonRoot"]) == (0, False)
    assert context["capabilities"] == {"drop": ["ALL"]}


def test_an_init_container_of_a_profile_keeps_its_privileges() -> None:
    first = {"name": "driver", "image": "d", "securityContext": {"privileged": True}}
    network = ChosenFabric("tcpxo", "TCP", {"initContainers": [first]})
    made = children.worker(job_of(), 0, 1, key_id=KEY, fabric=network)["spec"]
    assert made["initContainers"][0]["securityContext"] == {"privileged": True}
    assert "runAsNonRoot" not in made["securityContext"]
    assert made["containers"][0]["securityContext"]["runAsNonRoot"] is True


words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=3)
"""Texts without a zero byte, with which the whole job is invalid."""
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | words,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(words, below),
    max_leaves=6,
)
FIELDS = ["securityContext", "initContainers", "volumes"]


@pytest.mark.long
@given(
    st.dictionaries(st.sampled_from(FIELDS), anything),
    st.dictionaries(st.sampled_from(["securityContext", "ports", "volumeMounts"]), anything),
)
def test_a_malformed_template_is_left_for_the_api_server_to_refuse(
    spec: dict[str, Any], container: dict[str, Any]
) -> None:
    template = job_body()["spec"]["template"]
    template["spec"] |= spec
    template["spec"]["containers"][0] |= container
    job = job_of(template=template)
    assume(job.spec is not None)  # a key that cannot be printed is refused by the operator itself
    for pod in (children.worker(job, 0, 1, key_id=KEY), children.coordinator(job, 1, key_id=KEY)):
        assert pod["spec"]["containers"][0]["command"][:2] == ["python3", "-m"]
