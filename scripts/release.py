"""What a release consists of, made without a network: `make release`, `make release KEY=key.pem`.

Wheel, sdist, both charts (as tgz and as OCI archives), a list of what each image is made of, and
the checksums of all; signed, if there is a key. The version is that of pyproject.toml; charts that
say another one are refused. The same commit gives the same wheel, sdist and charts.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key

ROOT: Final = Path(__file__).parent.parent
CHARTS: Final = ("paceline", "paceline-crds")
IMAGES: Final = {"operator": "operator", "worker": "runtime"}
"""The extra of the project that each image installs."""
SUMS: Final = "SHA256SUMS"
HELM_CONFIG: Final = "application/vnd.cncf.helm.config.v1+json"
HELM_CONTENT: Final = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
OCI_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX: Final = "application/vnd.oci.image.index.v1+json"


class ReleaseError(Exception):
    """What was wrong, and what to do."""


def main(arguments: list[str]) -> int:
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    words.add_argument("--out", type=Path, default=ROOT / "dist", help="a folder; it is emptied")
    words.add_argument("--key", type=Path, help="PEM file of an EC P-256 private key")
    given = words.parse_args(arguments)
    try:
        release(given.out, given.key)
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def release(out: Path, key: Path | None) -> None:
    """Everything into `out`."""
    version = project_version()
    signer = None if key is None else read_key(key)
    stamp = commit_time()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    uv(
        *("build", "--offline", "--no-build-isolation", "--out-dir", str(out)),
        *("--python", sys.executable),
        SOURCE_DATE_EPOCH=str(stamp),
    )
    (out / ".gitignore").unlink(missing_ok=True)  # uv's
    for name in CHARTS:
        chart = chart_of(name, version)
        packed = pack(ROOT / "charts" / name, stamp)
        (out / f"{name}-{version}.tgz").write_bytes(packed)
        (out / f"{name}-{version}.oci.tar").write_bytes(oci_archive(chart, packed, stamp))
    for image, extra in IMAGES.items():
        uv(
            *("export", "--quiet", "--frozen", "--no-dev", "--extra", extra),
            *("--format", "cyclonedx1.5", "--preview-features", "sbom-export"),
            *("--output-file", str(out / f"{image}-{version}.cdx.json")),
        )
    (out / "NOTES.md").write_text(notes(version))
    sums = "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(out.iterdir())
    )
    (out / SUMS).write_text(sums)
    if signer is not None:
        signature = signer.sign(sums.encode(), ec.ECDSA(SHA256()))
        (out / f"{SUMS}.sig").write_text(base64.b64encode(signature).decode() + "\n")
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size:>10,}  {path.name}")


def project_version() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return str(project["project"]["version"])


def chart_of(name: str, version: str) -> dict[str, Any]:
    """The chart's own description. ReleaseError if it is of another version."""
    chart: dict[str, Any] = yaml.safe_load((ROOT / "charts" / name / "Chart.yaml").read_text())
    for field in ("version", "appVersion"):
        if chart[field] != version:
            raise ReleaseError(
                f"charts/{name}/Chart.yaml says {field}: {chart[field]}, and pyproject.toml "
                f"{version}; write {version} there"
            )
    return chart


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    hint = "make one: openssl ecparam -name prime256v1 -genkey -noout -out key.pem"
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise ReleaseError(f"the key {path} cannot be read: {error.strerror}") from error
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        raise ReleaseError(f"{path} is no private key in PEM without a password; {hint}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ReleaseError(f"{path} is not a key of the curve P-256; {hint}")
    return key


def notes(version: str) -> str:
    """The section of CHANGELOG.md about this version; what is unreleased, before there is one."""
    text = (ROOT / "CHANGELOG.md").read_text()
    for title in (version, "Unreleased"):
        found = re.search(rf"^## \[?{re.escape(title)}\b.*?(?=^## |\Z)", text, re.M | re.S)
        if found:
            return found[0]
    raise ReleaseError(f"CHANGELOG.md has no section '## {version}'; write one")


def commit_time() -> int:
    """Seconds since 1970 of the commit: files of a release have this time."""
    done = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ReleaseError(f"git knows no commit here: {done.stderr.strip()}; release from a clone")
    return int(done.stdout)


# ---- charts --------------------------------------------------------------------------------------


def pack(chart: Path, stamp: int) -> bytes:
    """The chart as `helm package` lays it out."""
    files = ((f"{chart.name}/{path.relative_to(chart)}", path.read_bytes()) for path in held(chart))
    return gzip.compress(tar(files, stamp), mtime=stamp)


def held(chart: Path) -> Iterator[Path]:
    yield from sorted(path for path in chart.rglob("*") if path.is_file())


def tar(files: Any, stamp: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in files:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode = len(content), stamp, 0o644
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def oci_archive(chart: dict[str, Any], packed: bytes, stamp: int) -> bytes:
    """An OCI image layout, as one file: what `helm push` would send to a registry."""
    blobs: dict[str, bytes] = {}

    def blob(kind: str, content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = content
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}

    manifest = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": blob(HELM_CONFIG, as_json(chart)),
        "layers": [blob(HELM_CONTENT, packed)],
        "annotations": {
            "org.opencontainers.image.title": chart["name"],
            "org.opencontainers.image.version": chart["version"],
        },
    }
    described = blob(OCI_MANIFEST, as_json(manifest))
    described["annotations"] = {"org.opencontainers.image.ref.name": chart["version"]}
    index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [described]}
    layout = {
        "oci-layout": as_json({"imageLayoutVersion": "1.0.0"}),
        "index.json": as_json(index),
        **blobs,
    }
    return tar(layout.items(), stamp)


def as_json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


# ---- programs ------------------------------------------------------------------------------------


def uv(*words: str, **env: str) -> None:
    own = ROOT / ".tools/bin/uv"
    program = str(own) if own.exists() else shutil.which("uv")
    if program is None:
        raise ReleaseError("there is no uv in .tools/bin or on the PATH; run `make install`")
    done = subprocess.run(
        [program, *words], cwd=ROOT, env=os.environ | env, capture_output=True, text=True
    )
    if done.returncode:
        raise ReleaseError(f"uv {words[0]} failed:\n{done.stderr.strip()}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
