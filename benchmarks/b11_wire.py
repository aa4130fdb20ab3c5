"""B11: reductions that travel as bfloat16 beside float32 on a slow link, and what a model learns.

The same ranks reduce the same buffers in turn, over one loopback with a token bucket on it, and
with two levels over such a link between two machines. The native loop rounds and adds. Bandwidth is
the float32 bytes that are summed, divided by the time. Beside it stands the digits example in Full,
once with each wire type: seed and batches are the same, so only the rounding differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from paceline.core.collectives.schedules import HALVING_DOUBLING, RING
from paceline.core.collectives.select import HIERARCHICAL
from paceline_api.types.enums import Wire

from benchmarks import network
from benchmarks import report as r
from benchmarks.command import Options, main
from benchmarks.lab import ROOT, Lab
from benchmarks.reducers import Crew, crews, right
from testing.temporary import temporary_folder

BITS_PER_S: Final = 10**9
KIB: Final = (1024, 16 * 1024)
CALLS: Final = {1024: 10, 16 * 1024: 3}
BAR: Final = 1.9
POINTS: Final = 0.5
JOB: Final = ROOT / "examples" / "digits" / "job.yaml"
JOB_S: Final = 600.0
ACCURACY: Final = "accuracy"


def run(_: Lab, given: Options) -> r.Report:
    """Run B11 and return its report."""
    out = r.Report(
        "b11_wire",
        f"B11: bfloat16 on the wire, {BITS_PER_S / 1e9:.0f} Gbit/s",
        ("P", "algorithm", "KiB", "float32 ms", "spread", "bfloat16 ms", "spread", "times"),
        smoke=given.smoke,
    )
    lacking = network.missing()
    with ExitStack() as stack:
        if lacking:
            out.notes.append(f"the link is as fast as loopback: this machine lacks {lacking}")
        else:
            stack.enter_context(network.own_network()).limit(BITS_PER_S)
        for ranks in (2,) if given.smoke else (2, 4):
            with crews(("paceline",), ranks) as (crew,):
                add_rows(out, crew, "mpi", given)
    if not lacking:
        with (
            network.two_machines(BITS_PER_S) as machines,
            crews(("levels",), 2 * len(machines), machines) as (crew,),
        ):
            add_rows(out, crew, f"{HIERARCHICAL}mpi", given)
    if not given.smoke:
        learn(out)
        for row in out.rows:
            if not lacking and row[0] != ACCURACY and row[2] == KIB[-1]:
                out.bars.append(r.Bar(f"P={row[0]}, {row[1]}, 16 MiB: bandwidth", row[-1], BAR))
    return out


def add_rows(out: r.Report, crew: Crew, transport: str, given: Options) -> None:
    """Measure one crew with both wire types, and add its rows and checks to the report."""
    ranks = crew.ranks
    for kib in (64,) if given.smoke else KIB:
        found: dict[tuple[str, str], list[float]] = {}
        sums = []
        for _ in range(given.rounds):
            for algorithm in (RING, HALVING_DOUBLING):
                for wire in Wire:
                    took = crew.reduce(
                        f"{transport}:{algorithm} {wire}", kib << 8, CALLS.get(kib, 2)
                    )
                    found.setdefault((algorithm, wire), []).append(r.middle(took.us) / 1e3)
                    sums.append(right(took, ranks))  # bfloat16 holds small integers exactly
        for algorithm in (RING, HALVING_DOUBLING):
            single, half = (found[algorithm, wire] for wire in (Wire.FLOAT32, Wire.BFLOAT16))
            times = r.middle([a / b for a, b in zip(single, half, strict=True)])
            shown = [(r.middle(x), r.percent(r.spread(x))) for x in (single, half)]
            name = f"{transport}:{algorithm}"
            out.rows.append((ranks, name, kib, *shown[0], *shown[1], times))
            out.details[f"P={ranks} {name} {kib} KiB: ms per round"] = [single, half]
        out.checks[f"P={ranks}, {transport}, {kib} KiB: every rank has the sum"] = all(sums)
    out.hashes[f"P={ranks}, {transport}"] = r.one_hash([str(out.checks)])


def learn(out: r.Report) -> None:
    """Run the digits example with each wire type and compare the accuracies."""
    found = {}
    with temporary_folder() as scratch:
        for wire in Wire:
            folder = scratch / wire
            words = ["--set", "spec.collective.mode=Full", "--set", "spec.collective.backend=mpi"]
            words += ["--set", f"spec.collective.wire={wire}", "--run-dir", str(folder), "--quiet"]
            subprocess.run(
                [Path(sys.executable).parent / "paceline", "run", JOB, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                timeout=JOB_S,
                check=True,
            )
            found[wire] = 100 * json.loads((folder / "result.json").read_text())["accuracy"]
    apart = abs(found[Wire.FLOAT32] - found[Wire.BFLOAT16])
    figures = (found[Wire.FLOAT32], "", found[Wire.BFLOAT16], "", apart)
    out.rows.append((ACCURACY, "digits, Full", "", *figures))
    text = "digits: points of accuracy between the wire types"
    out.bars.append(r.Bar(text, apart, POINTS, at_least=False))


if __name__ == "__main__":
    main(run, __doc__)
