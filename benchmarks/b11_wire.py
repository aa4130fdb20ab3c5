"""B11: reductions that travel as bfloat16 beside float32 on a slow link, and what a model learns.

The same ranks reduce the same buffers in turn, over one loopback with a token bucket on it, and
with two levels over such a link between two machines. The native loop rounds and adds. Bandwidth is
the float32 bytes that are summed, divided by the time. Beside it stands the digits example in Full,
once with each wire type: seed and batches are the same, so only the rounding differs.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Final

from paceline.core.collectives.schedules import HALVING_DOUBLING, RING
from paceline.core.collectives.select import HIERARCHICAL
from paceline_api.types.enums import Wire

from benchmarks import network
from benchmarks.harness import (
    Report,
    benchmark,
    interleave,
    middle,
    one_hash,
    ratios,
    with_spread,
)
from benchmarks.jobs import ROOT, run_job
from benchmarks.reducers import Crew, crews, right
from testing.temporary import temporary_folder

BITS_PER_S: Final = 10**9
KIB: Final = (1024, 16 * 1024)
CALLS: Final = {1024: 10, 16 * 1024: 3}
BAR: Final = 1.9
POINTS: Final = 0.5
JOB: Final = ROOT / "examples" / "digits" / "job.yaml"
JOB_S: Final = 600.0


@benchmark(
    f"B11: bfloat16 on the wire, {BITS_PER_S / 1e9:.0f} Gbit/s",
    ("P", "algorithm", "KiB", "float32 ms", "spread", "bfloat16 ms", "spread", "times"),
)
def run(out: Report) -> None:
    """Run B11."""
    lacking = network.missing()
    with ExitStack() as stack:
        if lacking:
            out.notes.append(f"the link is as fast as loopback: this machine lacks {lacking}")
        else:
            stack.enter_context(network.own_network()).limit(BITS_PER_S)
        for ranks in (2,) if out.smoke else (2, 4):
            with crews(("paceline",), ranks) as (crew,):
                add_rows(out, crew, "mpi", lacking)
    if not lacking:
        with (
            network.two_machines(BITS_PER_S) as machines,
            crews(("levels",), 2 * len(machines), machines) as (crew,),
        ):
            add_rows(out, crew, f"{HIERARCHICAL}mpi", lacking)
    out.hashes["sums"] = one_hash([str(out.checks)])
    if not out.smoke:
        learn(out)


def add_rows(out: Report, crew: Crew, transport: str, lacking: str) -> None:
    """Measure one crew with both wire types, and add its rows, bars and checks to the report."""
    ranks, sums = crew.ranks, []
    for kib in (64,) if out.smoke else KIB:

        def reduce(algorithm: str, wire: Wire, kib: int = kib) -> float:
            took = crew.reduce(f"{transport}:{algorithm} {wire}", kib << 8, CALLS.get(kib, 2))
            sums.append(right(took, ranks))  # bfloat16 holds small integers exactly
            return middle(took.us) / 1e3

        keys = list(product((RING, HALVING_DOUBLING), Wire))
        sides = {f"{a} {wire}": partial(reduce, a, wire) for a, wire in keys}
        times_ms = interleave(out.rounds, sides)
        for algorithm in (RING, HALVING_DOUBLING):
            single, half = (times_ms[f"{algorithm} {w}"] for w in (Wire.FLOAT32, Wire.BFLOAT16))
            name, times = f"{transport}:{algorithm}", middle(ratios(single, half))
            out.rows.append((ranks, name, kib, *with_spread(single), *with_spread(half), times))
            out.samples[f"P={ranks} {name} {kib} KiB: ms per round"] = [single, half]
            if not lacking and not out.smoke and kib == KIB[-1]:
                out.at_least(f"P={ranks}, {name}, 16 MiB: bandwidth", times, BAR)
    out.checks[f"P={ranks}, {transport}: every rank has the sum"] = all(sums)


def learn(out: Report) -> None:
    """Run the digits example with each wire type and compare the accuracies."""
    accuracies = {}
    for wire in Wire:
        with temporary_folder() as folder:
            words = ["--set", "spec.collective.mode=Full", "--set", "spec.collective.backend=mpi"]
            words += ["--set", f"spec.collective.wire={wire}"]
            result = run_job(JOB, folder, *words, limit_s=JOB_S) / "result.json"
            accuracies[wire] = 100 * json.loads(result.read_text())["accuracy"]
    apart = abs(accuracies[Wire.FLOAT32] - accuracies[Wire.BFLOAT16])
    figures = (accuracies[Wire.FLOAT32], "", accuracies[Wire.BFLOAT16], "", apart)
    out.rows.append(("accuracy", "digits, Full", "", *figures))
    out.at_most("digits: points of accuracy between the wire types", apart, POINTS)
