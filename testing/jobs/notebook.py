"""Run the notebook of `examples/` cell by cell, as Jupyter does."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import nbformat

with warnings.catch_warnings():  # its dependencies warn when they are imported
    warnings.simplefilter("ignore")
    from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent.parent
NOTEBOOK = ROOT / "examples/notebook/digits.ipynb"
ACCURACY = 0.95
"""Lower bound on the accuracy. examples/digits reaches 0.96 to 0.98 after 30 epochs in every mode;
its own check allows a difference of 0.02 between two runs."""
RUN_S = 1200
"""Bound on a test that executes the notebook."""
CELL_S = 500
"""Bound on one cell; it is then interrupted, so that the error shows the line at which it was."""
OUTPUTS_S = 120
"""Bound on the time between the end of a cell and the last of its outputs. On a busy machine they
come seconds later; by default, those that take more than 4 s are left out without an error."""
NO_CELLS: Mapping[str, Any] = MappingProxyType({})


def executed(folder: Path, after: Mapping[str, Any] = NO_CELLS, **env: str) -> dict[str, Any]:
    """Execute the notebook.

    Args:
        folder: working directory of the kernel.
        after: further cells, each by the id of the cell before it.
        env: additional environment variables.

    Returns:
        the executed cells by id.
    """
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    for name, cell in after.items():
        notebook.cells.insert([one["id"] for one in notebook.cells].index(name) + 1, cell)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about the event loop that it makes
        NotebookClient(
            notebook,
            timeout=CELL_S,
            interrupt_on_timeout=True,
            iopub_timeout=OUTPUTS_S,
            raise_on_iopub_timeout=True,
            resources={"metadata": {"path": str(folder)}},
        ).execute(env={**os.environ, "XDG_RUNTIME_DIR": str(folder), **env})
    return {cell["id"]: cell for cell in notebook.cells}


def result(cell: Any) -> str:
    """Return the text of a cell's result value."""
    results = [one for one in cell["outputs"] if one["output_type"] == "execute_result"]
    return str(results[0]["data"]["text/plain"])
