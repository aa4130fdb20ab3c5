"""The notebook of `examples/`, run cell by cell as Jupyter does: a job of this machine."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import nbformat
import pytest

with warnings.catch_warnings():  # of packages that it brings along, when they are imported
    warnings.simplefilter("ignore")
    from nbclient import NotebookClient

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent.parent
NOTEBOOK = ROOT / "examples/notebook/digits.ipynb"
ACCURACY = 0.95
"""examples/digits reaches 0.96 to 0.98 after 30 epochs, in whatever mode; its own check allows 0.02
between two runs)."""
RUN_S = 1200
NO_CELLS: Mapping[str, Any] = MappingProxyType({})


def executed(folder: Path, after: Mapping[str, Any] = NO_CELLS, **env: str) -> dict[str, Any]:
    """The cells by name, after a run in `folder`. `after`: further cells, by the one before."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for name, cell in after.items():
        notebook.cells.insert([one["id"] for one in notebook.cells].index(name) + 1, cell)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the event loop of its own that it makes
        NotebookClient(
            notebook, timeout=RUN_S, resources={"metadata": {"path": str(folder)}}
        ).execute(env={**os.environ, "XDG_RUNTIME_DIR": str(folder), **env})
    return {cell["id"]: cell for cell in notebook.cells}


def result(cell: Any) -> str:
    """What a cell shows as its value."""
    found = [one for one in cell["outputs"] if one["output_type"] == "execute_result"]
    return str(found[0]["data"]["text/plain"])


@pytest.mark.timeout(RUN_S)
def test_a_job_from_a_notebook_trains_as_well_as_the_example(tmp_path: Path) -> None:
    cells = executed(tmp_path)
    assert result(cells["place"]) == "<JobClient of this machine>"
    assert result(cells["wait"]).startswith("('Complete', ")
    assert float(result(cells["accuracy"])) >= ACCURACY
    assert "loss" in result(cells["rounds"]) or "..." in result(cells["rounds"])
    assert list((tmp_path / "runs").iterdir()) == [], "deleted with its logs"


def test_the_notebook_is_kept_without_results() -> None:
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
