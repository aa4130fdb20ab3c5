"""The manifests of eleven projects and clouds, as a job: nothing of a pod template is dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from paceline_operator.core.pods import children

from scripts.try_manifests import Template, lost, main, templates_in, tried

MANIFESTS = Path(__file__).parents[2] / "testing" / "manifests"
FILES = sorted(MANIFESTS.glob("*.yaml"))
LAUNCHERS = ("mpirun", "torchrun")
NEEDED = (
    *(f'"{launcher}" starts ranks itself' for launcher in LAUNCHERS),
    *("command: is missing", "restartPolicy", "but Paceline sets it for each rank"),
)
"""The reasons for which a template in the public form is refused; each is a rule of jobs."""
SOURCES = (
    *("mpi-operator", "trainer", "jobset", "kueue", "coreweave", "aks", "oci", "gke", "mellanox"),
    *("aws", "hyperpod"),
)


def all_templates() -> list[Template]:
    return [template for file in FILES for template in templates_in(file)[0]]


def test_the_manifests_have_the_forms_of_all_sources() -> None:
    for source in SOURCES:
        assert any(file.name.startswith(source) for file in FILES), source
    for file in FILES:
        assert "# Form: " in file.read_text() or "Form: " in file.read_text().split("\n", 1)[0]


@pytest.mark.parametrize("template", all_templates(), ids=lambda each: each.where.split("/")[-1])
def test_a_template_is_carried_whole_or_refused_with_a_reason(template: Template) -> None:
    verdict = tried(template)
    assert verdict.lost == (), "a field is dropped without a word"
    if verdict.problems:
        assert any(reason in verdict.problems for reason in NEEDED), verdict.problems
        assert "spec.template.spec" in verdict.problems, "it names the field"
        assert "(" in verdict.problems, "it says what to do"


@pytest.mark.long
def test_most_templates_run_as_they_are() -> None:
    words = [tried(template).word for template in all_templates()]
    assert len(words) >= 50
    assert words.count("carried") >= 30


# ---- every field that a pod template can have -----------------------------------------------


def filled(kind: str, path: tuple[str, ...] = ()) -> Any:
    """Return a value with every field of a kind of the Kubernetes API, by its client's types."""
    if kind.startswith("List["):
        return [filled(kind[5:-1], path)]
    if kind.startswith("Dict["):
        return {"key": filled(kind[5:-1].partition(", ")[2], path)}
    if kind in ("str", "object"):
        return "/".join(["some", *path[-1:]])
    if kind in ("int", "float"):
        return 7
    if kind == "bool":
        return True
    if kind == "datetime":
        return None
    model = getattr(client, kind)
    if path.count(kind) > 1:
        return None
    return {
        alias: filled(model.openapi_types[name], (*path, kind, alias))
        for name, alias in model.attribute_map.items()
    }


def whole_template() -> dict[str, Any]:
    """Return a template with every field of a pod, except what the rules of jobs do not allow."""
    body: dict[str, Any] = filled("V1PodTemplateSpec")
    # A template has labels, annotations and finalizers only, like in a Job.
    kept = ("labels", "annotations", "finalizers")
    body["metadata"] = {key: body["metadata"][key] for key in kept}
    spec = body["spec"]
    (trainer,) = spec["containers"]
    trainer |= {"name": "trainer", "workingDir": "/work", "command": ["python"], "args": ["t.py"]}
    spec["restartPolicy"] = "Never"
    return body


def test_every_field_of_a_pod_template_reaches_the_pod() -> None:
    body = whole_template()
    assert len(body["spec"]) > 35
    assert len(body["spec"]["containers"][0]) > 20
    verdict = tried(Template("whole", body))
    assert verdict.problems == ""
    assert verdict.lost == ()


@pytest.mark.parametrize("part", ["spec", "container", "metadata"])
def test_a_field_that_is_dropped_is_reported(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself: each field that the pod lacks is named."""
    made = children.worker

    def drops(*args: Any, **kwargs: Any) -> dict[str, Any]:
        pod: dict[str, Any] = made(*args, **kwargs)
        parts = {
            "spec": (pod["spec"], "priorityClassName"),
            "container": (pod["spec"]["containers"][0], "livenessProbe"),
            "metadata": (pod["metadata"], "finalizers"),
        }
        where, name = parts[part]
        del where[name]
        return pod

    monkeypatch.setattr(children, "worker", drops)
    (line,) = tried(Template("whole", whole_template())).lost
    assert {"spec": "spec.priorityClassName", "container": "livenessProbe"}.get(
        part, "finalizers"
    ) in line


@pytest.mark.parametrize(
    ("wanted", "made", "messages"),
    [
        ({"a": 1}, {"a": 2}, ["a is 2, not 1"]),
        ({"a": True}, {"a": 1}, ["a is 1, not True"]),
        ({"a": None}, {}, []),
        ({"a": []}, {}, []),
        ({"a": {"b": 1}}, {}, ["a is missing"]),
        ({"a": {"b": 1}}, {"a": 3}, ["a is 3"]),
        (
            [{"name": "x", "value": "1"}],
            [{"name": "x", "value": "2"}],
            ["[x].value is '2', not '1'"],
        ),
        ([{"name": "x"}], [{"name": "y"}, {"name": "x", "more": 1}], []),
        (["a"], ["b"], ["[0] is missing"]),
    ],
)
def test_a_pod_is_compared_with_what_the_template_says(
    wanted: Any, made: Any, messages: list[str]
) -> None:
    assert [*lost("", wanted, made)] == messages


# ---- the command ----------------------------------------------------------------------------


def test_the_command_reports_each_template_and_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pod = {"containers": [{"name": "main", "command": ["python", "t.py"]}]}
    launched = {"containers": [{"name": "main", "command": ["torchrun", "t.py"]}]}
    documents = [
        {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "p"}, "spec": pod},
        {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "c"}},
        {"kind": "Own", "apiVersion": "e/v1", "metadata": {"name": "o"}, "a": [{"spec": launched}]},
    ]
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "all.yml").write_text(yaml.safe_dump_all(documents))
    assert main([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "all.yml Pod p: carried: container main as trainer" in output
    assert "all.yml ConfigMap c: no pod template" in output
    assert 'Own o a[0]: refused: spec.template.spec.containers[0].command: "torchrun"' in output
    assert "2 templates: 1 carried, 1 refused, 0 with fields lost; 1 documents without" in output


BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "\n".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]"
    for before, name in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ if .Values.on }}\na: 1\n{{ end }}\n", "is no YAML"),
        ("- 1\n", "not a mapping"),
        (BOMB, "more than 100000 values"),
        ("a: " + "x" * (1 << 20), "is longer than 1048576 bytes"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    assert main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "bad.yaml: NOT READ: " in out
    assert message in out
