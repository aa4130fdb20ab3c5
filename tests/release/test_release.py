"""`make release` makes files that can be installed, read and checked without a network."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from scripts import provenance, release, version
from scripts.release_images import ReleaseError
from tests.layers import exhaustive_except

pytestmark = pytest.mark.processes

VERSION = version.current()
WHEEL = f"paceline-{VERSION}-py3-none-any.whl"
KEY = ec.generate_private_key(ec.SECP256R1())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    key = folder / "key.pem"
    key.write_bytes(KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    release.release(folder / "dist", key, images=())
    return folder / "dist"


def test_the_wheel_contains_the_packages_and_no_tests(made: Path) -> None:
    with zipfile.ZipFile(made / WHEEL) as wheel:
        inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    ships = set[str]()
    for package in ("crds/paceline_api", "runtime/paceline", "operator/paceline_operator"):
        folder = release.ROOT / package
        files = (path for path in folder.rglob("*") if path.is_file())
        named = {path.relative_to(folder.parent).as_posix() for path in files}
        ships |= {name for name in named if "__pycache__" not in name}
    assert sorted(inside - ships) == []
    assert sorted(ships - inside) == []


@pytest.mark.parametrize("package", exhaustive_except([WHEEL], [WHEEL, "sdist"]))
def test_wheel_and_sdist_run_in_a_fresh_environment(
    made: Path, tmp_path: Path, package: str
) -> None:
    """The fresh environment has the dependencies of this one, but not Paceline."""
    fresh = tmp_path / "venv"
    venv.create(fresh, symlinks=True)
    [place] = fresh.glob("lib/python*/site-packages")
    # A path in a .pth file is not a site folder, so the editable Paceline in it is not found.
    (place / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    target = made / (f"paceline-{VERSION}.tar.gz" if package == "sdist" else package)
    release.uv(
        *("pip", "install", "--offline", "--no-deps", "--no-build-isolation"),
        *("--python", str(fresh / "bin/python"), str(target)),
    )
    result = subprocess.run(
        [fresh / "bin/paceline", "version"], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert VERSION in result.stdout
    where = "import paceline, paceline_api, paceline_operator as o; print(paceline.__file__)"
    imported = subprocess.run(
        [fresh / "bin/python", "-c", where], capture_output=True, text=True, cwd=tmp_path
    )
    assert str(fresh) in imported.stdout, imported.stderr


@pytest.mark.parametrize("name", release.CHARTS)
def test_chart_packages_contain_every_file(made: Path, name: str) -> None:
    with tarfile.open(made / f"{name}-{VERSION}.tgz") as archive:
        inside = {entry.name: entry for entry in archive}
        chart = archive.extractfile(f"{name}/Chart.yaml")
        assert chart is not None
        assert yaml.safe_load(chart)["version"] == VERSION
    folder = release.ROOT / "charts"
    files = {str(path.relative_to(folder)) for path in (folder / name).rglob("*") if path.is_file()}
    assert set(inside) == files


@pytest.mark.parametrize("name", release.CHARTS)
def test_the_oci_archive_contains_the_same_chart(made: Path, name: str) -> None:
    with tarfile.open(made / f"{name}-{VERSION}.oci.tar") as archive:
        files = {
            entry.name: file.read() for entry in archive if (file := archive.extractfile(entry))
        }
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}

    def blob(described: dict[str, object]) -> bytes:
        content = files[f"blobs/{str(described['digest']).replace(':', '/')}"]
        assert len(content) == described["size"]
        assert f"sha256:{hashlib.sha256(content).hexdigest()}" == described["digest"]
        return content

    [described] = json.loads(files["index.json"])["manifests"]
    manifest = json.loads(blob(described))
    assert manifest["config"]["mediaType"] == "application/vnd.cncf.helm.config.v1+json"
    assert json.loads(blob(manifest["config"]))["name"] == name
    [layer] = manifest["layers"]
    assert layer["mediaType"] == "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
    assert blob(layer) == (made / f"{name}-{VERSION}.tgz").read_bytes()


def test_images_have_a_bill_of_materials(made: Path) -> None:
    for image, has, has_not in (("operator", "kopf", "torch"), ("worker", "torch", "kopf")):
        listed = json.loads((made / f"{image}-{VERSION}.cdx.json").read_text())
        assert listed["bomFormat"] == "CycloneDX"
        names = {component["name"] for component in listed["components"]}
        assert has in names
        assert names.isdisjoint({has_not, "transformers", "pytest"})


def test_checksums_match_and_are_signed(made: Path, tmp_path: Path) -> None:
    sums = (made / release.SUMS).read_bytes()
    listed: dict[str, str] = dict(line.split("  ")[::-1] for line in sums.decode().splitlines())
    own = {release.SUMS, f"{release.SUMS}.sig"}
    assert set(listed) == {path.name for path in made.iterdir()} - own
    for name, digest in listed.items():
        assert hashlib.sha256((made / name).read_bytes()).hexdigest() == digest
    signature = base64.b64decode((made / f"{release.SUMS}.sig").read_text())
    KEY.public_key().verify(signature, sums, ec.ECDSA(SHA256()))
    with pytest.raises(InvalidSignature):
        KEY.public_key().verify(signature, sums + b" ", ec.ECDSA(SHA256()))
    if openssl := shutil.which("openssl"):  # the command of docs/release.md
        public = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / "key.pub").write_bytes(public)
        (tmp_path / "signature").write_bytes(signature)
        checked = subprocess.run(
            [openssl, "dgst", "-sha256", "-verify", "key.pub", "-signature", "signature"],
            cwd=tmp_path,
            input=sums,
            capture_output=True,
        )
        assert checked.stdout == b"Verified OK\n", checked.stderr


def test_provenance_is_stated_and_signed(made: Path) -> None:
    content = provenance.check(made, KEY.public_key())
    assert content == provenance.check(made)
    named = {each["name"] for each in content["subject"]}
    installed = {path.name for path in made.iterdir() if path.name.endswith(provenance.SUBJECTS)}
    charts = {f"{name}-{VERSION} (manifest)" for name in release.CHARTS}
    assert named == installed | charts
    assert f"paceline-{VERSION}-py3-none-any.whl" in named
    made_from = content["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert made_from[0]["digest"] == {"gitCommit": release.of_commit("%H")}


@pytest.mark.exhaustive
def test_the_same_commit_gives_the_same_files(made: Path, tmp_path: Path) -> None:
    release.release(tmp_path / "again", None, images=())
    for path in (tmp_path / "again").iterdir():
        if path.suffix in (".whl", ".gz", ".tgz", ".tar"):
            assert path.read_bytes() == (made / path.name).read_bytes(), path.name


def test_an_unusable_signing_key_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no key")
    for path, reason in ((wrong, "not a private key"), (tmp_path / "none.pem", "cannot be read")):
        with pytest.raises(ReleaseError, match=reason):
            release.read_key(path)


def test_a_release_with_inconsistent_versions_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(version, "problems", lambda: "Dockerfile says another version\n")
    with pytest.raises(ReleaseError, match="Dockerfile says another version; run `make"):
        release.release(tmp_path / "out", None, images=())
    assert not (tmp_path / "out").exists()


def test_the_command_reports_an_error_in_one_line(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "scripts.release", "--out", tmp_path / "out", "--key", "none.pem"],
        cwd=release.ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert result.stderr == "error: the key none.pem cannot be read: No such file or directory\n"
    assert not (tmp_path / "out").exists()
