"""Every benchmark runs at its smallest size and reports what it should (HOUSE_STYLE Q).

Only what must hold at any speed is asserted: equal weights, every gradient counted once, quorums
kept, a control that fails. Times are not checked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
TOPICS = (
    "b0_latency",
    "b1_hyperplane",
    "b2_allreduce",
    "b2_busy",
    "b5_straggler",
    "b6_even",
    "b7_blocks",
    "b8_recovery",
    "b9_checkpoint",
    "b10_ddp",
    "b11_wire",
    "b12_levels",
    "hybrid",
    "anatomy",
    "loads",
    "loads_digits",
    "rivals",
)
LIMIT_S = 600

pytestmark = [pytest.mark.processes, pytest.mark.timeout(LIMIT_S + 60)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all benchmarks with one command and return their results by topic."""
    folder = tmp_path_factory.mktemp("results")
    done = run("--smoke", "--out", str(folder), limit_s=LIMIT_S)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def run(*words: str, limit_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


@pytest.mark.parametrize("topic", TOPICS)
def test_all_checks_of_each_benchmark_hold(results: dict[str, Any], topic: str) -> None:
    result = results[topic]
    assert result["smoke"]
    assert result["checks"]
    assert all(result["checks"].values()), result["checks"]


@pytest.mark.parametrize("topic", TOPICS)
def test_each_result_table_is_complete_and_has_a_baseline(
    results: dict[str, Any], topic: str
) -> None:
    result = results[topic]
    assert len(result["rows"]) >= 2, "no baseline beside it"
    assert all(len(row) == len(result["columns"]) for row in result["rows"])
    assert result["machine"]["cores"] == os.cpu_count()


@pytest.mark.parametrize("topic", [topic for topic in TOPICS if topic != "b8_recovery"])
def test_each_result_has_hashes(results: dict[str, Any], topic: str) -> None:
    assert all(len(value) >= 16 for value in results[topic]["hashes"].values())
    assert results[topic]["hashes"]


@pytest.mark.parametrize("name", ["heads", "protocol", "telemetry"])
def test_each_benchmark_of_the_state_machines_runs(tmp_path: Path, name: str) -> None:
    done = run(name, "--smoke", "--out", str(tmp_path), limit_s=300)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    result = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert all(len(row) == len(result["columns"]) for row in result["rows"])
    assert result["rows"]


@pytest.mark.exhaustive
def test_the_benchmark_of_unchanged_scripts_runs(tmp_path: Path) -> None:
    done = run("b13", "--smoke", "--out", str(tmp_path), limit_s=300)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    result = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert [row[1] for row in result["rows"]] == [
        "DDP",
        "script, shm",
        "explicit, shm",
        "join, shm",
    ]
    assert all(len(row) == len(result["columns"]) for row in result["rows"])
    assert all(result["checks"].values())


@pytest.mark.exhaustive
def test_the_benchmark_of_late_ranks_in_a_script_runs(tmp_path: Path) -> None:
    done = run("b1-script", "--smoke", "--out", str(tmp_path), limit_s=300)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    result = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert [row[1] for row in result["rows"]] == ["Full", "Quorum(4)", "Solo"]
    assert all(result["checks"].values())


def test_the_memory_benchmark_of_the_operator_runs(tmp_path: Path) -> None:
    done = run("operator-memory", "--smoke", "--out", str(tmp_path), limit_s=300)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    result = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert [row[0] for row in result["rows"]] == [0, 2, 4]
    assert all(row[3] > 30 for row in result["rows"]), "MiB of a Python process"


def test_the_benchmark_of_ways_to_follow_pods_compares_all_of_them() -> None:
    done = run("operator-watch", "--smoke", limit_s=LIMIT_S)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    for way in ("the operator's watch", "kopf's event handler", "kopf's index and event handler"):
        assert f"| 16 | {way} |" in done.stdout
    assert "BROKEN" not in done.stdout
