"""The benchmark of the operator works at its smallest size; its figures are not judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.cluster.control_plane import ControlPlane
from testing.fake_cluster.beside import Running, until

pytestmark = pytest.mark.processes


@pytest.mark.exhaustive
def test_the_operator_benchmark_runs_at_its_smallest_size(
    plane: ControlPlane, namespace: str, running: Running, tmp_path: Path
) -> None:
    from benchmarks.harness import Report
    from benchmarks.operator_cluster import Bench
    from benchmarks.operator_requests import COLUMNS, plain, rows, with_operator

    until(lambda: "acting for" in running.log.read_text(), "an operator")
    report = Report("operator", "Smoke", COLUMNS, smoke=True)
    with plane.fake_nodes(2):
        bench = Bench(plane, running, namespace)
        floor = plain(bench, 1, 2)
        ours = with_operator(bench, 1, 2)
    rows(report, "1x2", floor, ours, 1, 2)
    assert all(report.checks.values()), report.markdown()
    assert len(ours.replaced_s) == 3
    assert 0 < floor.created_s < floor.ready_s
    assert 0 < ours.created_s < ours.ready_s
    assert ours.scaled_s > 0
    assert "TrainingJob" in report.markdown()
