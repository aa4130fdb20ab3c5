"""Write the tables of the documentation from the results files in `benchmarks/results`.

A page names a table, and `make generate` fills in what stands between the two comments:

    <!-- table: b5_straggler -->
    <!-- end of table -->

The name is that of a results file or of a view in VIEWS, which selects rows and columns of one. A
single figure inside a sentence is written anew as well, from the first row that begins with the
given cells:

    <!-- figure: b8_recovery; Paceline, mpi; stall -->0.09<!-- / -->

`make check` compares the pages with the files, so two pages cannot disagree about a figure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import RESULTS, Bar, table, text

ROOT: Final = Path(__file__).parent.parent
FIGURE: Final = re.compile(r"(<!-- figure: ([^;]+); (.+?); ([^;]+?) -->).*?<!-- / -->")
BLOCK: Final = re.compile(r"<!-- table: (\S+) -->\n.*?<!-- end of table -->", re.S)


@dataclass(frozen=True)
class View:
    """Rows and columns of a results file."""

    result: str
    columns: tuple[int, ...] = ()
    """Numbers of the columns, since several may have the same name; empty for all."""
    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Cells that the rows must have in the named columns."""


MODES: Final = {"mode": ("Full", "Quorum(4)", "Solo")}
PIPELINES: Final = {"mode": ("Full", "Quorum(4)", "Full, pipeline", "Quorum(4), pipeline")}
VIEWS: Final = {
    "b1_modes": View("b1_hyperplane", where=MODES),
    "b1_pipeline": View("b1_hyperplane", (0, 1, 2, 5, 7, 9, 11, 12), PIPELINES),
}


def pages(root: Path = ROOT) -> dict[str, Callable[[], str]]:
    """Return the pages with results: path, and the function that returns the text."""
    paths = [root / "README.md", *sorted(root.glob("docs/**/*.md"))]
    return {
        path.relative_to(root).as_posix(): partial(page, path)
        for path in paths
        if BLOCK.search(path.read_text()) or FIGURE.search(path.read_text())
    }


def page(path: Path) -> str:
    """Return the text of a page with all its tables and figures written anew."""
    filled = BLOCK.sub(lambda match: "\n".join(block(match[1])), path.read_text())
    return FIGURE.sub(lambda match: f"{match[1]}{figure(*match.groups()[1:])}<!-- / -->", filled)


def figure(name: str, row: str, column: str) -> str:
    """Return one figure, without the range that may follow it in its cell.

    Args:
        name: Name of a results file.
        row: First cells of the row, joined by a comma and a space.
        column: Name of the column; the first one with this name counts.

    Returns:
        Text of the figure.

    Raises:
        LookupError: There is no such row or column.
    """
    result = load(name)
    for cells in result["rows"]:
        if ", ".join(map(text, cells)).startswith(f"{row}, ") and column in result["columns"]:
            return text(cells[result["columns"].index(column)]).split(" (")[0]
    raise LookupError(f"{name} has no row {row!r} with a column {column!r}")


def block(name: str) -> list[str]:
    """Return the lines of one table with its bars and its source, comments included.

    Args:
        name: Name of a view or of a results file.

    Returns:
        Lines without line ends.
    """
    view = VIEWS.get(name, View(name))
    result = load(view.result)
    columns = result["columns"]
    taken = view.columns or range(len(columns))
    rows = [
        [row[at] for at in taken]
        for row in result["rows"]
        if all(str(row[columns.index(key)]) in values for key, values in view.where.items())
    ]
    bars = [] if view.columns else [f"- {Bar(**bar).line()}" for bar in result.get("bars", ())]
    return [
        f"<!-- table: {name} -->",
        "",
        *table([columns[at] for at in taken], rows),
        "",
        *bars,
        *([""] if bars else []),
        f"*{source(view.result, result)}*",
        "",
        "<!-- end of table -->",
    ]


def source(name: str, result: Mapping[str, Any]) -> str:
    """Return one sentence that says where the figures come from."""
    if result["source"] != "measured":
        commit, where = result["page commit"], result["page"]
        return f"{result['source'].capitalize()} ({where} at {commit})."
    machine = result["machine"]
    gpu = f"{machine['gpu']}, " if "gpu" in machine else ""
    return (
        f"Measured on {result['date']}: {gpu}{machine['cores']} cores, {machine['cpu']}, commit "
        f"{machine['commit']}, load {machine['load before'][0]} at the start; raw results in "
        f"`benchmarks/results/{name}.json`."
    )


def load(name: str) -> dict[str, Any]:
    """Return a results file.

    Args:
        name: Name without its ending.

    Returns:
        The content.

    Raises:
        LookupError: There is no such file.
    """
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise LookupError(f"there is no results file {path.relative_to(ROOT)}")
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def names_in_pages(root: Path = ROOT) -> Iterator[str]:
    """Yield the name of each table in the documentation."""
    for name in pages(root):
        yield from BLOCK.findall((root / name).read_text())
