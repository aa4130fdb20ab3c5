"""The table of training scripts in docs/scripts.md, made of testing/scripts/table.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from testing.scripts.table import Expectation, Row, rows

PAGE: Final = Path(__file__).resolve().parent.parent / "docs/scripts.md"
BEGIN: Final = (
    "<!-- Begin of the table that scripts/script_table.py makes of testing/scripts/table.yaml. -->"
)
END: Final = "<!-- End of the table. -->"
HEAD: Final = (
    "| script | what it does | lines changed | under torchrun and in a job | a rank is killed "
    "| late ranks, in Quorum |\n"
    "|---|---|---|---|---|---|"
)


def markdown() -> str:
    """Return docs/scripts.md with its table as the rows say.

    Returns:
        The whole page.

    Raises:
        LookupError: The page has no marks around its table.
    """
    text = PAGE.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise LookupError(f"{PAGE.name} needs one line {BEGIN!r} and one line {END!r}")
    before, rest = text.split(BEGIN)
    table = "\n".join([HEAD, *map(_line, rows())])
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}"


def _line(row: Row) -> str:
    words = row.runs[0] if len(row.runs) == 1 else ()
    columns = {"elastic": row.elastic.value, "late": row.late.value}
    texts = (f"{value} (once)" if name in row.once else value for name, value in columns.items())
    tried = ("", "") if row.expect is Expectation.REFUSED else tuple(texts)
    cells = (f"`{' '.join([row.script, *words])}`", row.habit, "0", _result(row), *tried)
    return f"| {' | '.join(cells)} |"


def _result(row: Row) -> str:
    if row.expect is Expectation.REFUSED:
        return f"refused: {row.reason}"
    ranks = [f"{n} ranks: {_equal(row, n)}" for n in row.ranks]
    return "; ".join([*ranks, row.rounding] if row.rounding else ranks)


def _equal(row: Row, ranks: int) -> str:
    tolerance = row.tolerance_at(ranks)
    return f"within {tolerance:g}" if tolerance else "equal bits"
