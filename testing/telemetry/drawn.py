"""Queries that Grafana sends to Prometheus for a panel, and whether the answers have data.

    python -m testing.telemetry.drawn

prints for each panel and each interval between scrapes whether there is something to draw;
docs/monitoring.md has this table.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline_api.types.enums import Mode

from testing.cluster import prometheus
from testing.telemetry import story
from testing.temporary import temporary_folder

ROOT = Path(__file__).parent.parent.parent
FILES = sorted((ROOT / "charts/paceline/dashboards").glob("*.json"))
CHOSEN_S = 30
"""Scrape interval that the dashboards assume at first."""
INTERVALS_S = (5, 15, 30, 60)
EVERY = [story.Run(f"every-{s}s", "first", 5, Mode.QUORUM, s) for s in INTERVALS_S]
MODES = [story.Run("modes", mode.lower(), 5, mode, 30, 600) for mode in Mode]
LARGE = story.Run("large", "wide", 64, Mode.QUORUM, 30, 600)
NO_DATA_NEEDED = 0.4
"""Share of the shown moments at which a line may have no point, since events occur in its midst."""


def panels(file: Path) -> list[dict[str, Any]]:
    """Return the panels of a dashboard file, without rows."""
    return [panel for panel in json.loads(file.read_text())["panels"] if panel["type"] != "row"]


def filled(expression: str, run: story.Run, believed_s: int, range_s: int) -> str:
    """Return an expression with the dashboard's variables filled; `believed_s` is its interval."""
    for variable, value in {
        "$__rate_interval": f"{4 * believed_s}s",
        "$__range": f"{range_s}s",
        "$namespace": run.namespace,
        "$job": run.job,
    }.items():
        expression = expression.replace(variable, value)
    worker = '"2.0"' if 'worker="$worker"' in expression else '".*"'
    expression = expression.replace('"$worker"', worker)
    assert not re.search(r"\$[a-z_]", expression), expression
    return expression


class Looker:
    """A user at Grafana with the whole run on the screen."""

    def __init__(self, server: prometheus.Server) -> None:
        self.server = server

    def answers(
        self, panel: dict[str, Any], run: story.Run, believed_s: int = CHOSEN_S, later_s: int = 0
    ) -> list[list[dict[str, Any]]]:
        """Return the series of each query of a panel.

        Args:
            panel: the panel of the dashboard.
            run: the run that is shown.
            believed_s: scrape interval that the dashboard assumes.
            later_s: seconds between the end of the run and the end of the shown range.

        Returns:
            for each query its series that have a number.
        """
        begin_s, end_s = story.BEGAN_S, story.BEGAN_S + run.lasts_s + later_s
        answers = []
        for target in panel["targets"]:
            asked = filled(target["expr"], run, believed_s, end_s - begin_s)
            if target["instant"]:
                series = self.server.instant(asked, end_s)
            else:
                series = self.server.range(asked, begin_s, end_s, believed_s)
            answers.append([each for each in series if _numbers(each)])
        return answers

    def draws(self, panel: dict[str, Any], run: story.Run, believed_s: int = CHOSEN_S) -> bool:
        """Return True if a panel has a figure, or points for at least 60 % of the time."""
        answers = [each for series in self.answers(panel, run, believed_s) for each in series]
        if panel["targets"][0]["instant"]:
            return bool(answers)
        drawn = {at for each in answers for at in _numbers(each)}
        return len(drawn) >= (1 - NO_DATA_NEEDED) * run.lasts_s / believed_s


def _numbers(series: dict[str, Any]) -> list[float]:
    """Return the times at which a series has a number."""
    points = series["values"] if "values" in series else [series["value"]]
    return [float(at) for at, value in points if not math.isnan(float(value))]


@contextmanager
def recorded(runs: Iterable[story.Run]) -> Iterator[Looker]:
    """Load runs into a Prometheus and yield a user who looks at them."""
    with temporary_folder() as folder:
        with (folder / "scraped").open("w") as file:
            for run in runs:
                file.writelines(story.lines(run))
            file.write("# EOF\n")
        (folder / "config.yaml").write_text("{}\n")
        prometheus.backfill(folder / "scraped", folder / "data")
        with prometheus.serving(folder / "data", folder / "config.yaml") as server:
            yield Looker(server)


def table() -> list[str]:
    """Return a Markdown table of the panels that have data at each scrape interval.

    A panel counts if it draws both with the interval that the dashboards assume at first and with
    the right one. Each interval has its own Prometheus, since no namespace would separate the
    operator's series.

    Returns:
        the lines of the table.
    """
    drawn: dict[tuple[str, str], list[str]] = {}
    for run in EVERY:
        with recorded([run]) as looker:
            for file in FILES:
                for panel in panels(file):
                    both = (looker.draws(panel, run, s) for s in (CHOSEN_S, run.scrape_s))
                    key = (file.stem.removeprefix("paceline-"), panel["title"])
                    drawn.setdefault(key, []).append("data" if all(both) else "-")
    heads = " | ".join(f"{s} s" for s in INTERVALS_S)
    return [
        f"| dashboard | panel | {heads} |",
        "|---|---|" + "---|" * len(INTERVALS_S),
        *(f"| {' | '.join([*key, *cells])} |" for key, cells in drawn.items()),
    ]


if __name__ == "__main__":
    sys.stdout.write("\n".join(table()) + "\n")
