"""The generated CRD is up to date, complete and small, and contains every rule of the models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from paceline_api.crdgen import DEFINITIONS
from paceline_api.errors import InvalidJobError
from paceline_api.fields import _PATHS, ACTS, Acts, leaves, mappings
from paceline_api.reading.load import parse_job
from paceline_api.rules.rule import Rule
from paceline_api.rules.validate import RULES

from testing.bad_specs import BAD

MANIFESTS = Path(__file__).parents[2] / "crds" / "manifests"
MANIFEST = MANIFESTS / "trainingjobs.yaml"
ANNOTATION_BYTES_MAX = 262_144
"""Limit for all annotations of an object. A client-side apply stores the whole object in one."""


@pytest.fixture(scope="module")
def crd() -> dict[str, Any]:
    definition: dict[str, Any] = yaml.load(MANIFEST.read_text(), yaml.CSafeLoader)
    return definition


@pytest.fixture(scope="module")
def schema(crd: dict[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return root


def parts(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from parts(field, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from parts(schema[key], f"{path}[]")


def validations(schema: dict[str, Any]) -> list[dict[str, str]]:
    return [*schema["x-kubernetes-validations"], *schema["properties"]["spec"][VALIDATIONS]]


VALIDATIONS = "x-kubernetes-validations"


@pytest.mark.parametrize("plural", DEFINITIONS)
def test_the_committed_manifest_equals_the_generated_one(plural: str) -> None:
    text = (MANIFESTS / f"{plural}.yaml").read_text()
    assert text == DEFINITIONS[plural](), "run: python -m paceline_api.crdgen"
    assert text.startswith("# Generated from crds/paceline_api; do not edit.\n")


@pytest.mark.parametrize("plural", DEFINITIONS)
def test_the_manifest_is_small_enough_for_client_side_apply(plural: str) -> None:
    assert len((MANIFESTS / f"{plural}.yaml").read_bytes()) < ANNOTATION_BYTES_MAX / 2


@pytest.mark.parametrize(
    ("plural", "least"), [("trainingjobs", 100), ("fabricprofiles", 15), ("trainingruntimes", 100)]
)
def test_every_field_is_described(plural: str, least: int) -> None:
    definition = yaml.load((MANIFESTS / f"{plural}.yaml").read_text(), yaml.CSafeLoader)
    root = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    own = [
        (path, part)
        for name in {"spec", "status"} & root["properties"].keys()
        for path, part in parts(root["properties"][name], name)
        if not path.endswith("[]")
    ]
    assert len(own) > least
    for path, part in own:
        assert part.get("description", "")[-1:].isalnum() or part["description"].endswith("."), path
        assert len(part["description"]) >= 10, path
        assert "\n" not in part["description"], path


def test_the_schema_is_structural(schema: dict[str, Any]) -> None:
    for path, part in parts(schema, ""):
        assert part.get("type") or part.get("x-kubernetes-int-or-string"), path
        assert not {"$ref", "anyOf", "title", "const"} & part.keys(), path
        assert part.get("additionalProperties") is not True, path


def test_only_replicas_suspend_and_observed_generation_have_defaults(
    schema: dict[str, Any],
) -> None:
    defaults = {path: part["default"] for path, part in parts(schema, "") if "default" in part}
    unseen = {".status": {"observedGeneration": -1}}
    assert defaults == {".spec.replicas": 1, ".spec.suspend": False, **unseen}


def test_descriptions_name_defaults_and_immutable_fields(schema: dict[str, Any]) -> None:
    descriptions = {path: part.get("description", "") for path, part in parts(schema, "")}
    assert descriptions[".spec.collective.quorum"].endswith(" Default: 75%.")
    assert descriptions[".spec.collective.randomInitiator"].endswith(" Default: false.")
    assert descriptions[".spec.collective.deadlineFactor"].endswith(" Default: 3.")
    assert descriptions[".spec.straggler.respond"].endswith(" Default: [Tolerate].")
    assert descriptions[".spec.collective.backend"].endswith(" Default: auto. Cannot be changed.")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.path)
def test_each_validation_rule_has_a_cel_counterpart_in_the_crd(
    rule: Rule, schema: dict[str, Any]
) -> None:
    in_spec = rule.path.startswith("spec.")
    part = schema["properties"]["spec"] if in_spec else schema
    (twin,) = [v for v in part[VALIDATIONS] if v["message"] == rule.message]
    assert twin["rule"] == rule.cel_of_job
    assert rule.path in twin["message"]
    assert rule.hint in twin["message"]
    if in_spec:
        assert f"spec{twin['fieldPath']}" == rule.path


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.path)
def test_each_validation_rule_is_violated_by_some_example_of_a_bad_spec(rule: Rule) -> None:
    def broken() -> Iterator[str]:
        for name, bad in BAD.items():
            with pytest.raises(InvalidJobError) as caught:
                parse_job(bad.text)
            if any(e.hint == rule.hint or rule.problem in e.problem for e in caught.value.errors):
                yield name

    assert any(broken()), f"no entry of BAD breaks the rule: {rule.message}"


def test_cel_rules_refer_only_to_existing_fields(schema: dict[str, Any]) -> None:
    known = {path for path, _ in parts(schema["properties"]["spec"], "")}
    for validation in schema["properties"]["spec"][VALIDATIONS]:
        for path in re.findall(r"\b(?:self|oldSelf)((?:\.[a-zA-Z]+)+)(?!\()\b", validation["rule"]):
            while path.rpartition(".")[2] in ("exists", "all", "exists_one", "startsWith"):
                path = path.rpartition(".")[0]
            assert path in known, f"{path} in {validation['rule']}"
        assert validation["fieldPath"] in known, validation


def test_the_table_says_of_every_field_when_a_change_acts() -> None:
    assert set(leaves()) <= set(ACTS)
    assert set(ACTS) <= {*leaves(), *mappings()}
    assert len(ACTS) == sum(len(paths) for paths in _PATHS.values()), "each once"


def test_rules_refuse_the_changes_that_do_not_act(schema: dict[str, Any]) -> None:
    rules = {v["fieldPath"]: v for v in validations(schema) if v["reason"] == "FieldValueForbidden"}
    refused = (Acts.AFTER_SUSPENSION, Acts.NEVER)
    assert set(rules) == {f".{path}" for path, acts in ACTS.items() if acts in refused}
    assert rules[".metrics.port"]["rule"] == (
        "(has(self.metrics) && has(self.metrics.port)) == "
        "(has(oldSelf.metrics) && has(oldSelf.metrics.port)) && "
        "(!(has(self.metrics) && has(self.metrics.port)) || "
        "self.metrics.port == oldSelf.metrics.port)"
    )
    assert rules[".template"]["rule"] == (
        "oldSelf.suspend || ((has(self.template)) == (has(oldSelf.template)) && "
        "(!(has(self.template)) || self.template == oldSelf.template))"
    )
    assert rules[".scheduling.gang"]["rule"] == (
        "oldSelf.suspend || ((has(self.scheduling) && has(self.scheduling.gang)) == "
        "(has(oldSelf.scheduling) && has(oldSelf.scheduling.gang)))"
    )


def test_printer_columns_and_subresources_refer_to_existing_fields(crd: dict[str, Any]) -> None:
    version = crd["spec"]["versions"][0]
    columns = version["additionalPrinterColumns"]
    assert [column["name"] for column in columns] == [
        "Ready",
        "Mode",
        "Round",
        "Generation",
        "Transport",
        "Stragglers",
        "State",
        "Age",
        *("Stalled", "Message"),
    ]
    wide = [column["name"] for column in columns if column.get("priority")]
    assert wide == ["Stalled", "Message"], "the others are shown at any width"
    known = {path for path, _ in parts(version["schema"]["openAPIV3Schema"], "")}
    paths = [
        re.sub(r"\[\?\(.*?\)\]", "[]", column["jsonPath"])
        for column in columns
        if column["name"] != "Age"
    ]
    scale = version["subresources"]["scale"]
    for path in (*paths, *scale.values()):
        assert path in known, path
    assert version["subresources"]["status"] == {}
    assert crd["spec"]["names"]["shortNames"] == ["tj"]
    assert crd["metadata"]["name"] == "trainingjobs.paceline.dev"


def test_the_pod_template_preserves_unknown_fields(schema: dict[str, Any]) -> None:
    template = schema["properties"]["spec"]["properties"]["template"]
    pod = template["properties"]["spec"]
    containers = pod["properties"]["containers"]
    variables = containers["items"]["properties"]["env"]
    for part in (template, pod, containers["items"], variables["items"]):
        assert part["x-kubernetes-preserve-unknown-fields"] is True
    for part in (containers, variables):
        assert part["x-kubernetes-list-map-keys"] == ["name"]
