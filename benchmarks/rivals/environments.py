"""Build the virtual environment of each rival, once, in a cache folder outside the checkout.

An environment is named after its content, so it is built again when that changes. A failed build is
remembered with its reason for as long as the folder exists; remove the folder to try again.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.jobs import ROOT

HERE: Final = Path(__file__)
BUILD_S: Final = 1800.0
WHY_CHARACTERS: Final = 160


class NotBuiltError(RuntimeError):
    """Raised when a rival is not available; the message is the reason, in one line."""


@dataclass(frozen=True)
class Environment:
    """Packages that a rival needs; several rivals may share one environment."""

    name: str
    packages: tuple[str, ...]
    after: str = ""
    """Python code that compiles the rest, below the environment's folder `extensions`."""

    @classmethod
    def read(cls, name: str) -> Environment:
        """Return the environment with this name in `environments.toml`."""
        facts = tomllib.loads(HERE.with_name("environments.toml").read_text())[name]
        after = facts.get("after", "")
        if "after_file" in facts:
            after = HERE.with_name(facts["after_file"]).read_text()
        return cls(name, tuple(facts["packages"]), after)

    def folder(self, cache: Path) -> Path:
        """Return the folder of this environment; its name depends on the content."""
        what = [sys.version.split()[0], *self.packages, self.after]
        key = hashlib.blake2b(repr(what).encode(), digest_size=5).hexdigest()
        return cache / f"{self.name}-{key}"


def default_cache() -> Path:
    """Return the folder for environments in the user's cache."""
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(caches) if caches else Path.home() / ".cache") / "paceline" / "rivals"


def python_of(wanted: Environment, cache: Path) -> Path:
    """Return the interpreter of an environment, which is built if it does not exist yet.

    Args:
        wanted: The environment.
        cache: Folder of all environments. A lock file in it lets one of two benchmarks build.

    Returns:
        Path of the interpreter.

    Raises:
        NotBuiltError: The environment cannot be built, now or in an earlier attempt.
    """
    folder = wanted.folder(cache)
    done = folder / "built.json"
    cache.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # only one of two benchmarks builds
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            print(f"building {folder}", file=sys.stderr, flush=True)
            why = _build(wanted, folder)
            done.write_text(json.dumps({"packages": wanted.packages, "why": why}) + "\n")
    why = json.loads(done.read_text())["why"]
    if why:
        raise NotBuiltError(why)
    return folder / "bin" / "python"


def interpreter(wanted: Environment | None, cache: Path, *, smoke: bool) -> Path | None:
    """Return the interpreter of a rival; None is that of the checkout.

    Args:
        wanted: Environment of the rival; None is that of the checkout.
        cache: Folder of all environments.
        smoke: True to build nothing and to use what the checkout happens to have.

    Returns:
        Path of the interpreter, or None.

    Raises:
        NotBuiltError: The environment cannot be built, or the checkout lacks a package.
    """
    if wanted is None:
        return None
    if not smoke:
        return python_of(wanted, cache)
    for package in wanted.packages:
        name = re.split(r"[=<>]", package)[0]
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise NotBuiltError(f"not tried: this environment has no {name}") from None
    return None


def _uv() -> str:
    own = ROOT / ".tools" / "bin" / "uv"
    program = str(own) if own.exists() else shutil.which("uv")
    if not program:
        raise NotBuiltError("there is no uv: `make install` brings it")
    return program


def _build(wanted: Environment, folder: Path) -> str:
    """Build an environment; return an empty string, or why it could not be built."""
    python = folder / "bin" / "python"
    try:
        _call([_uv(), "venv", "--quiet", "--python", sys.executable, str(folder)], folder)
        _call([_uv(), "pip", "install", "--python", str(python), *wanted.packages], folder)
        if wanted.after:
            extensions = {"TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
            _call([str(python), "-c", wanted.after], folder, extensions)
    except NotBuiltError as reason:
        return str(reason)
    return ""


def _call(argv: Sequence[str], folder: Path, settings: Mapping[str, str] | None = None) -> None:
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    try:
        done = subprocess.run(
            argv,
            env={**os.environ, "PATH": path, **(settings or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BUILD_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NotBuiltError(f"not built within {BUILD_S:.0f} s") from None
    with (folder / "build.log").open("a") as log:
        log.write(done.stdout)
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines()] or ["no output"]
        # The compiler's own error explains more than the summary at the end.
        telling = [line for line in lines if " error: " in line] or lines
        raise NotBuiltError(telling[0][-WHY_CHARACTERS:])
