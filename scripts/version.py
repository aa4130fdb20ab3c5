"""The version, in one place: `make version` shows it, `make version VERSION=1.2.3` changes it.

pyproject.toml defines it. Every other place is written from there; `make check` finds places that
have another version.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCE: Final = "pyproject.toml"
_FORM: Final = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
"""Form of a version. It has no suffix, because Python and Helm write suffixes in different ways."""
_IMAGE: Final = r"paceline/(?:operator|worker):([\w.]+)"
_CHART: Final = (r"^version: (.+)$", r"^appVersion: (.+)$", _IMAGE)
_RENDERED: Final = (
    r"app\.kubernetes\.io/version: (.+)",
    r"helm\.sh/chart: paceline-(.+)",
    _IMAGE,
)
PLACES: Final[Mapping[str, tuple[str, ...]]] = {
    SOURCE: (r'^version = "(.+)"$',),
    "uv.lock": (r'^name = "paceline"\nversion = "(.+)"$',),
    "charts/paceline/Chart.yaml": _CHART,
    "charts/paceline-crds/Chart.yaml": _CHART[:2],
    "Dockerfile": (_IMAGE,),
    "docs/kubernetes.md": (_IMAGE,),
    "docs/tutorials/first-cluster-job.md": (_IMAGE,),
    "examples/digits/Dockerfile": (_IMAGE,),
    **{
        f"tests/operator/golden/chart-{variant}.yaml": _RENDERED
        for variant in ("default", "everything", "namespaced")
    },
}
"""Patterns by file, each with one group that matches the version."""


class VersionError(Exception):
    """Raised with a message that names the fault and its remedy."""


def current(root: Path = ROOT) -> str:
    """Return the version in pyproject.toml."""
    project = tomllib.loads((root / SOURCE).read_text())
    return str(project["project"]["version"])


def write(version: str, root: Path = ROOT) -> list[str]:
    """Write a version to every place.

    Args:
        version: Three numbers, such as 1.2.3.
        root: Root of the repository.

    Returns:
        Paths of the files that changed.

    Raises:
        VersionError: The version is malformed, or a place has none.
    """
    if not _FORM.fullmatch(version):
        raise VersionError(f"{version} is not a version; write three numbers, such as 1.2.3")
    changed = []
    for path in PLACES:
        old = (root / path).read_text()
        new = _with(path, old, version)
        if new != old:
            (root / path).write_text(new)
            changed.append(path)
    return changed


def problems(root: Path = ROOT) -> str:
    """Return which places differ from pyproject.toml, one a line; empty if none."""
    version, wrong = current(root), ""
    for path in PLACES:
        text = (root / path).read_text()
        try:
            if _with(path, text, version) != text:
                wrong += f"{path} says another version than {SOURCE}, which says {version}\n"
        except VersionError as error:
            wrong += f"{error}\n"
    return wrong


def _with(path: str, text: str, version: str) -> str:
    for pattern in PLACES[path]:
        text, count = re.subn(
            pattern,
            lambda match: (
                match[0][: match.start(1) - match.start()]
                + version
                + match[0][match.end(1) - match.start() :]
            ),
            text,
            flags=re.M,
        )
        if not count:
            raise VersionError(
                f"{path} has no version where {pattern!r} looks for it; mend scripts/version.py"
            )
    return text


def main(arguments: list[str]) -> int:
    """Show or change the version and return the exit code."""
    if not arguments:
        print(current())
        return 0
    try:
        for path in write(arguments[0]):
            print(f"wrote {path}")
    except VersionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
