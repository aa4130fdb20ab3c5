"""A rank that stays slow, and what Shadow reports about it, in a real run: status and summary."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from testing.processes.even_script import even_steps
from testing.processes.runs import ForkedRun

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes]


def test_a_slow_rank_is_restarted_once_and_shadow_reports_its_cost(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(even_steps(1600, together=2, alone_s=0.1))
    options = [
        "--inject=slow:rank=1,ms=150",
        "--set=spec.collective.mode=Shadow",
        "--set=spec.collective.quorum=1",
        "--set=spec.straggler.detect.windowRounds=5",
        '--set=spec.straggler.respond=["RestartInPlace"]',
        "--run-dir=run",
    ]
    code, output = ForkedRun(tmp_path, "[python, train.py]", *options).wait()
    assert code == 0, output
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    named = [h["message"] for h in status["happenings"] if h["reason"] == "RankSlow"]
    assert any("1.0#0" in message for message in named), named
    # A restarted process is a new member that keeps its place on the ladder, so it is restarted
    # only once. (The other rank may be slow too if the machine is busy.)
    died = [
        h["message"].partition(":")[0] for h in status["happenings"] if h["reason"] == "RankDied"
    ]
    assert [who for who in died if who.startswith("rank 1.")] == ["rank 1.0#0"], died
    assert [1, 0, 1] in [rank["member"] for rank in status["ranks"]]
    assert status["restarts"] == len(died)
    assert status["transport_why"].startswith(status["transport"]), status["transport_why"]
    summary = output[output.index("stragglers") :]
    assert re.search(r"rank 1 .*RestartInPlace", summary), summary
    shadow = status["log"]["shadow"]
    saved_s = shadow["saved_s"]["Solo"]
    assert shadow["saved_s"]["Quorum"] == saved_s > 0.5 * shadow["waited_s"] > 0
    assert shadow["late"]["Solo"] > 0
    assert f"{saved_s:.1f} s" in output
    assert status["log"]["epochs_exact"] == 1
