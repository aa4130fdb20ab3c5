"""`make check`: every check that needs no test run. It reads only and changes nothing.

It runs every check even if an earlier one fails, prints how long each took, and prints a remedy for
each failure. `make generate` is its counterpart: it writes the files that are compared here.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline_api import crdgen

sys.path.append(str(Path(__file__).resolve().parent.parent))
from benchmarks import tables
from scripts import (
    citations,
    cli_reference,
    dashboards,
    entry_points,
    field_reference,
    metrics_reference,
    operator_reference,
    pictures,
    pins,
    promises,
    python_reference,
    script_table,
    site,
    version,
)

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
VALUES = ROOT / "charts/paceline/values.yaml"
TIMEOUT_S = 2400
"""Longer than the first build of the test cluster, which has a higher priority than mypy."""


@dataclass(frozen=True)
class Check:
    """One check of the repository."""

    name: str
    run: Callable[[], str]
    """Function that returns what is wrong, as text for people; empty if nothing is."""
    remedy: str


def command(*argv: str) -> Callable[[], str]:
    """Return a check that runs a program of the environment and returns the output of a failure."""

    def run() -> str:
        try:
            done = subprocess.run(
                [str(BIN / argv[0]), *argv[1:]],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{argv[0]} was not over after {TIMEOUT_S} s"
        return "" if done.returncode == 0 else done.stdout + done.stderr

    return run


GENERATED: dict[str, Callable[[], str]] = {
    **{
        f"{folder}/{plural}.yaml": text
        for plural, text in crdgen.DEFINITIONS.items()
        for folder in ("charts/paceline-crds/files", "crds/manifests")
    },
    "docs/reference/cli.md": cli_reference.markdown,
    "docs/reference/entry-points.md": entry_points.markdown,
    "docs/reference/metrics.md": metrics_reference.markdown,
    "docs/reference/python.md": python_reference.markdown,
    "docs/reference/operator.md": lambda: operator_reference.markdown(VALUES.read_text()),
    "docs/reference/trainingjob.md": field_reference.markdown,
    "docs/scripts.md": script_table.markdown,
    "docs/testing.md": promises.markdown,
    "examples/digits/requirements.txt": pins.digits,
    "scripts/build.txt": pins.build,
    **dashboards.dashboards(),
    **pictures.pictures(),
    **tables.pages(),
}


def drift() -> str:
    """Return which generated files differ from what the code generates."""
    wrong = []
    for path, text in GENERATED.items():
        try:
            wanted = text()
        except (LookupError, ValueError) as error:
            wrong.append(f"{path} cannot be generated: {error}\n")
        else:
            if not (ROOT / path).is_file() or (ROOT / path).read_text() != wanted:
                wrong.append(f"{path} is not what the code generates\n")
    return "".join(wrong)


CONCISE = ("--output-format", "concise")
CHECKS = (
    Check("format", command("ruff", "format", "--check", *CONCISE, "."), "make format"),
    Check("lint", command("ruff", "check", *CONCISE, "."), "make format repairs some of it"),
    Check("types", command("mypy"), "give every function its types"),
    Check("imports", command("lint-imports", "--no-logo"), "see docs/architecture.md"),
    Check("generated", drift, "make generate"),
    Check("version", version.problems, "make version VERSION=... writes every place"),
    Check(
        "citations",
        lambda: citations.problems(ROOT),
        "correct the number, or write the decision down: docs/design/README.md says how",
    ),
    Check("site", site.problems, "correct the link, or add the page to zensical.toml"),
)


def generate() -> None:
    """Write all generated files."""
    for path, text in GENERATED.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text())
        print(f"wrote {path}")


def check() -> int:
    """Run all checks, print their results, and return the exit code."""
    failed = 0
    for each in CHECKS:
        start = time.monotonic()
        problem = each.run()
        took_s = time.monotonic() - start
        print(f"check {each.name:<10} {'FAILED' if problem else 'ok':<6} {took_s:6.1f} s")
        if problem:
            failed += 1
            print(f"{problem.rstrip()}\nhint: {each.remedy}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--generate"]:
            generate()
        case []:
            sys.exit(check())
        case _:
            sys.exit("usage: check.py [--generate]")
