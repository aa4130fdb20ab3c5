"""Build images from a Dockerfile without a registry: buildah over a Debian base.

debootstrap makes the base from Debian's packages; it is kept in the cache beside the programs. The
disk with the layers of the last builds is kept too, so only what has changed is built again. The
machine's own access to package indexes (certificates, pip settings, resolver) is mounted during the
build and is not part of the image.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from testing.cluster import disks, programs
from testing.cluster.prerequisites import IMAGE_PACKAGES, MissingPrerequisiteError, missing_packages

BASE = "paceline.test/python-base:bookworm"
_SUITE = "bookworm"
_INCLUDE = "python3,python3-venv,ca-certificates"
BASE_TIMEOUT_S = 900.0
BUILD_TIMEOUT_S = 1800.0
LAYERS_BYTES_MAX = 6 << 30
"""Size of a disk's layers above which the disk is discarded instead of reused."""
# Path of a setting on the host -> path where the program looks for it during the build. If several
# are for the same path, the last one that exists is used.
_HOST_SETTINGS = (
    (Path("/etc/ssl/certs"), "/etc/ssl/certs"),
    (Path("/usr/share/ca-certificates"), "/usr/share/ca-certificates"),
    (Path("/etc/resolv.conf"), "/etc/resolv.conf"),
    (Path("/etc/pip.conf"), "/etc/pip.conf"),
    (Path.home() / ".pip/pip.conf", "/etc/pip.conf"),
    (Path.home() / ".config/pip/pip.conf", "/etc/pip.conf"),
)


class ImageBuildError(Exception):
    """Raised when a step of a build fails; the message has the end of its output."""


def base_archive() -> Path:
    """Return the path of the cached base archive, which may not exist yet."""
    return programs.cache_folder().parent.parent / "images" / f"{_SUITE}.tar"


def make_base() -> Path:
    """Create the tar of a Debian with Python unless it exists, and return its path."""
    target = base_archive()
    if target.is_file():
        return target
    require_builder()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        root, part = Path(scratch) / "root", Path(scratch) / "part.tar"
        options = ["--variant=minbase", f"--include={_INCLUDE}", _SUITE, str(root)]
        _run(["debootstrap", *options], BASE_TIMEOUT_S)
        # The package lists and the cached packages are a third of the size.
        leave = ["./var/cache/apt/*", "./var/lib/apt/lists/*", "./dev/*", "./proc/*", "./sys/*"]
        excluded = [f"--exclude={pattern}" for pattern in leave]
        _run(["tar", "--numeric-owner", *excluded, "-C", str(root), "-cf", str(part), "."], 300.0)
        part.replace(target)
    return target


@contextmanager
def storage_disk(folder: Path) -> Iterator[Path]:
    """Yield the disk that keeps layers from one builder to the next.

    While another builder holds it, yield a new disk in `folder` instead. The disk has no journal,
    so it is made anew unless its last builder ended well.

    Args:
        folder: where a disk goes while the shared one is in use.

    Yields:
        path of the disk's file, which may not exist yet.
    """
    kept = base_archive().parent
    kept.mkdir(parents=True, exist_ok=True)
    disk, ended_well = kept / "layers.img", kept / "layers.ended-well"
    with (kept / "layers.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield folder / "disk.img"
            return
        if disk.exists():
            disks.free(disk)
            if not ended_well.exists() or disk.stat().st_blocks * 512 > LAYERS_BYTES_MAX:
                disk.unlink()
        ended_well.unlink(missing_ok=True)
        yield disk
        ended_well.touch()


class ImageBuilder:
    """Builder of images in the storage below `folder`, which no other builder uses meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._storage = [f"--root={folder / 'storage'}", f"--runroot={folder / 'run'}"]

    def base(self) -> str:
        """Return the base image's tag, for a build argument; the first call makes the image."""
        recipe = self._folder / "base.Dockerfile"
        if not recipe.exists():
            archive = make_base()
            recipe.write_text(f"FROM scratch\nADD {archive.name} /\nCMD python3\n")
            self._bud(["--tag", BASE, "--file", str(recipe), str(archive.parent)])
        return BASE

    def build(
        self,
        tag: str,
        *,
        context: Path,
        dockerfile: Path,
        target: str = "",
        arguments: Mapping[str, str] | None = None,
    ) -> Path:
        """Build a target of a Dockerfile from local images only; return its docker archive."""
        self.bud(tag, context=context, dockerfile=dockerfile, target=target, arguments=arguments)
        archive = self._folder / f"{tag.rpartition('/')[2].replace(':', '-')}.tar"
        archive.unlink(missing_ok=True)
        self._buildah("push", tag, f"docker-archive:{archive}:{tag}")
        return archive

    def bud(
        self,
        tag: str,
        *,
        context: Path,
        dockerfile: Path,
        target: str = "",
        arguments: Mapping[str, str] | None = None,
    ) -> None:
        """Build like `build`, but leave the image in the storage and write no archive."""
        options = ["--tag", tag, "--file", str(dockerfile)]
        options += ["--target", target] if target else []
        for name, value in (arguments or {}).items():
            options += ["--build-arg", f"{name}={value}"]
        settings = {inside: source for source, inside in _HOST_SETTINGS if source.exists()}
        for inside, source in settings.items():
            options += ["--volume", f"{source}:{inside}:ro"]
        self._bud([*options, str(context)])

    def run(self, tag: str, *command: str) -> str:
        """Run a command in a container of an image and return what it prints."""
        name = self._buildah("from", "--pull-never", tag).strip().splitlines()[-1]
        try:
            return self._buildah("run", "--isolation=chroot", name, "--", *command)
        finally:
            self._buildah("rm", name)

    def size(self, tag: str) -> int:
        """Return the size of all layers of an image in bytes."""
        listed = self._buildah("images", "--json", tag)
        images: list[dict[str, object]] = json.loads(listed)
        return _bytes_of(str(images[0]["size"]))

    def _bud(self, options: list[str]) -> None:
        how = [
            "--isolation=chroot",
            "--network=host",
            "--pull-never",
            "--format=docker",
            "--layers",
        ]
        self._buildah("bud", *how, *options)

    def _buildah(self, *words: str) -> str:
        return _run(
            ["buildah", *self._storage, "--storage-driver=overlay", *words], BUILD_TIMEOUT_S
        )


def require_builder() -> None:
    """Raise MissingPrerequisiteError unless this machine can build images."""
    if os.geteuid() != 0:
        raise MissingPrerequisiteError("images are built by root here", "run as root")
    if missing := missing_packages(IMAGE_PACKAGES):
        raise MissingPrerequisiteError(
            f"missing packages: {' '.join(missing)}", f"apt-get install {' '.join(missing)}"
        )


def _bytes_of(size: str) -> int:
    """Parse a size as buildah writes it, such as "243 MB"."""
    number, unit = size.split()
    scale: int = 1000 ** ("B", "KB", "MB", "GB").index(unit.upper())
    return round(float(number) * scale)


def _run(command: list[str], timeout_s: float) -> str:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode:
        words = " ".join(command)
        raise ImageBuildError(f"{words}: exit code {done.returncode}\n{done.stdout[-6000:]}")
    return done.stdout
