"""Command line of the fuzzer: try a number of inputs, spread over all targets.

    python -m testing.fuzz --inputs 10000000 --seed 1 --out findings
    python -m testing.fuzz --inputs 100000 --target wire-peer

It exits with 1 if there is a finding, and leaves the shortest input of each in the folder `--out`.
Add an input that reveals a mistake to testing/fuzz/corpus once the mistake is fixed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from testing.fuzz.driver import Report, run
from testing.fuzz.targets import TARGETS


def main(arguments: list[str]) -> int:
    """Run the requested targets; return the exit code, which is 1 if there is a finding."""
    words = argparse.ArgumentParser(prog="python -m testing.fuzz")
    words.add_argument("--inputs", type=int, required=True, help="of all targets together")
    words.add_argument("--target", action="append", choices=sorted(TARGETS), help="only this one")
    words.add_argument("--seed", type=int, default=0, help="another one gives other inputs")
    words.add_argument("--out", type=Path, help="a folder for the inputs that are findings")
    given = words.parse_args(arguments)
    chosen = given.target or list(TARGETS)
    count = 0
    for name in chosen:
        begun_s = time.monotonic()
        report = run(TARGETS[name], -(-given.inputs // len(chosen)), seed=given.seed)
        sys.stdout.write(f"{report}\n    {time.monotonic() - begun_s:.0f} s\n")
        sys.stdout.flush()
        count += len(report.findings)
        if given.out is not None:
            _keep(report, given.out / name)
    return 1 if count else 0


def _keep(report: Report, folder: Path) -> None:
    for number, finding in enumerate(report.findings.values()):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02}").write_bytes(finding.data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
