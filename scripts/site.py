"""`make docs`: build the documentation as a site into `site/`, strictly.

Pages link to examples, charts and sources beside `docs/`, so the site is built from a copy of
everything that is linked, laid out as in the repository: the same relative links work in a checkout
and on the site. A link or a heading that does not exist, and a page that the navigation of
`zensical.toml` lacks, is an error.

With `--versions FOLDER` (`make docs VERSIONS=FOLDER`) the site is also put into FOLDER beside those
of other releases, laid out as mike does: a folder per version, `versions.json` for the selector in
the head of each page, and an index that leads to the newest version.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from packaging.version import Version

ROOT: Final = Path(__file__).resolve().parent.parent
SETTINGS: Final = "zensical.toml"
SOURCES: Final = ".site"
"""Folder of the copy; `docs_dir` of the settings."""
COPIED: Final = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE"),
    *("docs", "examples", "charts/paceline/dashboards", "charts/paceline/rules"),
    "operator/paceline_operator/fabrics",
)
BESIDE_NAVIGATION: Final = frozenset({"docs/README.md"})
"""Pages for readers of a checkout: the site's navigation takes their place."""
LINK: Final = re.compile(r"\]\((?!https?:)([^)#:\s]+)")
"""A relative link without its heading."""
TIMEOUT_S: Final = 300


def problems(root: Path = ROOT) -> str:
    """Return what is wrong with the site, as text for people; empty if it builds."""
    lost = [f"{page} is not in the nav of {SETTINGS}\n" for page in orphans(root)]
    lost += [f"{page}: {link}: there is no such file\n" for page, link in dead_files(root)]
    return "".join(lost) or build(root)


def build(root: Path = ROOT) -> str:
    """Build the site; return what the generator said if it did not end well."""
    sources = root / SOURCES
    shutil.rmtree(sources, ignore_errors=True)
    for name in COPIED:
        target = sources / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (root / name).is_dir():
            shutil.copytree(root / name, target)
        else:
            shutil.copy(root / name, target)
    done = subprocess.run(
        [Path(sys.executable).parent / "zensical", "build", "--clean", "--strict"],
        cwd=root,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={"PATH": "/usr/bin:/bin", "NO_COLOR": "1"},
        check=False,
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def orphans(root: Path = ROOT) -> list[str]:
    """Return the pages below docs/ and examples/ that no entry of the navigation leads to."""
    settings = tomllib.loads((root / SETTINGS).read_text())
    listed = set(_pages(settings["project"]["nav"]))
    written = {
        str(page.relative_to(root))
        for folder in ("docs", "examples")
        for page in (root / folder).rglob("*.md")
    }
    return sorted(written - listed - BESIDE_NAVIGATION)


def dead_files(root: Path = ROOT) -> list[tuple[str, str]]:
    """Return the links to files that are no pages and not there, each with its page.

    The generator looks at links to pages only.
    """
    return [
        (str(page.relative_to(root)), link)
        for folder in ("docs", "examples")
        for page in sorted((root / folder).rglob("*.md"))
        for link in LINK.findall(page.read_text())
        if not link.endswith(".md") and not (page.parent / link).exists()
    ]


def publish(folder: Path, root: Path = ROOT) -> None:
    """Put the site that was built into a folder of versions, in place of one of the same version.

    Args:
        folder: The folder of versions; it is made if it does not exist.
        root: The checkout.
    """
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    shutil.rmtree(folder / version, ignore_errors=True)
    shutil.copytree(root / "site", folder / version)
    versions = (path.parent.name for path in folder.glob("*/index.html"))
    newest, *others = sorted(versions, key=Version, reverse=True)
    listed = [{"version": each, "title": each, "aliases": []} for each in (newest, *others)]
    (folder / "versions.json").write_text(json.dumps(listed, indent=1) + "\n")
    (folder / "index.html").write_text(
        f'<!DOCTYPE html><meta http-equiv="refresh" content="0; url={newest}/">\n'
    )


def _pages(entry: Any) -> Iterator[str]:
    match entry:
        case str():
            yield entry
        case list():
            for each in entry:
                yield from _pages(each)
        case dict():
            for each in entry.values():
                yield from _pages(each)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="build the documentation as a site")
    parser.add_argument("--versions", type=Path, help="folder with a site for each version")
    given = parser.parse_args()
    if wrong := problems():
        sys.exit(f"{wrong}hint: correct the link, or add the page to {SETTINGS}")
    if given.versions:
        publish(given.versions)
