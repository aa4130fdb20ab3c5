"""Turn the figures of a benchmark into a table, a list of bars, and two files.

The files are `results/<topic>_<hardware>_<date>.json` and `.md`. They hold everything that a reader
needs to judge the figures: machine, load before and after, rounds, spread, result hashes, and the
commit of the code.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any


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
    """Results of one run of one benchmark: table, bars, checks, notes and hashes."""

    topic: str
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    checks: dict[str, bool] = field(default_factory=dict)
    """Conditions that must hold at any speed, such as equal weights and no lost gradients."""
    notes: list[str] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    smoke: bool = False
    _begun: float = field(default_factory=time.time)
    _load: tuple[float, float, float] = field(default_factory=os.getloadavg)

    def machine(self) -> dict[str, Any]:
        """Return hardware, software versions, commit, duration and load of this run."""
        return {
            "hardware": hardware(),
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": _version("torch"),
            "commit": _commit(),
            "priority": os.nice(0),
            "seconds": round(time.time() - self._begun, 1),
            "load before": [round(x, 2) for x in self._load],
            "load after": [round(x, 2) for x in os.getloadavg()],
        }

    def markdown(self) -> str:
        """Return the report as a Markdown section."""
        cells = [self.columns, *[tuple(map(text, row)) for row in self.rows]]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]

        def line(row: Sequence[str]) -> str:
            return "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"

        rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
        machine = "; ".join(f"{k} {v}" for k, v in self.machine().items())
        parts = [f"## {self.title}", "", line(cells[0]), rule, *map(line, cells[1:]), ""]
        parts += [f"- {bar.line()}" for bar in self.bars]
        parts += [f"- {'holds' if ok else 'BROKEN'}: {what}" for what, ok in self.checks.items()]
        parts += [f"- {note}" for note in self.notes]
        parts += [f"- result hash of {name}: {value}" for name, value in self.hashes.items()]
        parts += [f"- {machine}"]
        return "\n".join(parts) + "\n"

    def publish(self, folder: Path | None) -> int:
        """Print the report and write it to files.

        Args:
            folder: Folder of the `.json` and `.md` files; None writes nothing.

        Returns:
            The exit code: 0 if all checks hold, else 1. A missed bar does not change it.
        """
        print(self.markdown())
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            name = f"{self.topic}_{hardware()}_{time.strftime('%Y-%m-%d')}"
            plain = {
                "topic": self.topic,
                "title": self.title,
                "smoke": self.smoke,
                "machine": self.machine(),
                "columns": self.columns,
                "rows": self.rows,
                "bars": [{**asdict(bar), "met": bar.met} for bar in self.bars],
                "checks": self.checks,
                "notes": self.notes,
                "hashes": self.hashes,
                "details": self.details,
            }
            (folder / f"{name}.json").write_text(json.dumps(plain, indent=1) + "\n")
            (folder / f"{name}.md").write_text(self.markdown())
            print(f"written: {folder / name}.json, .md")
        return 0 if all(self.checks.values()) else 1


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
    if isinstance(value, float):
        return number(value)
    return str(value)


def one_hash(values: Iterable[str]) -> str:
    """Return one hash over several result hashes."""
    return hashlib.blake2b("\n".join(values).encode(), digest_size=8).hexdigest()


def hardware() -> str:
    """Return a short name of the machine (cores and CPU) for file names."""
    words = re.findall(r"[a-z0-9]+", _cpu().lower())
    dull = {"intel", "amd", "r", "tm", "cpu", "processor", "core", "with", "virtual"}
    kept = [w for w in words if w not in dull and not w.endswith("ghz")][:3]
    return "-".join([f"{os.cpu_count()}x", *(kept or [platform.machine()])])


def _cpu() -> str:
    try:
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"
