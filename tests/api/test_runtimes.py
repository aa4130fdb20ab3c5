"""The merge of a job with its runtime, and what is wrong with a runtime or an override."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from paceline_api.errors import InvalidJobError, JobFileError
from paceline_api.reading.load import load_job, parse_job
from paceline_api.runtimes.merge import (
    MAY_OVERRIDE,
    Runtime,
    errors_of,
    merge,
    parts_of,
    show_parts,
)
from paceline_api.runtimes.reading import load_runtime, problems_of, runtime_from_mapping

NOTHING: dict[str, Any] = {}
NAMES = st.sampled_from(["a", "b", "c"])
WORDS = st.sampled_from(["x", "y", "1"])
ENV = st.lists(
    st.fixed_dictionaries({"name": NAMES}, optional={"value": WORDS}),
    max_size=3,
    unique_by=lambda item: str(item["name"]),
)
CONTAINER: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    NOTHING,
    optional={
        "image": WORDS,
        "command": st.lists(WORDS, min_size=1, max_size=2),
        "args": st.lists(WORDS, max_size=2),
        "env": ENV,
        "resources": st.fixed_dictionaries(
            {"limits": st.dictionaries(NAMES, st.integers(1, 2), max_size=2)}
        ),
        "readinessProbe": st.sampled_from([{"exec": {}}, {"httpGet": {"port": 1}}]),
    },
)


def _named(containers: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"name": name, **each} for name, each in containers.items()]


VOLUME = st.fixed_dictionaries({"name": NAMES}, optional={"emptyDir": st.just(NOTHING)})
POD: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"containers": st.dictionaries(st.sampled_from(["trainer", "log"]), CONTAINER).map(_named)},
    optional={
        "nodeSelector": st.dictionaries(NAMES, WORDS, max_size=2),
        "tolerations": st.lists(st.fixed_dictionaries({"key": NAMES}), max_size=2),
        "volumes": st.lists(
            VOLUME,
            max_size=2,
            unique_by=lambda item: str(item["name"]),
        ),
    },
)
SPEC: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    NOTHING,
    optional={
        "backoffLimit": st.integers(0, 2),
        "collective": st.fixed_dictionaries(
            NOTHING,
            optional={"mode": st.sampled_from(["Full", "Quorum"]), "maxAge": st.integers(0, 2)},
        ),
        "template": POD.map(lambda pod: {"spec": pod}),
    },
)
PATHS = st.sampled_from(
    [
        "backoffLimit",
        "collective",
        "collective.mode",
        "template",
        "template.spec.containers[trainer]",
        "template.spec.containers[trainer].env[a]",
        "template.spec.containers[log].resources.limits",
        "template.spec.nodeSelector[b]",
        "template.spec.volumes",
        *MAY_OVERRIDE,
    ]
)
OVERRIDES = st.lists(PATHS, max_size=3)


def a_runtime(spec: dict[str, Any], may_override: list[str]) -> Runtime:
    return Runtime("TrainingRuntime", "torch", {**spec, "mayOverride": may_override})


def leaves(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return the values of a spec by path, each item of a named list below its name."""
    if isinstance(value, dict) and path[-1:] not in (("readinessProbe",),):
        result: dict[tuple[str, ...], Any] = {}
        for name, each in value.items():
            result |= leaves(each, (*path, name))
        return result
    if path[-1:] == ("containers",):
        result = {}
        for each in value:
            rest = {name: inner for name, inner in each.items() if name != "name"}
            result |= leaves(rest, (*path, each["name"]))
        return result
    if path[-1:] in (("env",), ("volumes",)):
        return {(*path, each["name"]): each for each in value}
    return {path: value}


def covers(may_override: list[str], path: tuple[str, ...]) -> bool:
    return any(path[: len(parts)] == parts for parts in map(parts_of, may_override))


@pytest.mark.long
@given(SPEC, SPEC, OVERRIDES)
def test_a_value_of_the_merge_is_the_jobs_only_where_the_runtime_is_silent_or_allows_it(
    below: dict[str, Any], above: dict[str, Any], may_override: list[str]
) -> None:
    merged = merge(a_runtime(below, may_override), above)
    of_runtime, of_job, result = leaves(below), leaves(above), leaves(merged.spec)
    refused = {each.path for each in merged.refused}
    for path, value in result.items():
        ours, theirs = of_runtime.get(path), of_job.get(path)
        if path not in of_runtime:
            assert value == theirs
        elif path not in of_job or theirs == ours:
            assert value == ours
        elif covers(may_override, path):
            assert value == theirs
            assert path not in refused
        else:
            assert value == ours
            assert path in refused
    missing = (of_runtime.keys() | of_job.keys()) - result.keys()
    assert all(path[-1] == "args" for path in missing), "only arguments go, with their command"


@pytest.mark.long
@given(SPEC, SPEC, OVERRIDES)
def test_merging_again_changes_nothing_and_refuses_nothing(
    below: dict[str, Any], above: dict[str, Any], may_override: list[str]
) -> None:
    runtime = a_runtime(below, may_override)
    once = merge(runtime, above).spec
    again = merge(runtime, once)
    assert again.spec == once
    assert again.refused == ()


@pytest.mark.long
@given(SPEC, SPEC, OVERRIDES)
def test_an_empty_job_gives_the_runtime_and_an_empty_runtime_gives_the_job(
    below: dict[str, Any], above: dict[str, Any], may_override: list[str]
) -> None:
    kept = copy.deepcopy((below, above))
    assert merge(a_runtime(below, may_override), {}).spec == below
    assert merge(a_runtime({}, may_override), above).spec == above
    merge(a_runtime(below, may_override), above)
    assert (below, above) == kept, "a merge does not change what it merges"


def test_a_command_of_the_job_leaves_the_arguments_of_the_runtime_behind() -> None:
    container = {"name": "trainer", "command": ["serve"], "args": ["--port", "1"]}
    runtime = a_runtime({"template": {"spec": {"containers": [container]}}}, list(MAY_OVERRIDE))

    def trainer(**fields: Any) -> dict[str, Any]:
        own = {"template": {"spec": {"containers": [{"name": "trainer", **fields}]}}}
        merged: dict[str, Any] = merge(runtime, own).spec["template"]["spec"]["containers"][0]
        return merged

    assert "args" not in trainer(command=["train"])
    assert trainer(command=["serve"])["args"] == ["--port", "1"]
    assert trainer(args=["--port", "2"]) == {**container, "args": ["--port", "2"]}


def test_an_amount_that_is_written_as_text_or_as_a_number_is_no_override() -> None:
    def gpus(amount: int | str) -> dict[str, Any]:
        resources = {"limits": {"nvidia.com/gpu": amount}}
        return {"template": {"spec": {"containers": [{"name": "trainer", "resources": resources}]}}}

    assert merge(a_runtime(gpus(8), []), gpus("8")).refused == ()
    (refused,) = merge(a_runtime(gpus(8), []), gpus(4)).refused
    field = "template.spec.containers[trainer].resources.limits[nvidia.com/gpu]"
    assert show_parts(refused.path) == field
    assert parts_of(field) == refused.path


RUNTIME = """\
apiVersion: paceline.dev/v1alpha1
kind: ClusterTrainingRuntime
metadata: {name: torch}
spec:
  description: For tests.
  collective: {mode: Full}
  procsPerReplica: 2
  template:
    spec:
      nodeSelector: {pool: gpu}
      containers:
      - {name: trainer, image: base, env: [{name: NCCL_DEBUG, value: INFO}]}
"""
JOB = """\
apiVersion: paceline.dev/v1alpha1
kind: TrainingJob
metadata: {name: digits}
spec:
  runtimeRef: {name: torch}
  replicas: 4
  template:
    spec:
      containers:
      - {name: trainer, image: mine, command: [python, train.py]}
"""


def the_runtime() -> Runtime:
    return runtime_from_mapping(yaml.safe_load(RUNTIME))


def test_a_job_of_ten_lines_is_whole_with_its_runtime() -> None:
    assert len(JOB.splitlines()) == 10
    job = parse_job(JOB, runtime=the_runtime())
    trainer = job.spec.trainer()
    assert trainer is not None
    assert (trainer.image, trainer.command) == ("mine", ("python", "train.py"))
    assert [each.name for each in trainer.env or ()] == ["NCCL_DEBUG"]
    assert job.spec.procs_per_replica == 2
    assert job.spec.runtime_ref is None, "the result stands alone"


def test_a_job_that_names_a_runtime_need_not_be_whole_but_its_parts_are_checked() -> None:
    brief = JOB.replace("image: mine, command: [python, train.py]", "image: mine")
    assert parse_job(brief).spec.runtime_ref is not None
    many = JOB.replace("replicas: 4", "replicas: 4\n  collective: {quorum: 8}")
    assert parse_job(many), "the runtime may have more ranks than the job says"
    launcher = JOB.replace("[python, train.py]", "[torchrun, train.py]")
    with pytest.raises(InvalidJobError, match="starts ranks itself"):
        parse_job(launcher)
    with pytest.raises(InvalidJobError, match=r"spec\.template: is missing"):
        parse_job(JOB[: JOB.index("  template:")].replace("  runtimeRef: {name: torch}\n", ""))


def test_a_refused_override_names_field_line_runtime_and_remedy() -> None:
    text = JOB.replace("    spec:\n", "    spec:\n      nodeSelector: {pool: cpu, zone: a}\n")
    text = text.replace("[python, train.py]", "[python], env: [{name: NCCL_DEBUG, value: WARN}]")
    with pytest.raises(InvalidJobError) as caught:
        parse_job(text, source="job.yaml", runtime=the_runtime())
    pool, debug = caught.value.errors
    assert pool.path == "spec.template.spec.nodeSelector.pool"
    assert 'overrides "gpu" of ClusterTrainingRuntime torch' in pool.message
    assert "(job.yaml, line 9)" in pool.message
    assert "containers[trainer].image" in pool.hint
    assert debug.path == "spec.template.spec.containers[trainer].env[NCCL_DEBUG]"
    assert "(job.yaml, line 11)" in debug.message


def test_a_job_and_its_runtime_are_checked_together_and_both_named() -> None:
    text = JOB.replace("replicas: 4", "replicas: 4\n  maxReplicas: 2")
    with pytest.raises(InvalidJobError, match="job with ClusterTrainingRuntime torch"):
        parse_job(text, runtime=the_runtime())


def test_another_runtime_than_the_job_names_is_refused() -> None:
    with pytest.raises(InvalidJobError, match="is not the runtime that is given"):
        parse_job(JOB.replace("name: torch", "name: jax"), runtime=the_runtime())
    local = JOB.replace("{name: torch}", "{name: torch, kind: TrainingRuntime}")
    with pytest.raises(InvalidJobError, match="TrainingRuntime torch"):
        parse_job(local, runtime=the_runtime())


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("  procsPerReplica: 2", "  replicas: 2", r"spec\.replicas: is a field of jobs"),
        ("  procsPerReplica: 2", "  procsPerReplika: 2", "did you mean procsPerReplica"),
        ("  procsPerReplica: 2", "  mayOverride: [mode]", 'spec.mayOverride: "mode" names no'),
        (
            "  procsPerReplica: 2",
            "  mayOverride: ['template.spec.containers[trainr].env']",
            "names a container that is not",
        ),
        (
            "  procsPerReplica: 2",
            "  mayOverride: ['template.spec.containers[trainer].env[A].value']",
            "as a whole only",
        ),
        ("  procsPerReplica: 2", "  parallelism: {model: 3}", "does not divide"),
        ("name: NCCL_DEBUG", "name: RANK", "Paceline sets it for each rank"),
        ("- {name: trainer,", "- {name: trainer}\n      - {name: trainer,", "two containers"),
    ],
)
def test_a_wrong_runtime_is_reported_with_field_and_remedy(
    old: str, new: str, problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "runtime.yaml"
    file.write_text(RUNTIME.replace(old, new))
    with pytest.raises(InvalidJobError) as caught:
        load_runtime(file)
    assert re.search(problem, caught.value.render()), caught.value.render()
    assert "runtime.yaml" in caught.value.render()


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"template": {"spec": {"containers": [{"name": "logger"}]}}},
        {"minReplicas": 3, "elasticity": {"allowedSizes": [4, 8]}},
        {"template": {"spec": {"containers": [{"name": "trainer"}]}}},
    ],
)
def test_a_runtime_may_leave_everything_or_the_trainer_to_its_jobs(spec: dict[str, Any]) -> None:
    assert problems_of(Runtime("TrainingRuntime", "r", spec)) == []


def test_a_job_file_is_no_runtime_and_a_runtime_is_no_job(tmp_path: Path) -> None:
    job, runtime = tmp_path / "job.yaml", tmp_path / "runtime.yaml"
    job.write_text(JOB)
    runtime.write_text(RUNTIME)
    with pytest.raises(JobFileError, match="this is a TrainingJob, and not a runtime"):
        load_runtime(job)
    with pytest.raises(InvalidJobError, match="is not TrainingJob"):
        load_job(runtime)


def test_errors_list_what_a_job_may_override() -> None:
    runtime = a_runtime({"backoffLimit": 1}, [])
    (error,) = errors_of(runtime, merge(runtime, {"backoffLimit": 2}).refused)
    assert error.path == "spec.backoffLimit"
    assert error.hint.endswith("it allows no override")
