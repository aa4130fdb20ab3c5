"""The images of a release, built without Docker, without root and without a network.

An image has three layers: a Debian with Python, as a tar; the packages that uv.lock lists, from
this environment; and Paceline's wheel. The start of a container is read from the image's stage in
the Dockerfile. Each file of a package must be what its installer recorded. The same base, packages
and commit give the same image.
"""

from __future__ import annotations

import base64
import configparser
import csv
import hashlib
import importlib.util
import io
import json
import marshal
import os
import platform
import re
import shlex
import sys
import tarfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from importlib.machinery import SourceFileLoader
from pathlib import Path, PurePosixPath
from types import CodeType
from typing import Any, Final

from paceline.transport import native

from scripts import oci
from scripts.system_packages import (
    OS_RELEASE,
    STATUS,
    Distribution,
    SystemPackage,
    distribution,
    installed,
)

PREFIX: Final = "opt/paceline"
"""Folder of the packages in an image: the environment that the Dockerfile makes."""
STAMP: Final = 315532800
"""Modification time (1980, as in wheels) of all files that are not of the base. So a layer of
packages that did not change is the same in the next release."""
SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ARCHITECTURES: Final = {"x86_64": ("amd64", 62), "aarch64": ("arm64", 183)}
"""Name in an image, and machine number of an ELF header, by name of the kernel."""
_THIS_MACHINES: Final = re.compile(r"etc/(resolv\.conf|hostname|machine-id)|var/log/.*[^/]")
"""Matches files that a base took along from the machine where it was made."""
_PYTHON: Final = re.compile(r"usr/(?:local/)?bin/python(3\.\d+)")
_PIP: Final = re.compile(r"(.*/)?(python-wheels|ensurepip/_bundled)/pip-[^/]*\.whl")
_UNCHECKED_HASH: Final = 1


class ReleaseError(Exception):
    """Raised with a message that names the fault and its remedy."""


@dataclass(frozen=True)
class Stage:
    """Instructions of a stage of the Dockerfile other than its copies."""

    process: dict[str, Any]
    """Settings as in an image's config: Env, User, WorkingDir, Entrypoint, Labels."""
    folders: dict[str, int] = field(default_factory=dict)
    """Modes of folders, by path without the first slash."""


@dataclass(frozen=True)
class Base:
    """A root file system as a tar, with a Python."""

    path: Path
    python: str
    """Version of its Python, such as 3.11."""
    python_folder: str
    """Folder of its Python, such as /usr/bin."""
    architecture: str
    """Architecture, such as amd64."""
    pip: bytes
    """Wheel of pip that its venv would install."""
    packages: tuple[SystemPackage, ...]
    """Packages of its Debian."""
    distribution: Distribution


# ---- the Dockerfile ------------------------------------------------------------------------------


def stage(dockerfile: str, target: str) -> Stage:
    """Return the settings of a stage of the Dockerfile.

    Args:
        dockerfile: Text of the Dockerfile.
        target: Name of the stage.

    Returns:
        The settings.

    Raises:
        ReleaseError: There is no such stage, or it has an instruction that is not supported here.
    """
    section = re.search(
        rf"^FROM \S+ AS {re.escape(target)}\n(.*?)(?=^FROM |\Z)", dockerfile, re.M | re.S
    )
    if section is None:
        raise ReleaseError(f"the Dockerfile has no stage {target}")
    environment: dict[str, str] = {"PATH": SYSTEM_PATH}
    labels: dict[str, str] = {}
    process: dict[str, Any] = {}
    folders: dict[str, int] = {}
    for line in section[1].replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        match word:
            case "" | "#":
                pass
            case "ENV":
                given = dict(each.split("=", 1) for each in shlex.split(rest))
                old = environment["PATH"]
                environment |= {k: v.replace("$PATH", old) for k, v in given.items()}
            case "LABEL":
                labels |= dict(each.split("=", 1) for each in shlex.split(rest))
            case "USER":
                process["User"] = rest
            case "WORKDIR":
                process["WorkingDir"] = rest
            case "ENTRYPOINT":
                process["Entrypoint"] = json.loads(rest)
            case "RUN" if made := re.fullmatch(r"mkdir --mode=(\d+) /(\S+)", rest):
                folders[made[2]] = int(made[1], 8)
            case "COPY" if rest == f"--from={target}-packages /{PREFIX} /{PREFIX}":
                pass
            case _:
                raise ReleaseError(
                    f"the Dockerfile's stage {target} says {line.strip()!r}, which a release does "
                    f"not follow; teach it in scripts/release_images.py"
                )
    process |= {"Env": [f"{k}={v}" for k, v in environment.items()], "Labels": labels}
    return Stage(process, folders)


# ---- the base ------------------------------------------------------------------------------------


def read_base(path: Path) -> Base:
    """Read a base and check that packages of this environment run on it.

    Args:
        path: Tar of a root file system.

    Returns:
        The base.

    Raises:
        ReleaseError: The file is missing, or has another architecture or Python.
    """
    kind = ARCHITECTURES.get(platform.machine()) if sys.platform == "linux" else None
    if kind is None:
        raise ReleaseError(
            f"images are made on Linux of {' or '.join(ARCHITECTURES)}, and this is {sys.platform} "
            f"of {platform.machine()}; leave them out (IMAGES=)"
        )
    if not path.is_file():
        raise ReleaseError(
            f"no base for images at {path}; make it as root with `make cluster-programs`, name a "
            f"tar of a Debian with Python (BASE=FILE), or leave the images out (IMAGES=)"
        )
    python, header, pip, lists = None, b"", b"", dict[str, bytes]()
    with tarfile.open(path) as archive:
        for entry in archive:
            name = _name(entry.name)
            if not entry.isreg():
                continue
            content = archive.extractfile(entry)
            assert content is not None
            if match := _PYTHON.fullmatch(name):
                python, header = match, content.read(20)
            elif _PIP.fullmatch(name):
                pip = content.read()
            elif name in (STATUS, OS_RELEASE):
                lists[name] = content.read()
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if python is None or not pip:
        raise ReleaseError(
            f"{path} is not a root file system with a Python and its venv; "
            "take a Debian that has them"
        )
    if python[1] != here:
        raise ReleaseError(
            f"{path} has Python {python[1]}, and packages here are of {here}; take another base, "
            f"or run `make clean install PYTHON=python{python[1]}`"
        )
    architecture, machine = kind
    if int.from_bytes(header[18:20], "little") != machine:
        raise ReleaseError(f"{path} is not of {architecture}; release it on a machine of its kind")
    if lists.keys() != {STATUS, OS_RELEASE}:
        raise ReleaseError(
            f"{path} does not say which packages it is made of ({STATUS} and {OS_RELEASE}); take a "
            "Debian whose dpkg has not been removed"
        )
    folder = f"/{PurePosixPath(python[0]).parent}"
    packages, system = installed(lists[STATUS]), distribution(lists[OS_RELEASE])
    return Base(path, python[1], folder, architecture, pip, packages, system)


def _fill_from(base: Path, archive: tarfile.TarFile) -> None:
    """Copy the base without the files of the machine on which it was made."""
    with tarfile.open(base) as source:
        for entry in source:
            entry.name = _name(entry.name)
            entry.pax_headers = {}
            if not entry.isdir() and _THIS_MACHINES.fullmatch(entry.name):
                continue
            if entry.islnk():
                entry.linkname = _name(entry.linkname)
            archive.addfile(entry, source.extractfile(entry) if entry.isreg() else None)


def _name(name: str) -> str:
    return str(PurePosixPath(name.lstrip("/")))


# ---- packages ------------------------------------------------------------------------------------


@dataclass
class Tree:
    """Files and links of a layer, by path without the first slash."""

    files: dict[str, tuple[bytes | Path, int]] = field(default_factory=dict)
    """Content and mode."""
    links: dict[str, str] = field(default_factory=dict)
    folders: dict[str, int] = field(default_factory=dict)

    def fill(self, archive: tarfile.TarFile) -> None:
        """Add everything to an archive in the order of names, parents first."""
        parents = {
            str(parent): 0o755
            for name in (*self.files, *self.links, *self.folders)
            for parent in list(PurePosixPath(name).parents)[:-1]
        }
        folders = parents | self.folders
        for name in sorted({*folders, *self.files, *self.links}):
            if name in self.files:
                content, mode = self.files[name]
                oci.add(archive, name, content, STAMP, mode)
                continue
            entry = tarfile.TarInfo(name)
            entry.mtime = STAMP
            if name in self.links:
                entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, self.links[name], 0o777
            else:
                entry.type, entry.mode = tarfile.DIRTYPE, folders[name]
            archive.addfile(entry)


def packages(locked: Mapping[str, str], base: Base) -> Tree:
    """Return the environment of an image.

    Args:
        locked: Versions in uv.lock, by package.
        base: Base of the image.

    Returns:
        Files and links of the layer.

    Raises:
        ReleaseError: This environment lacks a package or has another version of it.
    """
    tree = Tree()
    tree.files[f"{PREFIX}/pyvenv.cfg"] = (
        f"home = {base.python_folder}\ninclude-system-site-packages = false\n".encode(),
        0o644,
    )
    tree.links = {
        f"{PREFIX}/bin/python3": f"{base.python_folder}/python3",
        f"{PREFIX}/bin/python": "python3",
        f"{PREFIX}/bin/python{base.python}": "python3",
        f"{PREFIX}/lib64": "lib",
    }
    for name, version in sorted(locked.items()):
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise ReleaseError(
                f"{name} {version} is in uv.lock and not in this environment; run `make install`"
            ) from None
        if distribution.version != version:
            raise ReleaseError(
                f"{name} is {version} in uv.lock and {distribution.version} in this environment; "
                f"run `make clean install`, without TORCH=cpu"
            )
        add_distribution(tree, distribution, Path(sys.prefix))
    return tree


def add_wheel(tree: Tree, wheel: bytes, base: Base, scratch: Path) -> Path:
    """Unpack a wheel below `scratch` and add its files to a tree.

    Args:
        tree: Layer that the files are added to.
        wheel: Content of the wheel.
        base: Base of the image.
        scratch: Folder to unpack into.

    Returns:
        The unpacked site-packages folder.
    """
    site = scratch / f"lib/python{base.python}/site-packages"
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        archive.extractall(site)
        [about] = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    add_distribution(tree, metadata.Distribution.at(site / about), scratch)
    return site


def add_distribution(tree: Tree, distribution: metadata.Distribution, prefix: Path) -> None:
    """Add the files of a package that is installed below `prefix`, and their bytecode."""
    scripts = _scripts(distribution)
    added: dict[str, tuple[bytes | Path, int]] = {
        f"bin/{name}": (content, 0o755) for name, content in scripts.items()
    }
    record = ""
    for listed, digest, _ in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
        path = Path(os.path.normpath(str(distribution.locate_file(listed))))
        name = path.relative_to(prefix).as_posix()
        if name in added or path.suffix == ".pyc":
            continue
        if path.name == "RECORD" and path.parent.suffix == ".dist-info":
            record = name
            continue
        _verify(path, digest, distribution)
        executable = path.stat().st_mode & 0o100
        content = _without_launcher(path, prefix) if name.startswith("bin/") else path
        added[name] = (content, 0o755 if executable else 0o644)
        if path.suffix == ".py":
            folder, stem = PurePosixPath(name).parent, path.stem
            if code := bytecode(path, f"/{PREFIX}/{name}"):
                kept = folder / f"__pycache__/{stem}.{sys.implementation.cache_tag}.pyc"
                added[str(kept)] = (code, 0o644)
    added[record] = (_record(added, PurePosixPath(record)), 0o644)
    tree.files |= {f"{PREFIX}/{name}": what for name, what in added.items()}


def bytecode(path: Path, shown: str) -> bytes | None:
    """Return the bytecode that Python would cache for a module.

    It is valid for that source whatever its modification time is. It holds no internal references,
    because those depend on what else the process has loaded.

    Args:
        path: Source file.
        shown: Path of the module in the image.

    Returns:
        Content of the pyc file; None if this Python cannot compile the source.
    """

    def placed(code: CodeType) -> CodeType:
        constants = (placed(one) if isinstance(one, CodeType) else one for one in code.co_consts)
        return code.replace(co_filename=shown, co_consts=tuple(constants))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = SourceFileLoader("released", str(path)).get_code("released")
    except (SyntaxError, ValueError):
        return None
    assert code is not None
    head = importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH.to_bytes(4, "little")
    return head + importlib.util.source_hash(path.read_bytes()) + marshal.dumps(placed(code), 2)


def _scripts(distribution: metadata.Distribution) -> dict[str, bytes]:
    """Return the programs of a package's entry points."""
    names = configparser.RawConfigParser(delimiters=("=",))
    names.optionxform = str  # type: ignore[assignment,method-assign]
    names.read_string(distribution.read_text("entry_points.txt") or "")
    programs = names["console_scripts"] if names.has_section("console_scripts") else {}
    return {
        name: (
            f"#!/{PREFIX}/bin/python3\nimport sys\n\nfrom {module} import {what.split('.')[0]}\n\n"
            f"sys.exit({what}())\n"
        ).encode()
        for name, (module, _, what) in (
            (name, target.split("[")[0].strip().partition(":")) for name, target in programs.items()
        )
    }


def _without_launcher(path: Path, prefix: Path) -> bytes | Path:
    """Return a script for the image's Python, if it is one for the environment's."""
    with path.open("rb") as file:
        first, second = file.readline(), file.readline()
        if not first.startswith(b"#!"):
            return path
        if second.startswith(b"'''exec'"):  # pip's workaround for a long path or one with blanks
            file.readline()
            return f"#!/{PREFIX}/bin/python3\n".encode() + file.read()
        if str(prefix / "bin").encode() in first:
            return f"#!/{PREFIX}/bin/python3\n".encode() + second + file.read()
    return path


def _verify(path: Path, recorded: str, distribution: metadata.Distribution) -> None:
    try:
        is_it = not recorded or recorded == _record_digest(path)
    except FileNotFoundError:
        is_it = False
    if not is_it:
        raise ReleaseError(
            f"{path} is not what {distribution.metadata['Name']} {distribution.version} installed; "
            f"run `make clean install`"
        )


def _record(added: Mapping[str, tuple[bytes | Path, int]], own: PurePosixPath) -> bytes:
    """Return RECORD of a package in the image, so that pip there can manage it."""
    site = own.parent.parent
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for name, (content, _) in sorted(added.items()):
        shown = os.path.relpath(name, site)
        if name.endswith(".pyc"):
            rows.writerow((shown, "", ""))
            continue
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        rows.writerow((shown, _record_digest(content), size))
    rows.writerow((os.path.relpath(own, site), "", ""))
    return text.getvalue().encode()


def _record_digest(content: bytes | Path) -> str:
    if isinstance(content, bytes):
        hashed = hashlib.sha256(content)
    else:
        with content.open("rb") as file:
            hashed = hashlib.file_digest(file, "sha256")
    return "sha256=" + base64.urlsafe_b64encode(hashed.digest()).rstrip(b"=").decode()


# ---- an image ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """Inputs that all images of a release share."""

    version: str
    stamp: int
    """Time of the commit, in seconds since 1970."""
    revision: str
    wheel: bytes
    base: Base
    base_layer: oci.Layer


def base_layer(base: Base, target: Path) -> oci.Layer:
    """Write the base as a layer."""
    return oci.write_layer(target, lambda archive: _fill_from(base.path, archive))


def write(
    target: Path, name: str, made: Made, stage: Stage, locked: Mapping[str, str], scratch: Path
) -> None:
    """Write the archive of an image; `scratch` is an empty folder for intermediate files."""
    environment = packages(locked, made.base)
    own = Tree(folders=stage.folders)
    site = add_wheel(own, made.wheel, made.base, scratch / "wheel")
    if name == "worker":
        add_wheel(environment, made.base.pip, made.base, scratch / "pip")
        for library in _native_loops(site):
            own.files[f"{PREFIX}/{library.relative_to(scratch / 'wheel')}"] = (library, 0o755)
    layers = [
        (made.base_layer, "root file system with Python"),
        (oci.write_layer(scratch / "packages", environment.fill), f"uv.lock, extra of {name}"),
        (oci.write_layer(scratch / "own", own.fill), f"paceline {made.version}"),
    ]
    tag = f"paceline/{name}:{made.version}"
    labels = {
        **stage.process["Labels"],
        "org.opencontainers.image.version": made.version,
        "org.opencontainers.image.revision": made.revision,
    }
    config = oci.image_config(
        architecture=made.base.architecture,
        created=datetime.fromtimestamp(made.stamp, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        process=stage.process | {"Labels": labels},
        layers=layers,
    )
    oci.write_archive(
        target,
        config=config,
        layers=[layer.blob for layer, _ in layers],
        annotations=labels,
        index_annotations={
            "io.containerd.image.name": f"docker.io/{tag}",
            "org.opencontainers.image.ref.name": made.version,
        },
        stamp=made.stamp,
        platform={"architecture": made.base.architecture, "os": "linux"},
    )


def _native_loops(site: Path) -> Iterator[Path]:
    """Compile the loops that a rank would compile, since an image has no compiler.

    Yields:
        Paths of the libraries.

    Raises:
        ReleaseError: The compiler is missing or fails.
    """
    folder = site / Path(*native.__name__.split("."))
    for source in native.SOURCES:
        own = folder / source.name
        try:
            native.build(own, folder)
        except native.UnavailableError as error:
            raise ReleaseError(f"the worker's native loops: {error}") from error
        yield folder / native.file_name(own)
