"""Number, place and format the panels of charts/paceline/dashboards/*.json.

The JSON files are the source. Panels stand in the order of reading, and each needs only the width
and height of its `gridPos`: lines are filled from left to right. CONTRIBUTING.md says how to edit
them; tests/operator/test_dashboard_form.py says what all panels have in common.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
FILES: Final = sorted((ROOT / "charts/paceline/dashboards").glob("*.json"))
COLUMNS: Final = 24


def formatted(path: Path) -> str:
    """Return the JSON of a dashboard with unique panel ids and with panels that do not overlap."""
    dashboard = json.loads(path.read_text())
    x, y, tallest = 0, 0, 0
    for number, panel in enumerate(dashboard["panels"], 1):
        width, height = panel["gridPos"]["w"], panel["gridPos"]["h"]
        if x + width > COLUMNS:
            x, y, tallest = 0, y + tallest, 0
        panel["id"] = number
        panel["gridPos"] = {"x": x, "y": y, "w": width, "h": height}
        x, tallest = x + width, max(tallest, height)
    return json.dumps(dashboard, indent=1, ensure_ascii=False) + "\n"


def dashboards() -> dict[str, Callable[[], str]]:
    """Return the formatter of each dashboard by its path in the repository."""
    return {path.relative_to(ROOT).as_posix(): partial(formatted, path) for path in FILES}
