"""The notebook in `examples/`, run cell by cell as Jupyter does, with a local job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testing.jobs.notebook import ACCURACY, NOTEBOOK, RUN_S, executed, result

pytestmark = pytest.mark.processes


@pytest.mark.exhaustive
@pytest.mark.timeout(RUN_S)
def test_a_job_from_a_notebook_reaches_the_accuracy_of_the_example(tmp_path: Path) -> None:
    cells = executed(tmp_path)
    assert result(cells["place"]) == "<JobClient of this machine>"
    assert result(cells["wait"]).startswith("('Complete', ")
    assert float(result(cells["accuracy"])) >= ACCURACY
    assert "loss" in result(cells["rounds"]) or "..." in result(cells["rounds"])
    assert list((tmp_path / "runs").iterdir()) == [], "deleted with its logs"


def test_the_notebook_is_committed_without_outputs() -> None:
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
