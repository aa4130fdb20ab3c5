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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

from paceline.core.collectives.schedules import ALGORITHMS, RING
from paceline.core.collectives.select import HIERARCHICAL

from benchmarks import network
from benchmarks.harness import (
    Report,
    benchmark,
    interleave,
    middle,
    one_hash,
    percent,
    share,
    spread,
)
from benchmarks.jobs import script
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


@benchmark(
    f"B12: one level and two, {BITS_PER_S / 1e9:.0f} Gbit/s between two machines",
    ("KiB", "system", "ms", "p95", "spread", "share of the link", "bytes over it"),
)
def run(out: Report) -> None:
    """Run B12."""
    lacking = network.missing()
    with ExitStack() as stack:
        machines: Sequence[network.Machine] = ()
        if lacking:
            out.notes.append(f"the machines are played on loopback: this one lacks {lacking}")
        else:
            machines = stack.enter_context(network.two_machines(BITS_PER_S))
        (crew,) = stack.enter_context(crews(("levels",), RANKS, machines))
        for kib in KIB[:1] if out.smoke else KIB:
            add_rows(out, crew, machines, kib)
    out.hashes["sums"] = one_hash([str(out.checks)])


def add_rows(out: Report, crew: Crew, machines: Sequence[network.Machine], kib: int) -> None:
    """Measure all systems at one size in turn, and add their rows, bars and checks."""
    calls = 3 if out.smoke else CALLS[kib]
    sums = []

    def reduce(how: str) -> tuple[list[float], float]:
        before = [machine.sent_bytes() for machine in machines]
        took = crew.reduce(how, kib << 8, calls)
        after = [machine.sent_bytes() for machine in machines]
        most = max((b - a for a, b in zip(before, after, strict=True)), default=0)
        sums.append(right(took, RANKS))
        return took.us, most / ((calls + 1) * (kib << 10))

    def plain() -> tuple[list[float], float]:
        return plain_us(machines, kib << 10, calls), 1.0

    sides: dict[str, Callable[[], tuple[list[float], float]]] = {
        how: partial(reduce, how) for how in (*ONE_LEVEL, *TWO_LEVELS)
    }
    if machines:
        sides[PLAIN] = plain
    measured = interleave(out.rounds, sides)
    link_us = (kib << 10) * 8 / BITS_PER_S * 1e6
    for how, rounds in measured.items():
        middles = [middle(us) for us, _ in rounds]
        p95_ms = share([us / 1e3 for one, _ in rounds for us in one], 0.95)
        of_link, crossed = link_us / middle(middles), middle(most for _, most in rounds)
        cells = (middle(middles) / 1e3, p95_ms, percent(spread(middles)), of_link, crossed)
        out.rows.append((kib, how, *cells))
        out.samples[f"{kib} KiB {how}: us per round"] = middles
        if how in TWO_LEVELS and kib == KIB[-1] and machines:
            out.at_least(f"{how}, 16 MiB: share of the link", of_link, BAR)
            text = f"{how}, 16 MiB: times the buffer over the link, per direction"
            out.at_most(text, crossed, ONCE)
    out.checks[f"{kib} KiB: every rank has the sum"] = all(sums)


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
            command = [*machine.enter, *script("exchange.py")]
            command += [role, machines[0].host, str(size), str(calls)]
            end = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            ends.append(stack.enter_context(end))
            stack.callback(end.kill)
        assert ends[0].stdout is not None
        port = ends[0].stdout.readline()
        outputs = [ends[1].communicate(port, PLAIN_S)[0], ends[0].communicate(timeout=PLAIN_S)[0]]
    return [max(pair) for pair in zip(*map(json.loads, outputs), strict=True)]
