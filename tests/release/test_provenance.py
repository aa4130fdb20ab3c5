"""The provenance statement of a release names its files, and no other content passes its check."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from scripts import oci, provenance, release
from scripts.provenance import ProvenanceError

KEY = ec.generate_private_key(ec.SECP256R1())
FILES = (
    "paceline-1-py3-none-any.whl",
    "paceline-1.tar.gz",
    "paceline-1.tgz",
    "paceline-1.oci.tar",
    "paceline-operator-1.oci.tar",
    "operator-1.cdx.json",
)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Make a folder as `make release` fills it, with a few bytes in each file."""
    folder = tmp_path / "dist"
    folder.mkdir()
    for name in FILES:
        if name.endswith(".oci.tar"):
            archive(folder / name, name.encode())
        else:
            (folder / name).write_bytes(name.encode())
    (folder / "NOTES.md").write_text("what changed")
    (tmp_path / "uv.lock").write_text("locked")
    (tmp_path / "base.tar").write_text("base")
    inputs = provenance.Inputs(
        revision="0" * 40,
        modified=False,
        lock=tmp_path / "uv.lock",
        images=("operator",),
        base=tmp_path / "base.tar",
        tools={"uv": "1"},
    )
    payload = oci.as_json(provenance.statement(folder, inputs))
    (folder / "paceline-1.provenance.json").write_bytes(payload)
    (folder / "paceline-1.provenance.dsse.json").write_bytes(provenance.envelope(payload, KEY))
    return folder


def archive(target: Path, content: bytes) -> None:
    oci.write_archive(
        target,
        config=oci.blob(oci.HELM_CONFIG, b"{}"),
        layers=[oci.blob(oci.HELM_CONTENT, content)],
        annotations={},
        index_annotations={},
        stamp=0,
    )


def statement(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "paceline-1.provenance.json").read_bytes())
    return content


def test_a_complete_release_passes_with_and_without_the_key(made: Path) -> None:
    for key in (None, KEY.public_key()):
        assert provenance.check(made, key) == statement(made)


def test_the_slsa_statement_covers_each_installable_file(made: Path) -> None:
    content = statement(made)
    assert content["_type"] == "https://in-toto.io/Statement/v1"
    assert content["predicateType"] == "https://slsa.dev/provenance/v1"
    named = {each["name"]: each["digest"]["sha256"] for each in content["subject"]}
    for name in FILES:
        assert named.pop(name) == provenance.sha256(made / name)
    assert set(named) == {"paceline-1 (manifest)", "paceline-operator-1 (manifest)"}
    build = content["predicate"]["buildDefinition"]
    assert build["externalParameters"] == {"images": ["operator"]}
    inputs = {each["name"]: each["digest"] for each in build["resolvedDependencies"]}
    assert inputs["source"] == {"gitCommit": "0" * 40}
    assert inputs["uv.lock"] == {"sha256": provenance.sha256(made.parent / "uv.lock")}
    assert inputs["base"] == {"sha256": provenance.sha256(made.parent / "base.tar")}
    assert content["predicate"]["runDetails"]["builder"]["id"].startswith("https://")


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_of_any_file_fails(made: Path, name: str) -> None:
    path = made / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ProvenanceError, match=name):
        provenance.check(made)


def test_an_image_with_another_manifest_fails(made: Path) -> None:
    """A registry identifies an image by the digest of its manifest, not of its archive."""
    archive(made / "paceline-operator-1.oci.tar", b"another")
    with pytest.raises(ProvenanceError, match=r"paceline-operator-1 \(manifest\) has sha256"):
        provenance.check(made)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_fails(made: Path, name: str) -> None:
    (made / name).unlink()
    with pytest.raises(ProvenanceError, match=f"{name} is missing"):
        provenance.check(made)


def test_an_unlisted_file_fails(made: Path) -> None:
    (made / "paceline_more-1-py3-none-any.whl").write_bytes(b"more")
    with pytest.raises(ProvenanceError, match=r"more-1-py3-none-any\.whl is not spoken of"):
        provenance.check(made)


def test_an_unknown_unreadable_or_missing_statement_fails(made: Path) -> None:
    path = made / "paceline-1.provenance.json"
    for content, why in (
        (statement(made) | {"predicateType": "https://slsa.dev/provenance/v0.2"}, "not https"),
        ({}, "cannot be read"),
        ([], "cannot be read"),
        (statement(made) | {"subject": [{"name": "a"}]}, "cannot be read"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(ProvenanceError, match=why):
            provenance.check(made)
    path.write_bytes(b"[" * 100_000)
    with pytest.raises(ProvenanceError, match="cannot be read"):
        provenance.check(made)
    path.write_bytes(b" " * (provenance.BYTES_MAX + 1))
    with pytest.raises(ProvenanceError, match="larger"):
        provenance.check(made)
    path.unlink()
    with pytest.raises(ProvenanceError, match="needs one"):
        provenance.check(made)


def test_the_envelope_verifies_only_unchanged_and_with_the_release_key(made: Path) -> None:
    path = made / "paceline-1.provenance.dsse.json"
    sealed = json.loads(path.read_bytes())
    other = ec.generate_private_key(ec.SECP256R1()).public_key()
    with pytest.raises(ProvenanceError, match="no signature of this key"):
        provenance.check(made, other)
    payload = base64.b64decode(sealed["payload"])
    for changed, why in (
        ({"payload": base64.b64encode(payload + b" ").decode()}, "no signature"),
        ({"payloadType": "text/plain"}, "text/plain"),
        ({"signatures": []}, "no signature"),
        ({"signatures": [{"sig": "%"}]}, "no DSSE envelope"),
    ):
        path.write_text(json.dumps(sealed | changed))
        with pytest.raises(ProvenanceError, match=why):
            provenance.check(made, KEY.public_key())


@pytest.mark.processes
def test_the_command_reports_a_failure_in_one_line(made: Path) -> None:
    key = made.parent / "key.pub"
    public = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    key.write_bytes(public)

    def run() -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "scripts.provenance", str(made), "--key", str(key)]
        return subprocess.run(words, cwd=release.ROOT, capture_output=True, text=True)

    passed = run()
    assert passed.returncode == 0, passed.stderr
    assert f"{provenance.sha256(made / FILES[0])}  {FILES[0]}\n" in passed.stdout
    (made / FILES[0]).write_bytes(b"changed")
    failed = run()
    assert failed.returncode == 1
    assert failed.stderr.startswith(f"error: {FILES[0]} has sha256")
    assert failed.stderr.count("\n") == 1
