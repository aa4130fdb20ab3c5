"""Requirements with hashes for pip, generated from uv.lock, for places that have no uv.

`make generate` writes them. uv itself comes before any lock; its version stands in scripts/uv.txt.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

LOCK: Final = Path(__file__).parent.parent / "uv.lock"
HEAD: Final = "# Generated from uv.lock by scripts/pins.py; do not edit: make generate.\n"
BUILD: Final = ("hatchling",)
"""Packages that build the wheel."""
DIGITS: Final = ("scikit-learn",)
"""Packages that the digits example adds to the worker's image."""

Package = Mapping[str, Any]


def build() -> str:
    """Return the requirements of scripts/build.txt."""
    return requirements(BUILD)


def digits() -> str:
    """Return the requirements of examples/digits/requirements.txt."""
    return requirements(DIGITS)


def requirements(names: Iterable[str]) -> str:
    """Return these packages and their dependencies, each with the hashes of all of its files.

    Args:
        names: Packages of uv.lock.

    Returns:
        The text of a requirements file.
    """
    locked = defaultdict[str, list[Package]](list)
    for each in tomllib.loads(LOCK.read_text())["package"]:
        locked[each["name"]].append(each)
    wanted = sorted(_closure(names, locked))
    return HEAD + "".join(_lines(each) for name in wanted for each in locked[name])


def _closure(names: Iterable[str], locked: Mapping[str, Sequence[Package]]) -> set[str]:
    wanted, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name not in wanted:
            wanted.add(name)
            versions = locked[name]
            waiting += [need["name"] for one in versions for need in one.get("dependencies", ())]
    return wanted


def _lines(package: Package) -> str:
    # Some packages have several versions, each for other Pythons.
    marker = " or ".join(f"({each})" for each in package.get("resolution-markers", ()))
    wanted = f"{package['name']}=={package['version']}" + (f" ; {marker}" if marker else "")
    parts = [wanted, *_hashes(package)]
    return " \\\n    ".join(parts) + "\n"


def _hashes(package: Package) -> Iterator[str]:
    files = [*package.get("wheels", ()), *([package["sdist"]] if "sdist" in package else ())]
    for digest in sorted({each["hash"] for each in files}):
        yield f"--hash={digest}"
