"""Generation of the CustomResourceDefinitions of all kinds of Paceline, as YAML.

`python -m paceline_api.crdgen` writes them to crds/manifests/. Schemas come from the models in
`types`, descriptions from their docstrings, CEL rules from `validate.RULES`, and rules that reject
changes from the table `fields.ACTS`. Only structural defaults are written, because the API
server would also put them into stored objects (C12). The output is the same on every run; a test
compares it with the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from paceline_api.fields import ACTS, Acts, acts_on, leaves, mappings
from paceline_api.reading.problems import field_names
from paceline_api.rules.fabric import FABRIC_RULES, NAME_CEL, NAME_MESSAGE
from paceline_api.rules.rule import Rule
from paceline_api.rules.validate import RULES
from paceline_api.types.enums import RuntimeKind
from paceline_api.types.fabric import FABRIC_KIND, FABRIC_PLURAL, FabricProfile
from paceline_api.types.job import GROUP, KIND, VERSION, SharedSpec, TrainingJob
from paceline_api.types.model import DEFAULT_KEY
from paceline_api.types.runtime import PLURALS, TrainingRuntime

PLURAL: Final = "trainingjobs"
HEADER: Final = """\
# Generated from crds/paceline_api; do not edit.
# Change the models there, then run from the root of the repository:
# python -m paceline_api.crdgen
"""
_KEPT: Final = ("type", "format", "pattern", "enum", "minimum", "maximum", "maxLength", "minLength")
_KEPT_LAST: Final = ("minItems", "maxItems", "maxProperties", "x-kubernetes-validations")
_LIST_KEYS: Final = {
    "spec.template.spec.containers": "name",
    "spec.template.spec.containers[].env": "name",
    "status.conditions": "type",
}
_ATOMIC: Final = ("status.resolved", "status.fabric.pod", "status.runtime.spec")
"""Mappings that always change as a whole, so that the API server need not track the owner of each
field."""


@dataclass(frozen=True)
class _Kind:
    """Parts of a definition beside the schema."""

    kind: str
    plural: str
    short: str
    categories: tuple[str, ...]
    namespaced: bool
    columns: tuple[tuple[str, str, str, str], ...]
    """Printer columns: name, type, path, description."""
    wide: tuple[tuple[str, str, str, str], ...]
    """Further columns, shown with `-o wide` only."""
    subresources: dict[str, Any]


def _of(condition: str, field: str) -> str:
    return f'.status.conditions[?(@.type=="{condition}")].{field}'


_JOBS: Final = _Kind(
    kind=KIND,
    plural=PLURAL,
    short="tj",
    categories=("all", "training"),
    namespaced=True,
    columns=(
        ("Ready", "string", ".status.ready", "Replicas that train and replicas asked for"),
        ("Mode", "string", ".status.collective.mode", "Mode of the rounds in force"),
        ("Round", "integer", ".status.round", "Rounds applied, at most a minute old"),
        ("Generation", "string", ".status.membershipGeneration", "The present membership"),
        ("Transport", "string", ".status.transport.kind", "What moves the gradients"),
        ("Stragglers", "integer", ".status.stragglerCount", "Ranks that are slow for long"),
        ("State", "string", ".status.state", "The conditions in one word"),
        ("Age", "date", ".metadata.creationTimestamp", ""),
    ),
    wide=(
        ("Stalled", "string", _of("Stalled", "status"), "Whether somebody has to do something"),
        ("Message", "string", _of("Ready", "message"), "How it is, or what it waits for"),
    ),
    subresources={
        "status": {},
        "scale": {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    },
)
_FABRICS: Final = _Kind(
    kind=FABRIC_KIND,
    plural=FABRIC_PLURAL,
    short="fabric",
    categories=("training",),
    namespaced=False,
    columns=(
        ("Carries", "string", ".spec.carries", "The best that a job can reach with it"),
        ("Priority", "integer", ".spec.priority", "Of several that fit, the highest is taken"),
        ("Age", "date", ".metadata.creationTimestamp", ""),
    ),
    wide=(),
    subresources={},
)

_RUNTIMES: Final = _Kind(
    kind=str(RuntimeKind.NAMESPACED),
    plural=PLURALS[RuntimeKind.NAMESPACED],
    short="trt",
    categories=("training",),
    namespaced=True,
    columns=(
        ("Ready", "string", _of("Ready", "status"), "Whether jobs can be merged with it"),
        ("Description", "string", ".spec.description", "What it is for"),
        ("Age", "date", ".metadata.creationTimestamp", ""),
    ),
    wide=(("Message", "string", _of("Ready", "message"), "What is wrong with it"),),
    subresources={"status": {}},
)
_CLUSTER_RUNTIMES: Final = replace(
    _RUNTIMES,
    kind=str(RuntimeKind.CLUSTER),
    plural=PLURALS[RuntimeKind.CLUSTER],
    short="ctrt",
    namespaced=False,
)


def training_jobs() -> str:
    """Return the definition of TrainingJob as YAML text."""
    return _written(_definition(_JOBS, _root_schema()))


def fabric_profiles() -> str:
    """Return the definition of FabricProfile as YAML text."""
    return _written(_definition(_FABRICS, _fabric_schema()))


def training_runtimes() -> str:
    """Return the definition of TrainingRuntime as YAML text."""
    return _written(_definition(_RUNTIMES, _runtime_schema(_RUNTIMES.kind)))


def cluster_training_runtimes() -> str:
    """Return the definition of ClusterTrainingRuntime as YAML text."""
    return _written(_definition(_CLUSTER_RUNTIMES, _runtime_schema(_CLUSTER_RUNTIMES.kind)))


def _written(definition: dict[str, Any]) -> str:
    body = yaml.dump(definition, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
    return HEADER + body


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes equal parts in full instead of using anchors."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        """Return True: never use an anchor."""
        return True


def _definition(kind: _Kind, schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{kind.plural}.{GROUP}",
            "labels": {"app.kubernetes.io/name": "paceline"},
        },
        "spec": {
            "group": GROUP,
            "names": {
                "kind": kind.kind,
                "listKind": f"{kind.kind}List",
                "plural": kind.plural,
                "singular": kind.kind.lower(),
                "shortNames": [kind.short],
                "categories": list(kind.categories),
            },
            "scope": "Namespaced" if kind.namespaced else "Cluster",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                    **({"subresources": kind.subresources} if kind.subresources else {}),
                    "additionalPrinterColumns": [
                        *(_column(*column) for column in kind.columns),
                        *(_column(*column) | {"priority": 1} for column in kind.wide),
                    ],
                }
            ],
        },
    }


def _column(name: str, kind: str, path: str, description: str) -> dict[str, Any]:
    column = {"name": name, "type": kind, "jsonPath": path}
    return {**column, "description": description} if description else column


def _root_schema() -> dict[str, Any]:
    source = TrainingJob.model_json_schema(by_alias=True)
    converter = _Converter(source["$defs"])
    fields = source["properties"]
    spec = converter.convert(fields["spec"], "spec")
    spec["x-kubernetes-validations"] = [
        *(_validation(rule) for rule in RULES if rule.path.startswith("spec.")),
        *(_refusal(path, acts) for path, acts in ACTS.items() if acts in _REFUSALS),
    ]
    status = converter.convert(fields["status"], "status")
    # A job that no operator has observed is not ready. Without this default, kstatus would call it
    # current.
    status["default"] = {"observedGeneration": -1}
    schema = _object_schema(source, KIND, {"spec": spec, "status": status})
    schema["x-kubernetes-validations"] = [
        _validation(rule) for rule in RULES if rule.path.startswith("metadata.")
    ]
    return schema


def _fabric_schema() -> dict[str, Any]:
    source = FabricProfile.model_json_schema(by_alias=True)
    spec = _Converter(source["$defs"]).convert(source["properties"]["spec"], "spec")
    spec["x-kubernetes-validations"] = [
        _checked(rule.path, rule.cel, rule.message) for rule in FABRIC_RULES
    ]
    schema = _object_schema(source, FABRIC_KIND, {"spec": spec})
    schema["x-kubernetes-validations"] = [
        {"rule": NAME_CEL, "message": NAME_MESSAGE, "reason": "FieldValueInvalid"}
    ]
    return schema


def _runtime_schema(kind: str) -> dict[str, Any]:
    source = TrainingRuntime.model_json_schema(by_alias=True)
    converter, fields = _Converter(source["$defs"], of_job=False), source["properties"]
    spec = converter.convert(fields["spec"], "spec")
    spec["x-kubernetes-validations"] = [
        *(_checked(rule.path, rule.cel_of_part, rule.message) for rule in RULES if rule.of_parts),
        _checked("spec.mayOverride", *_known_overrides()),
    ]
    status = converter.convert(fields["status"], "status")
    return _object_schema(source, kind, {"spec": spec, "status": status})


def _known_overrides() -> tuple[str, str]:
    """Return the rule in CEL that each entry of `mayOverride` is below a field of a job."""
    names = "|".join(field_names(SharedSpec))
    cel = f"p.matches('^({names})([.\\\\[]|$)')"
    message = (
        "spec.mayOverride names no field that a job and a runtime have; write paths below spec, "
        "such as collective.mode or template.spec.containers[trainer].env"
    )
    return f"!has(self.mayOverride) || self.mayOverride.all(p, {cel})", message


def _object_schema(source: dict[str, Any], kind: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": _text(source["description"]),
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}"},
            "kind": {"type": "string", "description": kind},
            "metadata": {"type": "object"},
            **properties,
        },
    }


class _Converter:
    """Converts a JSON schema with references to a structural schema without."""

    def __init__(self, definitions: dict[str, Any], *, of_job: bool = True) -> None:
        """Create a converter.

        Args:
            definitions: Schemas that references name.
            of_job: True if descriptions say when a change acts.
        """
        self.definitions, self.of_job = definitions, of_job

    def convert(self, source: dict[str, Any], path: str) -> dict[str, Any]:
        """Return the structural schema of the field at `path`."""
        body = self._resolved(source)
        described = source.get("description") or body.get("description")
        schema: dict[str, Any] = {}
        if described:
            notes = _notes(source, path, of_job=self.of_job)
            schema["description"] = _text(described) + notes
        if body.get("x-kubernetes-int-or-string"):
            return schema | body
        schema |= {key: body[key] for key in _KEPT if key in body}
        for key in ("minimum", "maximum"):
            if f"exclusive{key.capitalize()}" in body:
                schema |= {key: body[f"exclusive{key.capitalize()}"]}
                schema[f"exclusive{key.capitalize()}"] = True
        if body.get("type") == "integer":
            schema["format"] = "int64" if path.startswith("status") else "int32"
        default = source.get("default")
        if default is not None and path.startswith("spec"):
            schema["default"] = default
        schema |= {key: body[key] for key in _KEPT_LAST if key in body}
        return schema | self._inner(body, path)

    def _inner(self, body: dict[str, Any], path: str) -> dict[str, Any]:
        """Return the part of the schema for the fields of a mapping or the items of a list."""
        schema: dict[str, Any] = {}
        if body.get("type") == "array":
            schema["items"] = self.convert(body["items"], f"{path}[]")
            schema["items"].pop("default", None)
            key = _LIST_KEYS.get(path)
            schema["x-kubernetes-list-type"] = "map" if key else "atomic"
            if key:
                schema["x-kubernetes-list-map-keys"] = [key]
        elif body.get("type") == "object":
            if path in _ATOMIC:
                schema["x-kubernetes-map-type"] = "atomic"
            if body.get("required"):
                schema["required"] = body["required"]
            if "properties" in body:
                schema["properties"] = {
                    name: self.convert(field, f"{path}.{name}")
                    for name, field in body["properties"].items()
                }
            extra = body.get("additionalProperties")
            if extra is True:
                schema["x-kubernetes-preserve-unknown-fields"] = True
            elif isinstance(extra, dict):
                schema["additionalProperties"] = self.convert(extra, path)
        return schema

    def _resolved(self, source: dict[str, Any]) -> dict[str, Any]:
        """Return the schema behind a reference, or behind `X or null`.

        Kubernetes has no value null, so that part is dropped.

        Args:
            source: A JSON schema.

        Returns:
            The schema without reference.
        """
        if "anyOf" in source:
            options = [option for option in source["anyOf"] if option.get("type") != "null"]
            assert len(options) == 1, f"not structural: {source}"
            return self._resolved(options[0])
        if "$ref" in source:
            definition: dict[str, Any] = self.definitions[source["$ref"].rpartition("/")[2]]
            return definition
        return source


def _notes(source: dict[str, Any], path: str, *, of_job: bool) -> str:
    default = source.get(DEFAULT_KEY)
    text = "" if default is None else f" Default: {_shown(default)}."
    below = path.removeprefix("spec.")
    note = _NOTES.get(acts_on(below)) if of_job and below in _LEAVES else None
    return text + (f" {note}" if note else "")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(_shown(item) for item in value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _text(docstring: str) -> str:
    return " ".join(docstring.split())


def _validation(rule: Rule) -> dict[str, str]:
    return _checked(rule.path, rule.cel_of_job, rule.message)


def _checked(path: str, cel: str, message: str) -> dict[str, str]:
    rule = {"rule": cel, "message": message, "reason": "FieldValueInvalid"}
    if path.startswith("spec."):
        rule["fieldPath"] = path.removeprefix("spec")
    return rule


_LEAVES: Final = frozenset(leaves())
_MAPPINGS: Final = frozenset(mappings())
_NOTES: Final = {
    Acts.NEXT_ATTEMPT: "A change acts on pods that are made afterwards.",
    Acts.AFTER_SUSPENSION: "Can be changed only while the job is suspended.",
    Acts.NEVER: "Cannot be changed.",
}
_REFUSALS: Final = {
    Acts.AFTER_SUSPENSION: "can be changed only while the job is suspended; set spec.suspend to "
    "true first, or make a new job",
    Acts.NEVER: "cannot be changed; set it back, or make a new job",
}


def _refusal(path: str, acts: Acts) -> dict[str, str]:
    """Return the rule that rejects a change of a field.

    The rule uses `has`, so that it also rejects the first setting and the removal of the field.

    Args:
        path: Path of the field below `spec`.
        acts: When a change of it acts.

    Returns:
        An entry of x-kubernetes-validations.
    """
    parts = path.split(".")
    new, old = (" && ".join(_has(root, parts)) for root in ("self", "oldSelf"))
    same = f"({new}) == ({old})"
    if path not in _MAPPINGS:
        same = f"{same} && (!({new}) || self.{path} == oldSelf.{path})"
    if acts is Acts.AFTER_SUSPENSION:
        # Check the old `suspend`: a queue may set placement in the update that resumes the job.
        same = f"oldSelf.suspend || ({same})"
    return {
        "rule": same,
        "message": f"spec.{path} {_REFUSALS[acts]}",
        "reason": "FieldValueForbidden",
        "fieldPath": f".{path}",
    }


def _has(root: str, parts: list[str]) -> Iterator[str]:
    for length in range(1, len(parts) + 1):
        yield f"has({'.'.join([root, *parts[:length]])})"


DEFINITIONS: Final = {
    PLURAL: training_jobs,
    FABRIC_PLURAL: fabric_profiles,
    _RUNTIMES.plural: training_runtimes,
    _CLUSTER_RUNTIMES.plural: cluster_training_runtimes,
}
"""Generator of each definition, by its plural, which is also the name of the file."""

if __name__ == "__main__":
    manifests = Path(__file__).resolve().parent.parent / "manifests"
    for plural, text in DEFINITIONS.items():
        (manifests / f"{plural}.yaml").write_text(text())
