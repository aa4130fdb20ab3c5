"""Command line that all benchmarks share: its parser, its options, and the entry point."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from benchmarks.lab import Lab
from benchmarks.report import Report

RESULTS: Final = Path(__file__).parent / "results"
SMOKE_ROUNDS: Final = 2


@dataclass(frozen=True)
class Options:
    """Parsed command line of a benchmark."""

    smoke: bool
    rounds: int
    """Number of interleaved repetitions."""
    out: Path | None
    """Folder of the result files; None writes no files."""
    torchft: str
    """Path of a Python interpreter that can import torchft; empty leaves torchft out."""
    parts: str = ""
    """Letters of the parts of B10 or the anatomy to run; empty runs all."""
    quick: bool = False
    """True for the small form of the rivals benchmark."""
    only: tuple[str, ...] = ()
    """Rivals to run: those whose name contains one of these strings; empty runs all."""
    ranks: tuple[int, ...] = ()
    networks: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    """Batch sizes of the rivals' table. For `ranks`, `networks` and this field, empty means all of
    the form."""
    cache: Path | None = None
    """Folder of the rivals' environments; None uses the user's cache folder."""


def _list(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, _list(text)))


Benchmark = Callable[[Lab, Options], Report]


def parser(what: str | None) -> argparse.ArgumentParser:
    """Return an argument parser with the shared options; `what` is a module docstring or None."""
    made = argparse.ArgumentParser(description=(what or "").splitlines()[0] if what else "")
    made.add_argument("--smoke", action="store_true", help="smallest size; figures mean nothing")
    made.add_argument("--rounds", type=int, default=5, help="interleaved repetitions")
    made.add_argument("--out", type=Path, default=None, help="folder of the result files")
    made.add_argument(
        "--torchft", default="", metavar="PYTHON", help="B8: interpreter that can import torchft"
    )
    made.add_argument(
        "--parts", default="", metavar="LETTERS", help="B10: of a to e; anatomy: of a to c"
    )
    made.add_argument("--quick", action="store_true", help="rivals: the small form")
    made.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="rivals: a part of a name"
    )
    for name, read in (("ranks", _numbers), ("networks", _list), ("batches", _numbers)):
        made.add_argument(
            f"--{name}", type=read, default=(), metavar="A,B", help=f"rivals: these {name} only"
        )
    made.add_argument("--cache", type=Path, default=None, help="rivals: folder of environments")
    return made


def options(given: argparse.Namespace) -> Options:
    """Return the options of parsed arguments; `--smoke` runs SMOKE_ROUNDS rounds."""
    folder = given.out or (None if given.smoke else RESULTS)
    rounds = SMOKE_ROUNDS if given.smoke else given.rounds
    return Options(
        *(given.smoke, rounds, folder, given.torchft, given.parts),
        quick=given.quick,
        only=tuple(given.only),
        ranks=given.ranks,
        networks=given.networks,
        batches=given.batches,
        cache=given.cache,
    )


def main(run: Benchmark, what: str | None) -> NoReturn:
    """Run one benchmark as a program, publish its report, and exit."""
    given = options(parser(what).parse_args())
    with Lab() as lab:
        report = run(lab, given)
    sys.exit(report.publish(given.out))
