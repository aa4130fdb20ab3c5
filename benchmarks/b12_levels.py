"""B12: two machines with a slow link between them and two ranks each: one level, and two.

The machines are network namespaces, and the link is a token bucket at each of its ends. With two
levels, every byte of the buffer should cross the link once in each direction, as the interface
counters show, and as fast as the link is: the work inside the machines overlaps with it. The share
of the link is the time that the link needs for the buffer, divided by the time from the moment at
which all ranks have begun until the last one has the sum. The bucket lets 128 KiB pass at once,
which is 0.8 % of 16 MiB. Beside them stands a plain exchange over TCP, with one process on each
machine and no sums: it shows what these cores let the link carry.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from paceline.core.collectives.schedules import ALGORITHMS, RING
from paceline.core.collectives.select import HIERARCHICAL

from benchmarks import network
from benchmarks import report as r
from benchmarks.command import Options, main
from benchmarks.lab import SCRIPTS, Lab
from benchmarks.reducers import Crew, crews, right

BITS_PER_S: Final = 8 * 10**9
RANKS: Final = 4
KIB: Final = (64, 1024, 16 * 1024)
CALLS: Final = {64: 20, 1024: 10, 16 * 1024: 5}
ONE_LEVEL: Final = (f"mpi:{RING}", "gloo")
TWO_LEVELS: Final = (
    *(f"{HIERARCHICAL}mpi:{algorithm}" for algorithm in ALGORITHMS),
    f"{HIERARCHICAL}gloo",
)
PLAIN: Final = "plain exchange, no sums"
PLAIN_S: Final = 90.0
BAR: Final = 0.95
ONCE: Final = 1.02
"""Largest traffic per direction, in sizes of the buffer; the excess leaves room for headers and
acknowledgements."""


def run(_: Lab, given: Options) -> r.Report:
    """Run B12 and return its report."""
    out = r.Report(
        "b12_levels",
        f"B12: one level and two, {BITS_PER_S / 1e9:.0f} Gbit/s between two machines",
        ("KiB", "system", "ms", "p95", "spread", "share of the link", "bytes over it"),
        smoke=given.smoke,
    )
    lacking = network.missing()
    with ExitStack() as stack:
        machines: Sequence[network.Machine] = ()
        if lacking:
            out.notes.append(f"the machines are played on loopback: this one lacks {lacking}")
        else:
            machines = stack.enter_context(network.two_machines(BITS_PER_S))
        (crew,) = stack.enter_context(crews(("levels",), RANKS, machines))
        for kib in KIB[:1] if given.smoke else KIB:
            add_rows(out, crew, machines, kib, given)
    return out


def add_rows(
    out: r.Report, crew: Crew, machines: Sequence[network.Machine], kib: int, given: Options
) -> None:
    """Measure all systems at one size in turn, and add their rows, bars and checks."""
    calls = 3 if given.smoke else CALLS[kib]
    found: dict[str, list[list[float]]] = {}
    sent: dict[str, list[float]] = {}
    sums = []
    for _ in range(given.rounds):
        for how in (*ONE_LEVEL, *TWO_LEVELS):
            before = [machine.sent_bytes() for machine in machines]
            took = crew.reduce(how, kib << 8, calls)
            after = [machine.sent_bytes() for machine in machines]
            found.setdefault(how, []).append(took.us)
            once = (calls + 1) * (kib << 10)
            most = max((b - a for a, b in zip(before, after, strict=True)), default=0)
            sent.setdefault(how, []).append(most / once)
            sums.append(right(took, RANKS))
        if machines:
            found.setdefault(PLAIN, []).append(plain_us(machines, kib << 10, calls))
    link_us = (kib << 10) * 8 / BITS_PER_S * 1e6
    for how, rounds in found.items():
        middles = [r.middle(one) for one in rounds]
        every = [us / 1e3 for one in rounds for us in one]
        times = (r.middle(middles) / 1e3, r.share(every, 0.95), r.percent(r.spread(middles)))
        share = link_us / r.middle(middles)
        crossed = r.middle(sent[how]) if how in sent else 1.0
        out.rows.append((kib, how, *times, share, crossed))
        out.details[f"{kib} KiB {how}: us per round"] = middles
        if how in TWO_LEVELS and kib == KIB[-1] and machines:
            out.bars.append(r.Bar(f"{how}, 16 MiB: share of the link", share, BAR))
            text = f"{how}, 16 MiB: times the buffer over the link, per direction"
            out.bars.append(r.Bar(text, crossed, ONCE, at_least=False))
    out.checks[f"{kib} KiB: every rank has the sum"] = all(sums)
    out.hashes[f"{kib} KiB"] = r.one_hash([str(out.checks)])


def plain_us(machines: Sequence[network.Machine], size: int, calls: int) -> list[float]:
    """Let both machines send each other `size` bytes at the same time, without sums.

    Args:
        machines: The two machines.
        size: Bytes per direction.
        calls: Number of exchanges.

    Returns:
        Microseconds of each exchange at its slower end.
    """
    ends: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:
        for machine, role in zip(machines, ("listen", "connect"), strict=True):
            command = [*machine.enter, sys.executable, str(SCRIPTS / "exchange.py")]
            command += [role, machines[0].host, str(size), str(calls)]
            end = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            ends.append(stack.enter_context(end))
            stack.callback(end.kill)
        assert ends[0].stdout is not None
        port = ends[0].stdout.readline()
        said = [ends[1].communicate(port, PLAIN_S)[0], ends[0].communicate(timeout=PLAIN_S)[0]]
    return [max(pair) for pair in zip(*map(json.loads, said), strict=True)]


if __name__ == "__main__":
    main(run, __doc__)
