"""Run benchmarks: `python -m benchmarks NAME... [options]`; `-h` after a name lists its options.

Without names, those of SUITE run with one command, except the rivals, which download gigabytes of
other systems and take hours. With `--smoke`, the rivals run as well.
"""

from __future__ import annotations

import importlib
import sys
from itertools import takewhile
from typing import Final

from benchmarks.harness import RESULTS, SMOKE_ROUNDS, Benchmark, common_parser

SUITE: Final = {
    "b0": "b0_latency",
    "b1": "b1_hyperplane",
    "b2": "b2_allreduce",
    "b2b": "b2_busy",
    "b5": "b5_straggler",
    "b6": "b6_even",
    "b7": "b7_blocks",
    "b8": "b8_recovery",
    "b9": "b9_checkpoint",
    "b10": "b10_ddp",
    "b11": "b11_wire",
    "b12": "b12_levels",
    "hybrid": "hybrid",
    "anatomy": "anatomy",
    "loads": "loads",
    "loads-digits": "loads_digits",
    "rivals": "rivals.bench",
}
"""Modules by the name that the command line accepts, in the order in which they run."""
FURTHER: Final = {
    "b1-script": "b1_script",
    "b13": "b13_contract",
    "heads": "heads",
    "large": "large",
    "operator": "operator_requests",
    "operator-memory": "operator_memory",
    "operator-watch": "operator_watch",
    "pipeline": "pipeline",
    "protocol": "protocol",
    "rehearsal": "rehearsal.bench",
    "telemetry": "telemetry",
}
"""Benchmarks that run only if they are named."""


def load(name: str) -> Benchmark:
    """Import a benchmark by its name on the command line."""
    module = importlib.import_module(f"benchmarks.{(SUITE | FURTHER)[name]}")
    declared: Benchmark = module.run
    return declared


def main(argv: list[str]) -> int:
    """Run the benchmarks that the command line names.

    Args:
        argv: Names, then options.

    Returns:
        The exit code: 0 if all checks of all reports hold, else 1.
    """
    names = list(takewhile(lambda word: not word.startswith("-"), argv))
    known = ", ".join(SUITE | FURTHER)
    parser = common_parser(f"python -m benchmarks NAME... [options]; names: {known}")
    if unknown := [name for name in names if name not in SUITE | FURTHER]:
        parser.error(f"there is no benchmark {unknown[0]}; known: {known}")
    smoke = "--smoke" in argv
    chosen = names or [name for name in SUITE if smoke or name != "rivals"]
    benchmarks = [load(name) for name in chosen]
    for each in benchmarks:
        each.add_arguments(parser)
    given = parser.parse_args(argv[len(names) :])
    if given.publish is not None and given.smoke:
        parser.error("--publish: figures of --smoke mean nothing")
    folder = given.out if given.publish is None else RESULTS
    rounds = SMOKE_ROUNDS if given.smoke else given.rounds
    worst = 0
    for each in benchmarks:
        report = each.measure(smoke=given.smoke, rounds=rounds, stretch=given.stretch, given=given)
        worst = max(worst, report.publish(folder, given.publish or ""))
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
