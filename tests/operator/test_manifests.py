"""The manifests of child objects: golden files, and properties of every template."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from paceline import environment as runtime_settings
from paceline_api import names
from paceline_api.jobfile import read_job_file, read_resolved_job
from paceline_api.rounds import RoundSettings
from paceline_operator.core.job import JobObject, read_job
from paceline_operator.core.keys import hkdf, job_keys, key_id
from paceline_operator.core.pods import children
from paceline_operator.core.pods.frozen import file_id, job_file, settings_differ
from paceline_operator.core.pods.service import service

from testing.fake_cluster.parts import KEY, job_body

GOLDEN = Path(__file__).parent / "golden"
RICH: dict[str, Any] = {
    "replicas": 3,
    "procsPerReplica": 2,
    "checkpoint": {"path": "/checkpoints", "claimName": "ckpt"},
    "elasticity": {"drainGraceSeconds": 90, "autoscaler": "MayEvict"},
    "scheduling": {"topologyKey": "topology.kubernetes.io/rack"},
    "coordinator": {"nodeSelector": {"pool": "small"}},
    "template": {
        "metadata": {"labels": {"team": "a"}, "annotations": {"note": "x"}},
        "spec": {
            "imagePullSecrets": [{"name": "registry"}],
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "serviceAccountName": "trainer",
            "containers": [
                {
                    "name": "trainer",
                    "image": "registry/trainer:2",
                    "imagePullPolicy": "Always",
                    "command": ["python", "train.py"],
                    "args": ["--lr=$(LR)"],
                    "workingDir": ".",
                    "env": [{"name": "LR", "value": "0.1"}],
                    "resources": {"limits": {"nvidia.com/gpu": 2}},
                },
                {"name": "logger", "image": "logger:1"},
            ],
        },
    },
}


def job_of(**spec: Any) -> JobObject:
    body = job_body(**spec)
    body["metadata"] |= {
        "namespace": "team-a",
        "uid": "0123456789abcdef",
        "generation": 1,
        "creationTimestamp": "2027-01-15T08:00:00Z",
    }
    job = read_job(body)
    assert not job.problems, job.problems
    return job


def manifests(name: str) -> list[dict[str, Any]]:
    job = job_of() if name == "plain" else job_of(**copy.deepcopy(RICH))
    notes = {"paceline.dev/cause": "Slow"}
    replaced = children.worker(job, 1, 4, notes=notes, avoid=("node-7",), key_id=KEY)
    return [
        children.worker(job, 0, 1, key_id=KEY),
        *([replaced] if name == "rich" else []),
        children.coordinator(job, 1, key_id=KEY),
        service("team-a"),
    ]


@pytest.mark.parametrize("name", ["plain", "rich"])
def test_children_match_the_golden_file(name: str, request: pytest.FixtureRequest) -> None:
    """To accept a change, delete the file, run again and read the difference."""
    file = GOLDEN / f"{name}.yaml"
    text = yaml.safe_dump_all(manifests(name), sort_keys=True, width=100)
    if not file.exists():
        GOLDEN.mkdir(exist_ok=True)
        file.write_text(text)
        pytest.fail(f"{file.name} was missing and has been written; read it and run again")
    assert text == file.read_text()


def env_of(pod: dict[str, Any]) -> dict[str, Any]:
    container = pod["spec"]["containers"][0]
    return {item["name"]: item.get("value") for item in container["env"]}


def test_the_members_of_a_model_parallel_pod_are_groups_of_ranks() -> None:
    """An agent starts groups of ranks, and the operator counts them (R50)."""
    job = job_of(procsPerReplica=4, parallelism={"model": 2})
    assert env_of(children.worker(job, 0, 1, key_id=KEY))["PACELINE_PROCS"] == "2"
    assert job.settings is not None
    assert (job.settings.procs_per_replica, job.settings.model) == (2, 2)
    assert job.settings.world_size == 2 * job.settings.replicas


def test_agents_and_coordinators_can_parse_their_environment() -> None:
    """A placeholder stands for each value that only the kubelet can fill in."""
    job = job_of(**copy.deepcopy(RICH))
    env = {
        name: value or "filled-in"
        for name, value in env_of(children.worker(job, 2, 3, key_id=KEY)).items()
    }
    agent = runtime_settings.AgentSettings.from_environment(env)
    assert (agent.slot, agent.attempt, agent.procs) == (2, 3, 2)
    assert agent.drain_grace_s == 90
    assert agent.coordinators == ("https://digits-coordinator.paceline-jobs.team-a:7070",)
    filled = {
        n: v or "filled-in" for n, v in env_of(children.coordinator(job, 1, key_id=KEY)).items()
    }
    coordinator = runtime_settings.CoordinatorSettings.from_environment(filled)
    assert coordinator.tls is not None
    assert coordinator.listen == ("0.0.0.0", names.COORDINATOR_PORT)
    assert coordinator.linger_s == children.LINGER_S


def test_environment_names_match_those_of_the_runtime() -> None:
    shared = {name for name in vars(names) if name.startswith("ENV_")}
    for name in shared & set(vars(runtime_settings)):
        assert getattr(names, name) == getattr(runtime_settings, name)
    assert shared - set(vars(runtime_settings)) == {
        "ENV_NAMESPACE",
        "ENV_OPERATOR_IDENTITY",
        "ENV_OPERATOR_NAMESPACE",
        "ENV_VERSION",
    }


def test_the_job_file_leaves_the_environment_to_the_kubelet(tmp_path: Path) -> None:
    """The kubelet sets the agent's environment, and its ranks inherit it."""
    job = job_of(**copy.deepcopy(RICH))
    file = tmp_path / "job.json"
    file.write_text(job_file(job))
    parsed = read_job_file(file)
    assert parsed.env == ()
    assert parsed.command == ("python", "train.py", "--lr=$(LR)")
    assert read_resolved_job(file) == job.settings


def test_only_settings_that_the_coordinator_can_change_are_sent_again() -> None:
    job = job_of()
    assert job.settings is not None
    wanted = msgspec.to_builtins(RoundSettings.of(job.settings.collective))
    reported = json.loads(msgspec.json.encode(wanted))
    assert settings_differ(wanted, reported) == []
    assert settings_differ(wanted, reported | {"mode": "Solo", "pacing": "Samples"}) == ["mode"]
    del reported["late"]
    assert settings_differ(wanted, reported) == []


@pytest.mark.parametrize("spec", [{}, RICH])
def test_pods_fit_a_restricted_namespace_and_have_no_token(spec: dict[str, Any]) -> None:
    job = job_of(**copy.deepcopy(spec))
    for pod in (children.worker(job, 0, 1, key_id=KEY), children.coordinator(job, 1, key_id=KEY)):
        body = pod["spec"]
        assert body["automountServiceAccountToken"] is False
        assert body["securityContext"]["runAsNonRoot"] is True
        assert body["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in body["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert body["topologySpreadConstraints"], "or the scheduler scans all Services"
        owner = pod["metadata"]["ownerReferences"][0]
        assert owner["controller"] is True
        assert owner["blockOwnerDeletion"] is False


def test_only_the_coordinator_gets_the_private_key() -> None:
    job = job_of()

    def files(pod: dict[str, Any]) -> set[str]:
        volume = next(v for v in pod["spec"]["volumes"] if "secret" in v)
        return {item["key"] for item in volume["secret"]["items"]}

    assert "tls.key" not in files(children.worker(job, 0, 1, key_id=KEY))
    assert "tls.key" in files(children.coordinator(job, 1, key_id=KEY))


def test_settings_of_the_template_are_kept() -> None:
    trainer = {
        "name": "trainer",
        "image": "t",
        "command": ["x"],
        "volumeMounts": [{"name": "own", "mountPath": "/dev/shm"}],
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
    }
    spec = {
        "terminationGracePeriodSeconds": 7,
        "securityContext": {"runAsNonRoot": False},
        "topologySpreadConstraints": [{"maxSkew": 2}],
        "containers": [trainer],
        "volumes": [{"name": "own", "emptyDir": {}}],
    }
    job = job_of(template={"spec": spec})
    pod = children.worker(job, 0, 1, key_id=KEY)["spec"]
    assert pod["terminationGracePeriodSeconds"] == 7
    assert pod["securityContext"]["runAsNonRoot"] is False
    assert pod["topologySpreadConstraints"] == [{"maxSkew": 2}]
    assert pod["containers"][0]["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}
    mounts = [m for m in pod["containers"][0]["volumeMounts"] if m["mountPath"] == "/dev/shm"]
    assert mounts == [{"name": "own", "mountPath": "/dev/shm"}]


def test_names_of_the_template_are_not_taken_again() -> None:
    """Two volumes or two ports of one name would be refused."""
    ours = ["paceline-job", "paceline-tokens", "paceline-run", "paceline-run-2", "paceline-shm"]
    trainer = {
        "name": "trainer",
        "image": "t",
        "command": ["x"],
        "ports": [{"name": "metrics", "containerPort": 8080}],
        "volumeMounts": [{"name": "paceline-run", "mountPath": "/data"}],
    }
    volumes: list[dict[str, Any]] = [{"name": name, "emptyDir": {}} for name in ours]
    spec = {"containers": [trainer, {"name": "coordinator", "image": "c"}], "volumes": volumes}
    job = job_of(template={"spec": spec}, checkpoint={"path": "/checkpoints", "claimName": "c"})
    made = children.worker(job, 0, 1, key_id=KEY)["spec"]
    volume_names = [volume["name"] for volume in made["volumes"]]
    assert len(set(volume_names)) == len(volume_names) == len(ours) + 5
    container = made["containers"][0]
    by_path = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert by_path["/data"] == "paceline-run", "the user's mount is untouched"
    run = by_path[names.POD_RUN_DIR]
    assert run == "paceline-run-3"
    assert {"name": run, "emptyDir": {}} in made["volumes"]
    assert [(port["name"], port["containerPort"]) for port in container["ports"]] == [
        ("metrics", 8080),
        ("paceline", 9464),
    ]


def test_labels_of_the_template_are_what_its_pods_have() -> None:
    own = {"app.kubernetes.io/name": "vision", "app.kubernetes.io/managed-by": "argo"}
    template = job_body()["spec"]["template"] | {"metadata": {"labels": own}}
    made = children.worker(job_of(template=template), 0, 1, key_id=KEY)["metadata"]["labels"]
    assert own.items() <= made.items()
    assert made["paceline.dev/role"] == "worker"


@pytest.mark.parametrize(
    ("grace_s", "drain_s"), [(None, 60), (600, 60), (75, 60), (30, 23), (7, 6), (1, 1), (0, 1)]
)
def test_ranks_leave_within_the_grace_period_that_the_template_allows(
    grace_s: int | None, drain_s: int
) -> None:
    template = job_body()["spec"]["template"]
    if grace_s is not None:
        template["spec"]["terminationGracePeriodSeconds"] = grace_s
    pod = children.worker(job_of(template=template), 0, 1, key_id=KEY)
    assert pod["spec"]["terminationGracePeriodSeconds"] == (75 if grace_s is None else grace_s)
    assert env_of(pod)["PACELINE_DRAIN_GRACE_SECONDS"] == str(drain_s)


def test_both_autoscalers_keep_the_node_of_a_worker_unless_it_may_be_evicted() -> None:
    evict, disrupt = "cluster-autoscaler.kubernetes.io/safe-to-evict", "karpenter.sh/do-not-disrupt"

    def noted(**spec: Any) -> dict[str, str]:
        notes: dict[str, str] = children.worker(job_of(**spec), 0, 1, key_id=KEY)["metadata"][
            "annotations"
        ]
        return notes

    kept = noted()
    assert (kept[evict], kept[disrupt]) == ("false", "true")
    moved = noted(elasticity={"autoscaler": "MayEvict"})
    assert moved[evict] == "true"
    assert disrupt not in moved
    template = job_body()["spec"]["template"] | {"metadata": {"annotations": {disrupt: "false"}}}
    assert noted(template=template)[disrupt] == "false", "the template has the last word"


def test_the_longest_job_name_fits_names_and_labels() -> None:
    longest = "a" * names.JOB_NAME_MAX
    body = job_body(longest)
    body["metadata"] |= {"uid": "0123456789abcdef"}
    job = read_job(body)
    for pod in (
        children.worker(job, 9_999, 9_999, key_id=KEY),
        children.coordinator(job, 9_999, key_id=KEY),
    ):
        assert len(pod["metadata"]["name"]) <= 63
        assert len(pod["spec"].get("hostname", "")) <= 63
        assert all(len(value) <= 63 for value in pod["metadata"]["labels"].values())


def test_keys_differ_by_job_and_operator() -> None:
    one, two = bytes(32), bytes(31) + b"\1"
    assert job_keys(one, "uid-1") == job_keys(one, "uid-1")
    made = [job_keys(key, uid) for key in (one, two) for uid in ("uid-1", "uid-2")]
    assert len({token for keys in made for token in (keys.token, keys.operator_token)}) == 8
    keys = job_keys(one, "uid-1")
    seeds = (keys.server_seed, keys.callers_seed, keys.agent_seed, keys.operator_seed)
    assert len({*(seed.hex() for seed in seeds), keys.token, keys.operator_token}) == 6
    assert len(key_id(one)) == 8
    with pytest.raises(ValueError, match="32 are needed"):
        job_keys(b"short", "uid-1")


def test_hkdf_gives_the_published_values() -> None:
    """The values are those of test case 1 of RFC 5869."""
    key = hkdf(b"\x0b" * 22, bytes.fromhex("f0f1f2f3f4f5f6f7f8f9"), 42, bytes(range(13)))
    assert key.hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )


def test_the_secret_is_immutable_and_owned() -> None:
    job = job_of()
    keys = job_keys(bytes(32), job.uid)
    made = children.secret(job, keys, tls={"tls.crt": "CRT", "tls.key": "KEY"})
    assert made["metadata"]["name"] == f"digits-01234567-{keys.key_id}-2-{file_id(job)}"
    assert made["immutable"] is True
    assert base64.b64decode(made["data"]["token"]).decode() == keys.token
    own = base64.b64decode(made["data"]["operator-token"]).decode()
    assert own == keys.operator_token
    assert sorted(made["data"]) == ["job.json", "operator-token", "tls.crt", "tls.key", "token"]


def test_only_the_coordinator_has_the_operator_token() -> None:
    job = job_of(**copy.deepcopy(RICH))
    assert "operator-token" not in json.dumps(children.worker(job, 0, 1, key_id=KEY))
    assert "operator-token" in json.dumps(children.coordinator(job, 1, key_id=KEY))


def test_finish_and_step_deadlines_reach_agents_and_coordinator(tmp_path: Path) -> None:
    """Without finishDeadlineSeconds and stepDeadlineSeconds they are 10 and 30 minutes."""
    both = {"finishDeadlineSeconds": 7, "stepDeadlineSeconds": 9}
    for spec, finish_s, step_s in (({}, 600, 1800), (both, 7, 9)):
        (tmp_path / "job.json").write_text(job_file(job_of(**spec)))
        file = tmp_path / "job.json"
        for job in (read_job_file(file), read_resolved_job(file)):
            assert job.finish_deadline_ns == finish_s * 10**9
            assert job.step_deadline_ns == step_s * 10**9


def test_a_required_checkpoint_reaches_the_coordinator(tmp_path: Path) -> None:
    for required in (False, True):
        spec = {"checkpoint": {"path": "/checkpoints", "required": required}}
        (tmp_path / "job.json").write_text(job_file(job_of(**spec)))
        kept = read_resolved_job(tmp_path / "job.json").checkpoint
        assert kept is not None
        assert kept.required is required
