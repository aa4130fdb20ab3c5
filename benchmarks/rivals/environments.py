"""Builds the virtual environment of each rival, once, in a cache folder outside the checkout.

An environment is named after what is in it, so it is made again when that changes. What cannot be
built is remembered with its reason for as long as the folder is there; remove it to try again.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.lab import ROOT

BUILD_S: Final = 1800.0
WHY_CHARACTERS: Final = 160


class NotBuiltError(RuntimeError):
    """Why a rival is not here, in one line."""


@dataclass(frozen=True)
class Environment:
    """What a rival needs; several rivals may share one."""

    name: str
    packages: tuple[str, ...]
    after: str = ""
    """Python that compiles the rest, below the environment's folder `extensions`."""

    def folder(self, cache: Path) -> Path:
        what = [sys.version.split()[0], *self.packages, self.after]
        key = hashlib.blake2b(repr(what).encode(), digest_size=5).hexdigest()
        return cache / f"{self.name}-{key}"


def default_cache() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(caches) if caches else Path.home() / ".cache") / "paceline" / "rivals"


def python_of(wanted: Environment, cache: Path) -> Path:
    """Its interpreter; built if it is not there yet. Raises NotBuiltError."""
    folder = wanted.folder(cache)
    done = folder / "built.json"
    cache.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of two benchmarks builds
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
    """Of a rival; None: that of the checkout. A smoke test builds nothing: it takes what the
    checkout happens to have. Raises NotBuiltError."""
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
    found = str(own) if own.exists() else shutil.which("uv")
    if not found:
        raise NotBuiltError("there is no uv: `make install` brings it")
    return found


def _build(wanted: Environment, folder: Path) -> str:
    """Empty, or why not."""
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
        # What a compiler says tells more than what is said about it at the end.
        telling = [line for line in lines if " error: " in line] or lines
        raise NotBuiltError(telling[0][-WHY_CHARACTERS:])
