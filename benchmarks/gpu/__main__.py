"""`python -m benchmarks.gpu`: checks and tables on the GPUs of this machine (docs/gpu.md).

Exit codes: 0 if all that could be checked holds, 1 if something does not, 3 if there is no GPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Final

import torch

from benchmarks.gpu import device, ranks, training
from benchmarks.harness import RESULTS, Report, common_parser
from benchmarks.jobs import ROOT

NO_GPU: Final = 3
CONFORMANCE: Final = 5
"""Number of ranks that the conformance suite needs, with a GPU each."""
LIMIT_S: Final = 1800


def main() -> int:
    """Run all checks that this machine allows and return the exit code."""
    arguments = common_parser("checks on the GPUs of this machine")
    arguments.add_argument(
        "--cpu", type=int, default=0, metavar="RANKS", help="the same on the host, over gloo"
    )
    given = arguments.parse_args()
    gpus = torch.cuda.device_count()
    if not gpus and not given.cpu:
        print("gpu-check: this machine has no GPU that torch can use, so nothing was checked")
        return NO_GPU
    places = [torch.device("cpu")] * given.cpu or [torch.device("cuda", i) for i in range(gpus)]
    worst = 0
    for report in reports(places, smoke=given.smoke):
        worst = max(worst, report.publish(given.out if given.publish is None else RESULTS))
    if len(places) >= CONFORMANCE and not given.cpu:
        worst = max(worst, conformance())
    return worst


def reports(places: list[torch.device], *, smoke: bool) -> Iterator[Report]:
    """Yield the reports one after the other, as they become ready."""
    first = places[0]
    yield device.correctness(first)
    yield device.staging(first, smoke=smoke)
    yield device.crossover(first, smoke=smoke)
    yield device.costs(first, smoke=smoke)
    yield device.step(first, smoke=smoke)
    yield device.compiled(first)
    yield training.through_a_fault(places, smoke=smoke)
    yield training.beside_ddp(places, smoke=smoke)
    with ranks.crew(places) as crew:
        yield ranks.wiring(crew, smoke=smoke)
        if crew.size > 1:
            yield ranks.bandwidth(crew, smoke=smoke)
            yield ranks.in_turn(crew, smoke=smoke)
        if crew.size > 2:
            yield ranks.loss(crew)


def conformance() -> int:
    """Run the transports' conformance suite over NCCL; return 0 if it passes, else 1."""
    tests = "tests/transport/test_conformance.py"
    words = [sys.executable, "-m", "pytest", "-q", "-k", "nccl", tests]
    return min(1, subprocess.run(words, cwd=ROOT, timeout=LIMIT_S, check=False).returncode)


if __name__ == "__main__":
    sys.exit(main())
