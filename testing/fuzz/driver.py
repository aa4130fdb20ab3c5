"""Run a target over many inputs and record what it must not do.

An input is a finding if the parser raises an error that is not its own, takes more CPU time than
allowed, or more memory. A busy machine causes no finding: only CPU time of the reading thread
counts, and a slow input is read again before it is reported.
"""

from __future__ import annotations

import ast
import logging
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

from paceline_api.times import NS_PER_MS

from testing.fuzz.mutation import inputs
from testing.fuzz.target import Reader, Target
from testing.temporary import temporary_folder

CORPUS: Final = Path(__file__).parent / "corpus"
"""Folder with a file for each target. Each line is an input that was a finding once: a description,
and the bytes as a Python literal."""
MEMORY_BYTES_MAX: Final = 64 * 1024 * 1024
"""Upper bound on the growth of the process over its size before the inputs."""
BATCH: Final = 32
"""Number of inputs between two checks of the memory."""
SLOW_TRIES: Final = 20
FINDINGS_MAX: Final = 20
"""Number of findings that ends a target's run; each is at another place or of another kind."""
SHORTER_TRIES_MAX: Final = 400
SLOW: Final = "slow"
HUNGRY: Final = "hungry"
_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")
_CLEAR_PEAK: Final = "5"


@dataclass(frozen=True, slots=True)
class Finding:
    """A violation by one input."""

    key: str
    """Kind and place: two inputs with the same key show the same mistake."""
    problem: str
    data: bytes


@dataclass(slots=True)
class Report:
    """The result of a target's run."""

    target: str
    inputs: int = 0
    accepted: int = 0
    slowest_ms: float = 0.0
    findings: dict[str, Finding] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = f"{self.inputs:,} inputs, {self.accepted:,} accepted"
        slowest = f"the slowest took {self.slowest_ms:.1f} ms"
        lines = [f"{self.target}: {counts}, {slowest}, {len(self.findings)} findings"]
        for finding in self.findings.values():
            lines += [
                finding.problem,
                f"    input of {len(finding.data)} bytes: {finding.data[:300]!r}",
            ]
        return "\n".join(lines)


def known_inputs(target: Target) -> list[bytes]:
    """Return the inputs of a target that were findings once."""
    path = CORPUS / f"{target.name}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [ast.literal_eval(line.partition(": ")[2]) for line in lines]


def run(target: Target, count: int, *, seed: int = 0) -> Report:
    """Read the first `count` inputs of a target.

    Args:
        target: the parser and its limits.
        count: number of inputs.
        seed: selects the inputs that follow the known ones.

    Returns:
        the findings, each with the shortest input that shows it.
    """
    report = Report(target.name)
    with ExitStack() as stack:
        # A parser logs what it refuses. Nothing checks these lines, and nobody reads them.
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        stack.callback(logging.disable, before)
        folder = stack.enter_context(temporary_folder())
        reader = target.start(stack, folder)
        source = islice(inputs(target, known_inputs(target), seed), count)
        while batch := list(islice(source, BATCH)):
            for finding in _read_all(target, reader, batch, report):
                if finding.key not in report.findings:
                    report.findings[finding.key] = _shortest(target, reader, finding)
            if len(report.findings) >= FINDINGS_MAX:
                break
    return report


def _read_all(
    target: Target, reader: Reader, batch: Sequence[bytes], report: Report
) -> list[Finding]:
    findings: list[Finding] = []

    def read_batch() -> None:
        for data in batch:
            finding, accepted, cpu_ms = _read(target, reader, data, report.findings)
            report.inputs += 1
            report.accepted += accepted
            report.slowest_ms = max(report.slowest_ms, cpu_ms)
            if finding is not None:
                findings.append(finding)

    if _peak_bytes(read_batch) > MEMORY_BYTES_MAX and HUNGRY not in report.findings:
        findings += [each for data in batch if (each := _hungry(target, reader, data)) is not None]
    return findings


def _read(
    target: Target, reader: Reader, data: bytes, known: Collection[str] = ()
) -> tuple[Finding | None, bool, float]:
    """Read one input.

    Args:
        target: the parser and its limits.
        reader: the started parser.
        data: the input.
        known: keys of earlier findings; a finding that is expensive to confirm is not sought again.

    Returns:
        the finding or None, whether the input was accepted, and the CPU time in milliseconds.
    """
    accepted, begun_ns = False, time.thread_time_ns()
    try:
        reader(data)
        accepted = True
    except target.errors:
        pass
    except Exception as error:
        return _uncaught(error, data), False, 0.0
    cpu_ms = (time.thread_time_ns() - begun_ns) / NS_PER_MS
    if cpu_ms > target.cpu_ms and SLOW not in known:
        # A single slow read may be due to the garbage collector, or to the first use of something.
        cpu_ms = min(cpu_ms, *(_cpu_ms(reader, data) for _ in range(SLOW_TRIES)))
        if cpu_ms > target.cpu_ms:
            message = f"slow: {cpu_ms:.0f} ms of CPU time, and {target.cpu_ms:g} ms are allowed"
            return Finding(SLOW, message, data), accepted, cpu_ms
    return None, accepted, cpu_ms


def _cpu_ms(reader: Reader, data: bytes) -> float:
    begun_ns = time.thread_time_ns()
    try:
        reader(data)
    except Exception:  # an error that is not its own was a finding the first time
        pass
    return (time.thread_time_ns() - begun_ns) / NS_PER_MS


def _uncaught(error: Exception, data: bytes) -> Finding:
    frames = traceback.extract_tb(error.__traceback__)
    at = frames[-1]
    # A RecursionError occurs at a random line of the cycle, so its line identifies nothing.
    where = "" if isinstance(error, RecursionError) else f" {Path(at.filename).name}:{at.lineno}"
    shown = [f"    {Path(f.filename).name}:{f.lineno} in {f.name}" for f in frames[-6:]]
    message = "\n".join([f"raises {type(error).__name__}: {str(error)[:200]}", *shown])
    return Finding(f"raises {type(error).__name__}{where}", message, data)


def _hungry(target: Target, reader: Reader, data: bytes) -> Finding | None:
    def read() -> None:
        try:
            reader(data)
        except Exception:
            return  # an error that is not the target's own is a finding already

    peak_bytes = _peak_bytes(read)
    if peak_bytes <= MEMORY_BYTES_MAX:
        return None
    message = f"hungry: {peak_bytes >> 20} MiB more than before"
    return Finding(HUNGRY, message, data)


def _peak_bytes(read: Callable[[], None]) -> int:
    """Return how much the memory of this process grew at its peak while `read` ran."""
    _CLEAR.write_text(_CLEAR_PEAK)
    before = _status_bytes("VmRSS")
    read()
    return _status_bytes("VmHWM") - before


def _status_bytes(key: str) -> int:
    _, _, rest = _STATUS.read_text().partition(f"{key}:")
    return int(rest.split(None, 1)[0]) * 1024


def _shortest(target: Target, reader: Reader, finding: Finding) -> Finding:
    """Return the finding with the irrelevant parts of its input removed."""
    if not finding.key.startswith("raises"):
        return finding
    tries, size = 0, max(1, len(finding.data) // 2)
    while size and tries < SHORTER_TRIES_MAX:
        at = 0
        while at < len(finding.data) and tries < SHORTER_TRIES_MAX:
            tries += 1
            shorter, _, _ = _read(target, reader, finding.data[:at] + finding.data[at + size :])
            if shorter is not None and shorter.key == finding.key:
                finding = shorter
            else:
                at += size
        size //= 2
    return finding
