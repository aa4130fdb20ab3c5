"""The API server itself refuses every invalid job, and names the field and the remedy.

The table is the one that `paceline validate` is tested with (testing/bad_specs.py). The messages of
the API server are recorded in golden/refusals.txt for people to read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from testing.bad_specs import BAD, GOOD, Bad
from testing.cluster.api import ApiError
from testing.cluster.commands import kubectl
from testing.cluster.control_plane import ControlPlane
from testing.fake_cluster.beside import CRD, JOBS, ROOT

pytestmark = pytest.mark.processes

GOLDEN = Path(__file__).parent.parent / "golden" / "refusals.txt"
CHECK = JOBS.format("default") + "?dryRun=All&fieldValidation=Strict"
"""A request as kubectl sends it: nothing is stored, and an unknown field is an error."""
KIND = re.compile(r"^kind: (TrainingJob|FabricProfile|(Cluster)?TrainingRuntime)", re.M)
NOISE = re.compile(
    r"^(\w+\.paceline\.dev) \"[^\"]*\" is invalid: |, <nil>: Invalid value: null.*?(?=\])"
)
WAY_OUT = (
    *("; use ", "; set ", "; add ", "; remove ", "; give ", "; write ", "; name ", "; say "),
    *("; lower ", "; raise "),
    *("should be ", "should have at least", "must be of type", "must be TrainingJob"),
    *("supported values: ", "Required value", "is required"),
)
"""Paceline's own advice, or the API server's statement of what it would accept."""
ABOUT_THE_FIELD = ("unknown field", "Object 'Kind' is missing", "does not match the expected")
"""Messages that need no advice: the field must not be there, or must be."""


def refusal(plane: ControlPlane, body: dict[str, Any]) -> str:
    with pytest.raises(ApiError) as caught:
        plane.api.create(CHECK, body)
    assert caught.value.status in (400, 422), caught.value
    return caught.value.reason


@pytest.mark.parametrize("name", BAD)
def test_a_bad_spec_is_refused_with_field_and_remedy(plane: ControlPlane, name: str) -> None:
    bad = BAD[name]
    message = refusal(plane, yaml.safe_load(bad.text))
    assert any(field in message for field in fields_of(bad)), message
    assert any(words in message for words in (*WAY_OUT, *ABOUT_THE_FIELD)), message


def fields_of(bad: Bad) -> Iterator[str]:
    """Yield the path, or the list that contains it: a rule cannot name an item."""
    path = bad.path
    yield {"kind": "Kind", "apiVersion": "API version"}.get(path, path)
    yield path
    if "[" in path:
        yield path[: path.rindex("[")]
        yield path[: path.index("[")]
    if path == "apiVersion":
        yield 'in version "v1"'


def test_refusals_match_the_golden_file(plane: ControlPlane) -> None:
    """To accept a change, delete the file, run again and read the difference."""
    lines = ["# What the API server says to each entry of testing/bad_specs.py"]
    for name, bad in BAD.items():
        message = NOISE.sub("", refusal(plane, yaml.safe_load(bad.text))).strip("[]")
        lines += ["", name, f"  {message[:400]}"]
    text = "\n".join(lines) + "\n"
    if not GOLDEN.exists():
        GOLDEN.write_text(text)
        pytest.fail(f"{GOLDEN.name} was missing and has been written; read it and run again")
    assert text == GOLDEN.read_text()


def documents() -> list[tuple[str, str]]:
    """Return (location, text) of every Paceline object that a reader could copy."""
    files = sorted([*ROOT.glob("examples/**/*.yaml"), *ROOT.glob("docs/**/*.yaml")])
    entries = [(path.relative_to(ROOT).as_posix(), path.read_text()) for path in files]
    texts = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), ROOT / "README.md"]
    for path in sorted(texts):
        name = path.relative_to(ROOT).as_posix()
        blocks = re.findall(r"^```ya?ml\n(.*?)^```", path.read_text(), re.M | re.S)
        entries += [(f"{name}[{number}]", block) for number, block in enumerate(blocks)]
    return [(where, text) for where, text in entries if KIND.search(text)]


@pytest.mark.parametrize(("where", "text"), documents(), ids=[where for where, _ in documents()])
def test_every_documented_manifest_is_accepted(plane: ControlPlane, where: str, text: str) -> None:
    output = kubectl(plane.kubeconfig, "apply", "--dry-run=server", "-f", "-", stdin=text)
    assert "created (server dry run)" in output


def test_the_documentation_has_manifests() -> None:
    assert len(documents()) >= 2


def test_the_definition_fits_a_client_side_apply(plane: ControlPlane) -> None:
    output = kubectl(plane.kubeconfig, "apply", "-f", str(CRD))
    assert re.search(r"trainingjobs\.paceline\.dev (created|configured|unchanged)", output)


def job(**spec: Any) -> dict[str, Any]:
    body: dict[str, Any] = yaml.safe_load(GOOD)
    body["spec"] |= spec
    return body


@pytest.fixture
def stored(plane: ControlPlane, namespace: str) -> str:
    """Store a job and return its path."""
    plane.api.create(JOBS.format(namespace), job(metrics={"port": 9999}))
    return f"{JOBS.format(namespace)}/digits"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"procsPerReplica": 1}, "procsPerReplica"),
        ({"collective": {"backend": "gloo"}}, "collective.backend"),
        ({"managedBy": "else"}, "managedBy"),
        ({"metrics": None}, "metrics.port"),
        ({"checkpoint": {"path": "/elsewhere"}}, "checkpoint.path"),
        ({"template": {"metadata": {"labels": {"a": "b"}}}}, "template"),
    ],
)
def test_immutable_fields_cannot_be_changed(
    plane: ControlPlane, stored: str, change: dict[str, Any], field: str
) -> None:
    with pytest.raises(ApiError) as caught:
        plane.api.patch(stored, {"spec": change})
    assert f"spec.{field} can" in caught.value.reason  # cannot be changed; can be changed only
    assert "; set " in caught.value.reason


def test_scale_respects_the_bounds(plane: ControlPlane, namespace: str) -> None:
    body = job(minReplicas=2, maxReplicas=6)
    plane.api.create(JOBS.format(namespace), body)
    words = ["scale", "trainingjob/digits", "-n", namespace]
    kubectl(plane.kubeconfig, *words, "--replicas=6")
    for replicas, field in ((7, "maxReplicas"), (1, "minReplicas")):
        with pytest.raises(Exception, match=f"spec.{field}"):
            kubectl(plane.kubeconfig, *words, f"--replicas={replicas}")
    got = kubectl(plane.kubeconfig, "get", "tj", "-n", namespace)
    assert got.split()[:8] == [
        *("NAME", "READY", "MODE", "ROUND", "GENERATION", "TRANSPORT", "STRAGGLERS", "STATE"),
    ]
