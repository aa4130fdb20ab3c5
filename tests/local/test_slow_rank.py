"""A rank that is slow for long, and what Shadow says of it, in a real run: status and summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.runs import Run
from local.even_script import even_steps

pytestmark = pytest.mark.processes


def test_it_is_named_started_again_once_and_shadow_says_what_it_cost(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(even_steps(1600))
    options = [
        "--inject=slow:rank=1,ms=150",
        "--set=spec.collective.mode=Shadow",
        "--set=spec.collective.quorum=1",
        "--set=spec.straggler.detect.windowRounds=5",
        '--set=spec.straggler.respond=["RestartInPlace"]',
        "--run-dir=run",
    ]
    code, said = Run(tmp_path, "[python, train.py]", *options).wait()
    assert code == 0, said
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    # A restarted process is a new member, whose ladder goes on: it is restarted once only.
    kills = [h for h in status["happenings"] if "RestartInPlace)" in h["message"]]
    assert len(kills) == 1, status["happenings"]
    assert "RankDied: rank 1.0#0: killed by its agent: rank 1.0#0 takes" in said
    assert "its process was started again (straggler.respond: RestartInPlace)" in said
    shadow = status["log"]["shadow"]
    assert shadow["saved_s"]["Quorum"] == shadow["saved_s"]["Solo"] > 0.5 * shadow["waited_s"] > 0
    assert shadow["late"]["Solo"] > 0
    assert "of waiting saved" in said
    assert status["log"]["epochs_exact"] == 1
