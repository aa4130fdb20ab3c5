"""Provenance of the files of a release: a statement, and a check of files against it.

The statement is in-toto's (https://in-toto.io/Statement/v1) with SLSA's provenance
(https://slsa.dev/provenance/v1). It holds the digest of each file, of each image and chart as a
registry knows it, and of what they were made from. With the release's key, it is also signed as a
DSSE envelope. `python -m scripts.provenance dist` checks a folder; with `--key key.pub`, it checks
the signature.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import hashlib
import json
import sys
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key

STATEMENT: Final = "https://in-toto.io/Statement/v1"
PREDICATE: Final = "https://slsa.dev/provenance/v1"
BUILD_TYPE: Final = "https://paceline.dev/release/v1"
"""Identifier of `make release`; docs/release.md explains its parameters."""
BUILDER: Final = "https://paceline.dev/builders/make-release"
"""Identifier of the releaser's own machine. No other party vouches for it: SLSA's level 1, or 2
with a key."""
PAYLOAD: Final = "application/vnd.in-toto+json"
SUFFIX: Final = ".provenance.json"
SIGNED_SUFFIX: Final = ".provenance.dsse.json"
SUBJECTS: Final = (".whl", ".tar.gz", ".tgz", ".oci.tar", ".cdx.json")
BYTES_MAX: Final = 1 << 20
"""Largest size of a statement."""


class ProvenanceError(Exception):
    """Raised if a statement is invalid or does not match the files."""


@dataclass(frozen=True)
class Inputs:
    """Inputs that a release was made from."""

    revision: str
    """Hash of the commit."""
    modified: bool
    """True if files of the working tree differed from the commit."""
    lock: Path
    images: tuple[str, ...]
    base: Path | None
    """Root file system of the images; None if there are no images."""
    tools: Mapping[str, str]
    """Versions of the build tools by name."""


def statement(folder: Path, inputs: Inputs) -> dict[str, Any]:
    """Return the statement about all files in `folder` that have a suffix of `SUBJECTS`."""
    source = {
        "name": "source",
        "digest": {"gitCommit": inputs.revision},
        "annotations": {"modified": inputs.modified},
    }
    made_from = [source, {"name": "uv.lock", "digest": {"sha256": sha256(inputs.lock)}}]
    if inputs.base is not None:
        made_from.append({"name": "base", "digest": {"sha256": sha256(inputs.base)}})
    return {
        "_type": STATEMENT,
        "subject": subjects(folder),
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"images": list(inputs.images)},
                "internalParameters": {"tools": dict(inputs.tools)},
                "resolvedDependencies": made_from,
            },
            "runDetails": {"builder": {"id": BUILDER}},
        },
    }


def subjects(folder: Path) -> list[dict[str, Any]]:
    """Return name and digest of each file, and of the manifest in each OCI archive."""
    listed = []
    for path in sorted(folder.iterdir()):
        if path.name.endswith(SUBJECTS):
            listed.append({"name": path.name, "digest": {"sha256": sha256(path)}})
        if path.name.endswith(".oci.tar"):
            name = f"{path.name.removesuffix('.oci.tar')} (manifest)"
            listed.append({"name": name, "digest": {"sha256": manifest_digest(path)}})
    return listed


def sha256(path: Path) -> str:
    """Return the digest of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_digest(archive: Path) -> str:
    """Return the digest by which a registry will know the image or chart of an OCI archive.

    Args:
        archive: OCI archive with one manifest.

    Returns:
        The sha256 in hexadecimal.

    Raises:
        ProvenanceError: The file is not such an archive.
    """
    try:
        with tarfile.open(archive) as layout:
            index = layout.extractfile("index.json")
            assert index is not None
            [described] = json.loads(index.read(BYTES_MAX))["manifests"]
            digest = str(described["digest"])
    except (AssertionError, KeyError, OSError, TypeError, ValueError, tarfile.TarError) as error:
        raise ProvenanceError(
            f"{archive.name} is no OCI archive of one manifest: {error}"
        ) from None
    return digest.removeprefix("sha256:")


# ---- the signature -------------------------------------------------------------------------------


def envelope(payload: bytes, signer: ec.EllipticCurvePrivateKey) -> bytes:
    """Return the statement in a DSSE envelope with one signature."""
    signature = signer.sign(_encoded(payload), ec.ECDSA(SHA256()))
    sealed = {
        "payloadType": PAYLOAD,
        "payload": base64.b64encode(payload).decode(),
        "signatures": [{"sig": base64.b64encode(signature).decode()}],
    }
    return json.dumps(sealed, indent=2).encode() + b"\n"


def opened(sealed: bytes, key: ec.EllipticCurvePublicKey) -> bytes:
    """Return the statement of an envelope that this key has signed.

    Args:
        sealed: DSSE envelope.
        key: Public key of the release.

    Returns:
        The statement.

    Raises:
        ProvenanceError: It is not an envelope, or has no signature of this key.
    """
    try:
        body = json.loads(sealed)
        payload = base64.b64decode(body["payload"], validate=True)
        signatures = [base64.b64decode(each["sig"], validate=True) for each in body["signatures"]]
        kind = body["payloadType"]
    except (KeyError, RecursionError, TypeError, ValueError, binascii.Error) as error:
        raise ProvenanceError(f"it is no DSSE envelope: {error!r}") from None
    if kind != PAYLOAD:
        raise ProvenanceError(f"the envelope holds {kind}, not {PAYLOAD}")
    if not any(_is_signed(payload, signature, key) for signature in signatures):
        raise ProvenanceError("no signature of this key is on the statement")
    return payload


def _encoded(payload: bytes) -> bytes:
    """Return the bytes that DSSE signs, which include the type of the payload."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD), PAYLOAD.encode(), len(payload), payload)


def _is_signed(payload: bytes, signature: bytes, key: ec.EllipticCurvePublicKey) -> bool:
    try:
        key.verify(signature, _encoded(payload), ec.ECDSA(SHA256()))
    except InvalidSignature:
        return False
    return True


# ---- checking ------------------------------------------------------------------------------------


def check(folder: Path, key: ec.EllipticCurvePublicKey | None = None) -> dict[str, Any]:
    """Return the statement of a folder if it matches the folder's files exactly.

    Args:
        folder: Folder with the files of one release.
        key: The release's public key; None does not check the signature.

    Returns:
        The statement.

    Raises:
        ProvenanceError: A file differs, is missing or is not listed, or the statement is invalid.
    """
    payload = _payload(folder, key)
    try:
        content = json.loads(payload)
        kinds = content["_type"], content["predicateType"]
        stated = {each["name"]: each["digest"]["sha256"] for each in content["subject"]}
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise ProvenanceError(f"the statement cannot be read: {error!r}") from None
    if kinds != (STATEMENT, PREDICATE):
        raise ProvenanceError(f"it is {kinds[0]} with {kinds[1]}, not {STATEMENT} with {PREDICATE}")
    actual = {each["name"]: each["digest"]["sha256"] for each in subjects(folder)}
    wrong = [
        *(f"{name} is missing" for name in sorted(stated.keys() - actual.keys())),
        *(f"{name} is not spoken of" for name in sorted(actual.keys() - stated.keys())),
        *(
            f"{name} has sha256 {actual[name]} instead of {stated[name]}"
            for name in sorted(stated.keys() & actual.keys())
            if actual[name] != stated[name]
        ),
    ]
    if wrong:
        raise ProvenanceError("; ".join(wrong))
    statement_: dict[str, Any] = content
    return statement_


def _payload(folder: Path, key: ec.EllipticCurvePublicKey | None) -> bytes:
    suffix = SUFFIX if key is None else SIGNED_SUFFIX
    files = sorted(folder.glob(f"*{suffix}"))
    if len(files) != 1:
        raise ProvenanceError(f"{folder} has {len(files)} files *{suffix}, and needs one")
    with files[0].open("rb") as file:
        data = file.read(BYTES_MAX + 1)
    if len(data) > BYTES_MAX:
        raise ProvenanceError(f"{files[0].name} is larger than {BYTES_MAX:,} bytes")
    return data if key is None else opened(data, key)


def read_public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """Return the public key in a PEM file.

    Args:
        path: PEM file.

    Returns:
        The key.

    Raises:
        ProvenanceError: The file holds no key of an elliptic curve.
    """
    try:
        key = load_pem_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ProvenanceError(f"{path} is not a public key in PEM: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ProvenanceError(f"{path} is not a key of an elliptic curve")
    return key


def main(arguments: list[str]) -> int:
    """Check a folder, print the digests that its statement lists, and return the exit code."""
    words = argparse.ArgumentParser(prog="python -m scripts.provenance")
    words.add_argument("folder", type=Path, help="with the files of a release")
    words.add_argument("--key", type=Path, help="PEM file of the release's public key")
    given = words.parse_args(arguments)
    try:
        key = None if given.key is None else read_public_key(given.key)
        statement = check(given.folder, key)
    except (OSError, ProvenanceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(_lines(statement["subject"])))
    return 0


def _lines(subject: Iterable[Mapping[str, Any]]) -> list[str]:
    return [f"{each['digest']['sha256']}  {each['name']}" for each in subject]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
