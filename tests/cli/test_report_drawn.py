"""A browser can render the page that `paceline report` writes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from testing.processes.runs import LIMIT_S, ForkedRun, forked_paceline

pytestmark = [pytest.mark.processes, pytest.mark.cluster_programs]

SCRIPT = """\
import paceline as pl
import torch

torch.set_num_threads(1)
pl.init()
model = torch.nn.Linear(4, 1)
optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
for step in pl.steps(8):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.exhaustive
def test_chromium_renders_the_report_page(tmp_path: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("no chromium: apt-get install chromium, or as root make cluster-programs")
    (tmp_path / "train.py").write_text(SCRIPT)
    code, output = ForkedRun(tmp_path, "[python, train.py]", "--quiet").wait()
    assert code == 0, output
    code, output = forked_paceline(tmp_path, "report", "runs/job-1", "--out", "shown")
    assert code == 0, output
    picture = tmp_path / "shown/page.png"
    result: Any = subprocess.run(
        [
            browser,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *(f"--user-data-dir={tmp_path / 'browser'}", "--window-size=1240,1240"),
            *(f"--screenshot={picture}", (tmp_path / "shown/report.html").as_uri()),
        ],
        env=os.environ | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000, "a page with nothing on it is smaller"
