"""The harness of all benchmarks: declare one, interleave its sides, keep the samples, and report.

A benchmark is a function that fills a `Report` and is decorated with `benchmark(...)`. `run` in
each module is one; `python -m benchmarks NAME` runs it. A report prints as Markdown. With
`--publish`, it is written to `benchmarks/results/NAME.json`, from which `benchmarks.tables` writes
the tables of the documentation.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from benchmarks.lab import Lab

RESULTS: Final = Path(__file__).parent / "results"
SMOKE_ROUNDS: Final = 2
DIGITS: Final = 6
"""Significant digits of the floats in a results file, so that the files stay small."""

T = TypeVar("T")


@dataclass(frozen=True)
class Bar:
    """Target that a measured figure is to reach (docs/benchmarks.md)."""

    text: str
    measured: float
    bound: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        """Return True if the measured figure reaches the bound."""
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def line(self) -> str:
        """Return the verdict as one line of text."""
        sign = ">=" if self.at_least else "<="
        verdict = "met" if self.met else "MISSED"
        return f"{verdict}: {self.text}: {number(self.measured)} (bar {sign} {number(self.bound)})"


@dataclass
class Report:
    """Results of one run of one benchmark, with the options of that run."""

    topic: str
    """Name of the results file."""
    title: str
    columns: tuple[str, ...]
    smoke: bool = False
    """True for the smallest size, whose figures mean nothing."""
    rounds: int = 1
    """Number of interleaved repetitions."""
    stretch: float = 1.0
    """Factor on the length of phases and of emulated computing, for a busy machine."""
    given: argparse.Namespace = field(default_factory=argparse.Namespace)
    """Further options of this benchmark, as its `arguments` declare them."""
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    checks: dict[str, bool] = field(default_factory=dict)
    """Conditions that must hold at any speed, such as equal weights and no lost gradients."""
    notes: list[str] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)
    samples: dict[str, Any] = field(default_factory=dict)
    """Raw samples of the figures, or their values per round."""
    _begun: float = field(default_factory=time.time)
    _load: tuple[float, float, float] = field(default_factory=os.getloadavg)

    @cached_property
    def lab(self) -> Lab:
        """Lab that runs the jobs of this benchmark; the first use opens it."""
        from benchmarks.lab import Lab

        return Lab(self.stretch).__enter__()

    def close(self) -> None:
        """End the processes of the lab, if it was opened."""
        if "lab" in self.__dict__:
            self.lab.__exit__(None, None, None)

    def at_most(self, text: str, measured: float, bound: float) -> None:
        """Add a bar that is met if the measured figure is not above the bound."""
        self.bars.append(Bar(text, measured, bound, at_least=False))

    def at_least(self, text: str, measured: float, bound: float) -> None:
        """Add a bar that is met if the measured figure is not below the bound."""
        self.bars.append(Bar(text, measured, bound))

    def machine(self) -> dict[str, Any]:
        """Return hardware, software versions, commit, duration and load of this run."""
        return {
            **_gpu(),
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": version("torch"),
            "commit": _commit(),
            "priority": os.nice(0),
            "seconds": round(time.time() - self._begun, 1),
            "load before": [round(x, 2) for x in self._load],
            "load after": [round(x, 2) for x in os.getloadavg()],
        }

    def markdown(self) -> str:
        """Return the report as a Markdown section."""
        parts = [f"## {self.title}", "", *table(self.columns, self.rows), ""]
        parts += [f"- {bar.line()}" for bar in self.bars]
        parts += [f"- {'holds' if ok else 'BROKEN'}: {what}" for what, ok in self.checks.items()]
        parts += [f"- {note}" for note in self.notes]
        parts += [f"- result hash of {name}: {value}" for name, value in self.hashes.items()]
        parts += ["- " + "; ".join(f"{k} {v}" for k, v in self.machine().items())]
        return "\n".join(parts) + "\n"

    def publish(self, folder: Path | None, name: str = "") -> int:
        """Print the report, and write the results file.

        Args:
            folder: Folder of the results file; None writes nothing.
            name: Name of the file without its ending; empty uses the topic.

        Returns:
            The exit code: 0 if all checks hold, else 1. A missed bar does not change it.
        """
        print(self.markdown(), flush=True)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{name or self.topic}.json"
            path.write_text(json_text(self.result()))
            print(f"written: {path}")
        return 0 if all(self.checks.values()) else 1

    def result(self) -> dict[str, Any]:
        """Return the content of the results file."""
        return {
            "title": self.title,
            "source": "measured",
            "date": time.strftime("%Y-%m-%d"),
            **({"smoke": True} if self.smoke else {}),
            "machine": self.machine(),
            "columns": self.columns,
            "rows": self.rows,
            "bars": [asdict(bar) for bar in self.bars],
            "checks": self.checks,
            "notes": self.notes,
            "hashes": self.hashes,
            "samples": self.samples,
        }


# ---- declaring and running ---------------------------------------------------------------------


@dataclass(frozen=True)
class Benchmark:
    """A declared benchmark; `measure` runs it once."""

    function: Callable[[Report], None]
    title: str
    columns: tuple[str, ...]
    arguments: Mapping[str, Mapping[str, Any]]
    """Further options of the command line: the flag, and what `add_argument` gets."""

    @property
    def topic(self) -> str:
        """Name of the results file: that of the module or package below `benchmarks`."""
        return self.function.__module__.split(".")[1]

    def defaults(self) -> argparse.Namespace:
        """Return the values of the further options if none is given."""
        parser = argparse.ArgumentParser()
        self.add_arguments(parser)
        return parser.parse_args([])

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the further options to a parser."""
        for flag, how in self.arguments.items():
            parser.add_argument(flag, **how)

    def measure(
        self,
        *,
        smoke: bool = False,
        rounds: int = 1,
        stretch: float = 1.0,
        given: argparse.Namespace | None = None,
    ) -> Report:
        """Run the benchmark once and return its report.

        Args:
            smoke: True for the smallest size.
            rounds: Number of interleaved repetitions.
            stretch: Factor on the length of all phases of jobs.
            given: Further options; None uses their defaults.

        Returns:
            The report.
        """
        options = given or self.defaults()
        report = Report(self.topic, self.title, self.columns, smoke, rounds, stretch, options)
        try:
            self.function(report)
        finally:
            report.close()
        return report


def benchmark(
    title: str, columns: Sequence[str], arguments: Mapping[str, Mapping[str, Any]] | None = None
) -> Callable[[Callable[[Report], None]], Benchmark]:
    """Declare the decorated function as a benchmark.

    Args:
        title: Heading of the report. The function may replace it in the report.
        columns: Names of the columns.
        arguments: Further options of the command line: flags, and what `add_argument` gets.

    Returns:
        The decorator.
    """
    return lambda function: Benchmark(function, title, tuple(columns), arguments or {})


def common_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, conflict_handler="resolve")
    parser.add_argument("--smoke", action="store_true", help="smallest size; figures mean nothing")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved repetitions")
    parser.add_argument(
        "--stretch", type=float, default=1.0, help="length of all phases, for a busy machine"
    )
    parser.add_argument("--out", type=Path, default=None, help="folder for the results files")
    parser.add_argument(
        "--publish",
        metavar="NAME",
        nargs="?",
        const="",
        help="write benchmarks/results/NAME.json, by default under the benchmark's own name; then "
        "`make generate` writes the tables of docs/",
    )
    return parser


def interleave(rounds: int, sides: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Run all sides in turn, and return the results of each side in order.

    Each round begins with another side, so that none is always the first one after a pause.

    Args:
        rounds: Number of rounds.
        sides: Functions by the name of the side.

    Returns:
        One result per round for each side.
    """
    results: dict[str, list[T]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(rounds):
        shift = number % len(names)
        for name in (*names[shift:], *names[:shift]):
            results[name].append(sides[name]())
    return results


# ---- figures -----------------------------------------------------------------------------------


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return the ratio of each value to the base of the same round."""
    return [a / b for a, b in zip(values, base, strict=True)]


def with_spread(values: Sequence[float]) -> tuple[float, str]:
    """Return the median and the spread, as two cells of a row."""
    return middle(values), percent(spread(values))


def spread(values: Iterable[float]) -> float:
    """Return max / min - 1, or 0 if there are no values or the least is not positive."""
    known = list(values)
    return max(known) / min(known) - 1 if known and min(known) > 0 else 0.0


def middle(values: Iterable[float]) -> float:
    """Return the median, or 0 if there are no values."""
    known = list(values)
    return median(known) if known else 0.0


def share(values: Sequence[float], part: float) -> float:
    """Return the quantile at `part` (0 to 1), or 0 if there are no values."""
    known = sorted(values)
    return known[min(len(known) - 1, int(part * len(known)))] if known else 0.0


def percent(value: float) -> str:
    """Return a fraction as a whole percentage, such as `12 %`."""
    return f"{100 * value:.0f} %"


def number(value: float) -> str:
    """Return a number with three significant digits, or with thousands separators from 1,000 on."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def text(value: object) -> str:
    """Return the text of a table cell; floats are shortened by `number`."""
    return number(value) if isinstance(value, float) else str(value)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    cells = [list(columns), ["---"] * len(columns), *[list(map(text, row)) for row in rows]]
    return ["| " + " | ".join(line) + " |" for line in cells]


def one_hash(values: Iterable[str]) -> str:
    """Return one hash over several result hashes."""
    return hashlib.blake2b("\n".join(values).encode(), digest_size=8).hexdigest()


def json_text(result: Mapping[str, Any]) -> str:
    """Return a results file as text: one line per field, row and series of samples."""
    plain = json.loads(json.dumps(result), parse_float=lambda x: float(f"{float(x):.{DIGITS}g}"))
    lines = []
    for name, value in plain.items():
        if isinstance(value, (list, dict)) and value:
            ends = "[]" if isinstance(value, list) else "{}"
            items = (
                map(_dumps, value)
                if isinstance(value, list)
                else (f"{_dumps(key)}: {_dumps(each)}" for key, each in value.items())
            )
            inner = ",\n".join(f"  {item}" for item in items)
            lines.append(f" {_dumps(name)}: {ends[0]}\n{inner}\n {ends[1]}")
        else:
            lines.append(f" {_dumps(name)}: {_dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _cpu() -> str:
    try:
        match = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match[1] if match else platform.machine()


def _gpu() -> dict[str, str]:
    """Return the name of the first GPU if this process has used torch and there is one."""
    torch = sys.modules.get("torch")
    return {"gpu": torch.cuda.get_device_name()} if torch and torch.cuda.is_available() else {}


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"
