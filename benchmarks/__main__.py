"""Run several benchmarks, or all of them, with one fork server: `python -m benchmarks [b0 b1 ...]`.

Without names, all benchmarks run except the rivals, which download gigabytes of other systems and
take hours. With `--smoke`, the rivals run as well.
"""

from __future__ import annotations

import sys
from typing import Final

from benchmarks import (
    anatomy,
    b0_latency,
    b1_hyperplane,
    b2_allreduce,
    b2_busy,
    b5_straggler,
    b6_even,
    b7_blocks,
    b8_recovery,
    b9_checkpoint,
    b10_ddp,
    b11_wire,
    b12_levels,
    loads,
    loads_digits,
)
from benchmarks.command import Benchmark, options, parser
from benchmarks.lab import Lab
from benchmarks.rivals import bench as rivals

ALL: Final[dict[str, Benchmark]] = {
    "b0": b0_latency.run,
    "b1": b1_hyperplane.run,
    "b2": b2_allreduce.run,
    "b2b": b2_busy.run,
    "b5": b5_straggler.run,
    "b6": b6_even.run,
    "b7": b7_blocks.run,
    "b8": b8_recovery.run,
    "b9": b9_checkpoint.run,
    "b10": b10_ddp.run,
    "b11": b11_wire.run,
    "b12": b12_levels.run,
    "anatomy": anatomy.run,
    "loads": loads.run,
    "loads-digits": loads_digits.run,
    "rivals": rivals.run,
}
"""Benchmarks by the name that the command line accepts, in the order in which they run."""


def main() -> int:
    """Run the benchmarks that the command line names.

    Returns:
        The exit code: 0 if all checks of all reports hold, else 1.
    """
    arguments = parser(__doc__)
    arguments.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ALL)}")
    parsed = arguments.parse_args()
    unknown = [name for name in parsed.names if name not in ALL]
    if unknown:
        arguments.error(f"there is no benchmark {unknown[0]}; known: {', '.join(ALL)}")
    given = options(parsed)
    worst = 0
    with Lab() as lab:
        for name in parsed.names or [name for name in ALL if given.smoke or name != "rivals"]:
            worst = max(worst, ALL[name](lab, given).publish(given.out))
    return worst


if __name__ == "__main__":
    sys.exit(main())
