"""The API server's own OpenAPI document as JSON schemas, for `kubeconform -strict`.

Nothing is downloaded: manifests are checked against what the running cluster would accept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from testing.cluster.api import Api

LOCATION = "{{.Group}}-{{.ResourceAPIVersion}}-{{.ResourceKind}}.json"
QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"
NUMBER_OR_TEXT: dict[str, Any] = {"type": ["string", "number"]}
Json = dict[str, Any]


def write(api: Api, folder: Path) -> str:
    """Write one schema per kind and return the value of kubeconform's -schema-location."""
    definitions: Json = api.get("/openapi/v2")["definitions"]
    definitions[QUANTITY] = NUMBER_OR_TEXT
    for name, definition in definitions.items():
        for kind in definition.get("x-kubernetes-group-version-kind", ()):
            needed: Json = {}
            _collect(name, definitions, needed)
            schema = {"$ref": f"#/definitions/{name}", "definitions": needed}
            group, version = kind["group"] or kind["version"], kind["version"]
            file = f"{group}-{version}-{kind['kind'].lower()}.json"
            (folder / file).write_text(json.dumps(schema))
    return f"{folder}/{LOCATION}"


def _collect(name: str, definitions: Json, needed: Json) -> None:
    if name in needed:
        return
    needed[name] = {}
    needed[name] = _strict(definitions[name], definitions, needed)


def _strict(value: Any, definitions: Json, needed: Json) -> Any:
    """Return a schema that refuses unknown fields, and collect what it refers to."""
    if isinstance(value, list):
        return [_strict(item, definitions, needed) for item in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("$ref"), str):
        _collect(value["$ref"].removeprefix("#/definitions/"), definitions, needed)
    if value.get("format") == "int-or-string":
        return {"type": ["string", "integer"]}
    if value.get("x-kubernetes-int-or-string"):
        return {"type": ["string", "integer"]}
    schema = {key: _strict(item, definitions, needed) for key, item in value.items()}
    open_ended = (
        value.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in value
    )
    if isinstance(value.get("properties"), dict) and not open_ended:
        schema["additionalProperties"] = False
    return schema
