"""Make all files of a release without a network: `make release`, `make release KEY=key.pem`.

A release consists of wheel, sdist, both charts (as tgz and as OCI archives), both images, a bill of
materials of each image, a provenance statement about all of them (`scripts.provenance`), and the
checksums of all. With a key, statement and checksums are signed. Nothing is released if a place has
another version than pyproject.toml. The same commit gives the same wheel, sdist and charts, and on
the same base the same images.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import yaml
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from packaging.requirements import Requirement

from scripts import oci, provenance, release_images
from scripts import version as versions
from scripts.release_images import ReleaseError
from scripts.system_packages import components

ROOT: Final = Path(__file__).parent.parent
CHARTS: Final = ("paceline", "paceline-crds")
IMAGES: Final = {"operator": "operator", "worker": "runtime"}
"""Extra of the project that each image installs."""
SUMS: Final = "SHA256SUMS"
CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
BASE: Final = CACHE / "paceline/images/bookworm.tar"
"""Default base: a Debian with Python, where `make cluster-programs` puts it."""


def main(arguments: list[str]) -> int:
    """Make a release as the command line asks and return the exit code."""
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    words.add_argument("--out", type=Path, default=ROOT / "dist", help="a folder; it is emptied")
    words.add_argument("--key", type=Path, help="PEM file of an EC P-256 private key")
    words.add_argument("--base", type=Path, default=BASE, help="a tar of a Debian with Python")
    words.add_argument("--images", nargs="*", default=list(IMAGES), choices=list(IMAGES))
    given = words.parse_args(arguments)
    try:
        release(given.out, given.key, given.images, given.base)
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def release(out: Path, key: Path | None, images: Iterable[str] = IMAGES, base: Path = BASE) -> None:
    """Make a release.

    Args:
        out: Folder of the release; it is emptied first.
        key: PEM file of the signing key; None signs nothing.
        images: Images to make.
        base: Tar of a Debian with Python, below the images.

    Raises:
        ReleaseError: Something is missing or wrong; the message names the remedy.
    """
    if wrong := versions.problems():
        raise ReleaseError(f"{wrong.strip()}; run `make version VERSION={versions.current()}`")
    version = versions.current()
    signer = None if key is None else read_key(key)
    images, stamp = list(images), commit_time()
    read = release_images.read_base(base) if images else None
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    uv(
        *("build", "--offline", "--no-build-isolation", "--out-dir", str(out)),
        *("--python", sys.executable),
        SOURCE_DATE_EPOCH=str(stamp),
    )
    (out / ".gitignore").unlink(missing_ok=True)  # uv's
    for name in CHARTS:
        chart = chart_of(name)
        packed = pack(ROOT / "charts" / name, stamp)
        (out / f"{name}-{version}.tgz").write_bytes(packed)
        write_chart_archive(out / f"{name}-{version}.oci.tar", chart, packed, stamp)
    if read is not None:
        write_images(out, images, read, version, stamp)
    for image, extra in IMAGES.items():
        uv(
            *("export", "--quiet", "--frozen", "--no-dev", "--extra", extra),
            *("--format", "cyclonedx1.5", "--preview-features", "sbom-export"),
            *("--output-file", str(out / f"{image}-{version}.cdx.json")),
        )
        if read is not None and image in images:
            add_system_packages(out / f"{image}-{version}.cdx.json", read)
    write_provenance(out, images, read, signer)
    (out / "NOTES.md").write_text(notes(version))
    sums = "".join(f"{provenance.sha256(path)}  {path.name}\n" for path in sorted(out.iterdir()))
    (out / SUMS).write_text(sums)
    if signer is not None:
        signature = signer.sign(sums.encode(), ec.ECDSA(SHA256()))
        (out / f"{SUMS}.sig").write_text(base64.b64encode(signature).decode() + "\n")
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size:>13,}  {path.name}")


def add_system_packages(target: Path, base: release_images.Base) -> None:
    """Add the packages of an image's Debian to the bill of its Python packages."""
    listed = json.loads(target.read_text())
    listed["components"] += components(base.packages, base.distribution)
    target.write_text(json.dumps(listed, indent=2) + "\n")


def write_provenance(
    out: Path,
    images: Iterable[str],
    base: release_images.Base | None,
    signer: ec.EllipticCurvePrivateKey | None,
) -> None:
    """Write the statement about all files in `out`, and its envelope if there is a key."""
    inputs = provenance.Inputs(
        revision=of_commit("%H"),
        modified=bool(git("status", "--porcelain")),
        lock=ROOT / "uv.lock",
        images=tuple(images),
        base=None if base is None else base.path,
        tools={
            "hatchling": metadata.version("hatchling"),
            "python": platform.python_version(),
            "uv": uv("--version").split()[1],
        },
    )
    payload = oci.as_json(provenance.statement(out, inputs))
    name = f"paceline-{versions.current()}"
    (out / f"{name}{provenance.SUFFIX}").write_bytes(payload)
    if signer is not None:
        sealed = provenance.envelope(payload, signer)
        (out / f"{name}{provenance.SIGNED_SUFFIX}").write_bytes(sealed)


def chart_of(name: str) -> dict[str, Any]:
    """Return the content of the chart's Chart.yaml."""
    chart: dict[str, Any] = yaml.safe_load((ROOT / "charts" / name / "Chart.yaml").read_text())
    return chart


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the signing key of a PEM file.

    Args:
        path: PEM file without a password.

    Returns:
        The key.

    Raises:
        ReleaseError: The file holds no private key of the curve P-256.
    """
    hint = "make one: openssl ecparam -name prime256v1 -genkey -noout -out key.pem"
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise ReleaseError(f"the key {path} cannot be read: {error.strerror}") from error
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        raise ReleaseError(
            f"{path} is not a private key in PEM without a password; {hint}"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ReleaseError(f"{path} is not a key of the curve P-256; {hint}")
    return key


def notes(version: str) -> str:
    """Return the section of CHANGELOG.md about this version.

    If there is none yet, this is the section of unreleased changes.

    Args:
        version: Version of the release.

    Returns:
        The section in Markdown.

    Raises:
        ReleaseError: Both sections are missing.
    """
    text = (ROOT / "CHANGELOG.md").read_text()
    for title in (version, "Unreleased"):
        section = re.search(rf"^## \[?{re.escape(title)}\b.*?(?=^## |\Z)", text, re.M | re.S)
        if section:
            return section[0]
    raise ReleaseError(f"CHANGELOG.md has no section '## {version}'; write one")


def commit_time() -> int:
    """Return the commit's time in seconds since 1970; files of a release have this time."""
    return int(of_commit("%ct"))


def of_commit(what: str) -> str:
    """Return a field of the current commit, by git's format."""
    return git("log", "-1", f"--format={what}")


def git(*words: str) -> str:
    """Run git in this clone and return its output.

    Args:
        *words: Arguments of git.

    Returns:
        The output without surrounding whitespace.

    Raises:
        ReleaseError: git fails.
    """
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"git knows no commit here: {done.stderr.strip()}; release from a clone")
    return done.stdout.strip()


# ---- charts --------------------------------------------------------------------------------------


def pack(chart: Path, stamp: int) -> bytes:
    """Return the chart as `helm package` would pack it."""
    files = ((f"{chart.name}/{path.relative_to(chart)}", path.read_bytes()) for path in held(chart))
    return gzip.compress(tar(files, stamp), mtime=stamp)


def held(chart: Path) -> Iterator[Path]:
    """Yield the files of a chart in the order of their paths."""
    yield from sorted(path for path in chart.rglob("*") if path.is_file())


def tar(files: Iterable[tuple[str, bytes]], stamp: int) -> bytes:
    """Return a tar of these files, all with the same modification time."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in files:
            oci.add(archive, name, content, stamp)
    return buffer.getvalue()


def write_chart_archive(target: Path, chart: dict[str, Any], packed: bytes, stamp: int) -> None:
    """Write the chart as `helm push` would send it to a registry."""
    oci.write_archive(
        target,
        config=oci.blob(oci.HELM_CONFIG, oci.as_json(chart)),
        layers=[oci.blob(oci.HELM_CONTENT, packed)],
        annotations={
            "org.opencontainers.image.title": chart["name"],
            "org.opencontainers.image.version": chart["version"],
        },
        index_annotations={"org.opencontainers.image.ref.name": chart["version"]},
        stamp=stamp,
    )


# ---- images --------------------------------------------------------------------------------------


def write_images(
    out: Path, images: Iterable[str], base: release_images.Base, version: str, stamp: int
) -> None:
    """Write the archives of these images."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    [wheel] = out.glob("*.whl")
    # Work beside the archives: an image is gigabytes, and /tmp may be memory.
    with tempfile.TemporaryDirectory(dir=out) as folder:
        made = release_images.Made(
            version=version,
            stamp=stamp,
            revision=of_commit("%H"),
            wheel=wheel.read_bytes(),
            base=base,
            base_layer=release_images.base_layer(base, Path(folder) / "base"),
        )
        for name in images:
            scratch = Path(folder) / name
            scratch.mkdir()
            release_images.write(
                out / f"paceline-{name}-{version}.oci.tar",
                name,
                made,
                release_images.stage(dockerfile, name),
                locked(IMAGES[name]),
                scratch,
            )
            shutil.rmtree(scratch)


def locked(extra: str) -> dict[str, str]:
    """Return the versions that uv.lock lists for an extra on this machine, by package."""
    listed = uv(
        *("export", "--quiet", "--frozen", "--no-dev", "--no-emit-project", "--extra", extra),
        *("--no-hashes", "--no-annotate", "--no-header"),
    )
    wanted = (Requirement(line) for line in listed.splitlines() if line)
    return {
        each.name: next(iter(each.specifier)).version
        for each in wanted
        if each.marker is None or each.marker.evaluate()
    }


# ---- programs ------------------------------------------------------------------------------------


def uv(*words: str, **env: str) -> str:
    """Run uv in this clone and return its output.

    Args:
        *words: Arguments of uv.
        **env: Additional environment variables.

    Returns:
        The output.

    Raises:
        ReleaseError: There is no uv, or it fails.
    """
    own = ROOT / ".tools/bin/uv"
    program = str(own) if own.exists() else shutil.which("uv")
    if program is None:
        raise ReleaseError("there is no uv in .tools/bin or on the PATH; run `make install`")
    done = subprocess.run(
        [program, *words], cwd=ROOT, env=os.environ | env, capture_output=True, text=True
    )
    if done.returncode:
        raise ReleaseError(f"uv {words[0]} failed:\n{done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
