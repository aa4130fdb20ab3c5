"""`make recording`: pictures of a real run, docs/pictures/run.svg and docs/report.png.

It runs the first example with a slow rank, records what `paceline run` prints without a terminal,
and takes a picture of the page of `paceline report` with Chromium, if there is one. Both show
measured times, so they differ from run to run and no check compares them.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

ROOT: Final = Path(__file__).resolve().parent.parent
PICTURE: Final = ROOT / "docs/pictures/run.svg"
REPORT: Final = ROOT / "docs/report.png"
JOB: Final = "examples/first/job.yaml"
RUN: Final = ("run", JOB, "--inject", "slow:rank=2,ms=20")
SHOWN: Final = "runs/first-1"
"""Path that the pictures show in place of the temporary run folder."""
WIDTH: Final = 118
"""Characters in a line of the picture; longer lines are cut."""
LINES_MAX: Final = 34
"""Lines of the picture. If a run prints more, those in the middle are left out."""
WINDOW: Final = "1240,1560"
TIMEOUT_S: Final = 900


def main() -> int:
    """Record a run and write both pictures."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        printed = paceline(*RUN, "--run-dir", str(run_dir)).replace(str(run_dir), SHOWN)
        PICTURE.write_text(svg(f"$ paceline {' '.join(RUN)}", printed))
        paceline("report", str(run_dir))
        if chromium := shutil.which("chromium") or shutil.which("google-chrome"):
            options = ("--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={WINDOW}")
            page = run_dir / "report.html"
            page.write_text(page.read_text().replace(str(run_dir), SHOWN))
            command = [chromium, *options, f"--screenshot={REPORT}", page.as_uri()]
            subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)
        else:
            print(f"without Chromium {REPORT.relative_to(ROOT)} stays as it is", file=sys.stderr)
    return 0


def paceline(*words: str) -> str:
    """Run a command of this checkout's `paceline` without a terminal and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "COLUMNS": str(WIDTH)},
        check=True,
    )
    return done.stdout


def svg(command: str, printed: str) -> str:
    """Return a picture of a terminal with a command and what it printed."""
    lines = [line[:WIDTH] for line in printed.splitlines()]
    if len(lines) > LINES_MAX:
        half = LINES_MAX // 2
        lines = [*lines[:half], "...", *lines[-half:]]
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text(command, style="bold"))
    for line in lines:
        console.print(Text(line), no_wrap=True, crop=True)
    return console.export_svg(title="paceline run", unique_id="run")


if __name__ == "__main__":
    sys.exit(main())
