"""Images of a release, assembled from packages, are valid and reproducible, and they run."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from paceline.transport import native

from scripts import oci, provenance, release, release_images, version
from scripts.release_images import ReleaseError
from testing.cluster import image_build
from testing.cluster.fixtures import or_skip
from tests.release import small_image

pytestmark = pytest.mark.processes

VERSION = version.current()
HEAVY = ("torch", "nvidia-", "triton", "sympy", "setuptools", "cuda-")
"""Packages of gigabytes that do not matter for how an image is assembled."""


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """Compress at the lowest level: compression would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oci, "LEVEL", 1)
        yield


@pytest.fixture(scope="module")
def base() -> release_images.Base:
    with or_skip():
        return release_images.read_base(image_build.make_base())


@pytest.fixture(scope="module")
def operator(base: release_images.Base, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("operator") / "dist"
    release.release(out, None, ["operator"], base.path)
    return out / f"paceline-operator-{VERSION}.oci.tar"


class Archive:
    """An image as an importer reads it; every digest and size is checked."""

    def __init__(self, path: Path, folder: Path) -> None:
        folder.mkdir()
        subprocess.run(["tar", "-xf", path, "-C", folder], check=True)
        self.folder = folder
        assert json.loads((folder / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
        index = json.loads((folder / "index.json").read_text())
        assert index["mediaType"] == "application/vnd.oci.image.index.v1+json"
        [self.described] = index["manifests"]
        assert self.described["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
        self.manifest = self.read(self.described)
        assert self.manifest["mediaType"] == self.described["mediaType"]
        of_config, self.layers = self.manifest["config"], self.manifest["layers"]
        assert of_config["mediaType"] == "application/vnd.oci.image.config.v1+json"
        self.config = self.read(of_config)
        blobs = {path.name for path in (folder / "blobs/sha256").iterdir()}
        named = [self.described, of_config, *self.layers]
        assert blobs == {each["digest"].removeprefix("sha256:") for each in named}

    def blob(self, described: dict[str, Any]) -> Path:
        path: Path = self.folder / "blobs" / described["digest"].replace(":", "/")
        assert path.stat().st_size == described["size"]
        assert provenance.sha256(path) == described["digest"].removeprefix("sha256:")
        return path

    def read(self, described: dict[str, Any]) -> Any:
        return json.loads(self.blob(described).read_bytes())

    def unpack(self, root: Path) -> Path:
        """Unpack the root file system, and check the diff_ids on the way."""
        root.mkdir(mode=0o755, exist_ok=True)
        assert len(self.layers) == len(self.config["history"])
        for layer, diff_id in zip(self.layers, self.config["rootfs"]["diff_ids"], strict=True):
            assert layer["mediaType"] == "application/vnd.oci.image.layer.v1.tar+gzip"
            plain = self.folder / "plain.tar"
            with plain.open("wb") as file:
                subprocess.run(["gzip", "-dc", self.blob(layer)], stdout=file, check=True)
            assert f"sha256:{provenance.sha256(plain)}" == diff_id
            subprocess.run(["tar", "-xpf", plain, "-C", root], check=True)
        return root


def run_in(root: Path, config: dict[str, Any], *words: str) -> str:
    """Return what a command prints inside the image, with its own user and environment."""
    process = config["config"]
    user, group = process["User"].split(":")
    who = [f"--setgid={group}", f"--setuid={user}"] if os.geteuid() == 0 else ["--map-root-user"]
    where = [f"--root={root}", f"--wd={process.get('WorkingDir', '/')}"]
    done = subprocess.run(
        ["unshare", *who, *where, *words],
        env=dict(each.split("=", 1) for each in process["Env"]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{words}:\n{done.stdout}"
    return done.stdout


@pytest.mark.exhaustive
def test_the_operator_image_is_valid_and_runs(
    base: release_images.Base, operator: Path, tmp_path: Path
) -> None:
    archive = Archive(operator, tmp_path / "archive")
    config = archive.config
    assert archive.described["annotations"] == {
        "io.containerd.image.name": f"docker.io/paceline/operator:{VERSION}",
        "org.opencontainers.image.ref.name": VERSION,
    }
    assert archive.described["platform"] == {"architecture": config["architecture"], "os": "linux"}
    stated = provenance.check(operator.parent)
    made_from = stated["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert made_from[-1] == {"name": "base", "digest": {"sha256": provenance.sha256(base.path)}}
    parts = json.loads((operator.parent / f"operator-{VERSION}.cdx.json").read_text())
    listed = {part["name"] for part in parts["components"]}
    assert {"kopf", "libc6", f"python{base.python}"} <= listed
    labels = config["config"].pop("Labels")
    assert labels["org.opencontainers.image.title"] == "Paceline operator"
    assert labels["org.opencontainers.image.version"] == VERSION
    assert config["config"] == {
        "Entrypoint": ["python3", "-m", "paceline_operator"],
        "Env": [
            f"PATH=/opt/paceline/bin:{release_images.SYSTEM_PATH}",
            *("PYTHONUNBUFFERED=1", "USER=paceline", "HOME=/tmp"),
        ],
        "User": "65532:65532",
    }
    root = archive.unpack(tmp_path / "root")
    assert "--own-namespace" in run_in(root, config, *config["config"]["Entrypoint"], "--help")
    needed = "import kopf, paceline_operator.main, paceline.coordinator.__main__"
    output = run_in(root, config, "python3", "-v", "-c", needed)
    assert "/opt/paceline/lib" in output
    compiled = re.findall(r"# code object from '/opt/.*\.py'", output)
    assert not compiled, "without bytecode in the image each start compiles this"
    assert VERSION in run_in(root, config, "paceline", "version")
    assert not (root / "opt/paceline/bin/pip").exists()
    packages = {path.name for path in root.glob("opt/paceline/lib/*/site-packages/*")}
    assert packages.isdisjoint({"torch", "mpi4py", "pytest"})
    assert not (root / "etc/hostname").exists()
    mine = subprocess.run(
        ["grep", "-rlF", "-e", sys.prefix, "-e", str(release.ROOT), root / "opt"],
        capture_output=True,
        text=True,
    )
    assert mine.stdout == ""


@pytest.mark.exhaustive
def test_the_worker_image_runs_with_pip_mpi_and_native_loops(
    base: release_images.Base, tmp_path: Path
) -> None:
    """The image has everything except torch and its dependencies, which are gigabytes."""
    locked = release.locked("runtime")
    assert "torch" in locked
    rest = {name: version for name, version in locked.items() if not name.startswith(HEAVY)}
    release.uv("build", "--wheel", "--offline", "--no-build-isolation", f"--out-dir={tmp_path}")
    [wheel] = tmp_path.glob("*.whl")
    for folder in ("root", "scratch"):
        (tmp_path / folder).mkdir(mode=0o755)
    subprocess.run(["tar", "-xpf", base.path, "-C", tmp_path / "root"], check=True)
    stage = release_images.stage((release.ROOT / "Dockerfile").read_text(), "worker")
    made = release_images.Made(
        version=VERSION,
        stamp=0,
        revision="",
        wheel=wheel.read_bytes(),
        base=base,
        base_layer=oci.write_layer(tmp_path / "no-base", lambda _: None),
    )
    target = tmp_path / "worker.oci.tar"
    release_images.write(target, "worker", made, stage, rest, tmp_path / "scratch")
    image = Archive(target, tmp_path / "archive")
    config = image.config
    assert config["config"]["Entrypoint"] == ["python3", "-m", "paceline.agent"]
    assert config["config"]["WorkingDir"] == "/workspace"
    root = image.unpack(tmp_path / "root")
    assert (root / "workspace").stat().st_mode & 0o7777 == 0o1777
    needed = (
        "import numpy, zmq, prometheus_client, mpi4py\n"
        "mpi4py.rc.initialize = False\n"
        "from mpi4py import MPI; print(MPI.Get_library_version())\n"
        "from paceline.transport import native\n"
        "for source in native.SOURCES: print(native.load(source)._name)"
    )
    output = run_in(root, config, "python3", "-c", needed)
    assert "MPICH" in output
    assert output.count("/opt/paceline/lib") == len(native.SOURCES), output
    listed = run_in(root, config, "pip", "--version")
    assert "/opt/paceline/lib" in listed
    assert "mpiexec" in run_in(root, config, "mpiexec", "--help")


def test_another_process_makes_the_same_image(tmp_path: Path) -> None:
    """One of the two has another hash seed and no cached bytecode."""
    digests = []
    for name, more in (
        ("here", {"PYTHONHASHSEED": "1"}),
        ("there", {"PYTHONHASHSEED": "2", "PYTHONPYCACHEPREFIX": str(tmp_path / "none")}),
    ):
        (tmp_path / name).mkdir()
        done = subprocess.run(
            [sys.executable, Path(__file__).with_name("small_image.py"), tmp_path / name],
            env=os.environ | more | {"PYTHONPATH": str(release.ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        digests.append(done.stdout)
    assert digests[0] == digests[1]


def test_the_base_layer_has_no_files_of_its_machine(tmp_path: Path) -> None:
    image = Archive(small_image.write(tmp_path), tmp_path / "archive")
    [of_base, of_packages, own] = (image.blob(layer) for layer in image.layers)
    with tarfile.open(of_base) as archive:
        assert {"etc/os-release", "var/log/apt", "usr/bin/python3"} <= set(archive.getnames())
        assert not {"etc/hostname", "etc/resolv.conf", "var/log/dpkg.log"} & set(archive.getnames())
        linked = archive.getmember("usr/bin/python3").linkname
        assert linked == f"usr/bin/python{small_image.PYTHON}"
    with tarfile.open(of_packages) as archive:
        assert archive.getmember("opt/paceline/bin/python3").linkname == "/usr/bin/python3"
    with tarfile.open(own) as archive:
        assert archive.getmember("workspace").mode == 0o1777
        for entry in archive:
            assert (entry.uid, entry.gid) == (0, 0)


def test_an_unusable_base_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(ReleaseError) as refused:
            release_images.read_base(path)
        return str(refused.value)

    assert "make cluster-programs" in refusal(tmp_path / "none.tar")
    assert "has Python 3.99" in refusal(small_image.base_tar(tmp_path / "a.tar", python="3.99"))
    assert "is not of" in refusal(small_image.base_tar(tmp_path / "b.tar", machine=8))
    with tarfile.open(tmp_path / "c.tar", "w"):
        pass
    assert "not a root file system" in refusal(tmp_path / "c.tar")
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert "this is linux of riscv64; leave them out" in refusal(tmp_path / "c.tar")


def test_packages_that_differ_from_uv_lock_or_were_modified_are_refused(tmp_path: Path) -> None:
    base = release_images.read_base(small_image.base_tar(tmp_path / "base.tar"))
    for locked, why in (
        ({"click": "0.1"}, "click is 0.1 in uv.lock"),
        ({"nobody-has-this": "1"}, "not in this environment"),
    ):
        with pytest.raises(ReleaseError, match=why):
            release_images.packages(locked, base)
    changed = tmp_path / "site/changed.py"
    changed.parent.mkdir()
    changed.write_text("changed = True\n")
    about = tmp_path / "site/changed-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: changed\nVersion: 1\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"before").digest()).rstrip(b"=").decode()
    (about / "RECORD").write_text(f"changed.py,sha256={digest},6\n")
    with pytest.raises(ReleaseError, match=r"changed\.py is not what changed 1 installed"):
        release_images.add_distribution(
            release_images.Tree(), metadata.Distribution.at(about), tmp_path / "site"
        )


def test_an_unsupported_dockerfile_step_is_refused() -> None:
    more = "FROM base AS small\nRUN apt-get install gcc\nFROM base AS other\n"
    with pytest.raises(ReleaseError, match="RUN apt-get install gcc"):
        release_images.stage(more, "small")
    with pytest.raises(ReleaseError, match="no stage large"):
        release_images.stage(more, "large")
