"""Answers of a real Prometheus to the dashboards' queries, over a recorded run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from testing.cluster import prometheus
from testing.cluster.fixtures import or_skip
from testing.telemetry import drawn, story
from testing.telemetry.drawn import FILES, Looker, panels

pytestmark = [pytest.mark.exhaustive, pytest.mark.cluster_programs, pytest.mark.processes]
ENTRIES_MAX = 12
"""The most entries of a legend that can be read in a panel of eight columns."""
ONE = drawn.EVERY[2]
SLOW_SCRAPES = drawn.EVERY[3]
NOBODY = story.Run("nobody", "nothing", 5, ONE.mode, 30)


@pytest.fixture(scope="module")
def looker() -> Iterator[Looker]:
    with or_skip():
        prometheus.require("prometheus")
        prometheus.require("promtool")
    with drawn.recorded([ONE, SLOW_SCRAPES, drawn.LARGE, *drawn.MODES]) as recording:
        yield recording


def panel(title: str, stem: str = "job") -> dict[str, Any]:
    (body,) = (
        each
        for file in FILES
        if file.stem == f"paceline-{stem}"
        for each in panels(file)
        if each["title"].startswith(title)
    )
    return body


def values(series: dict[str, Any]) -> list[float]:
    points = series["values"] if "values" in series else [series["value"]]
    return [float(value) for _, value in points]


def test_every_panel_has_data_at_every_scrape_interval() -> None:
    """The page docs/monitoring.md has the same table."""
    with or_skip():
        prometheus.require("prometheus")
    lines = drawn.table()
    assert [line for line in lines if "| - |" in line] == []
    page = (drawn.ROOT / "docs/monitoring.md").read_text()
    assert "\n".join(lines) in page, "run: python -m testing.telemetry.drawn"


def test_a_rate_window_for_faster_scrapes_is_empty(looker: Looker) -> None:
    """Grafana chooses such a window if its data source is set to 2 s; the test above would fail."""
    speed = panel("How many rounds per second, and")
    assert not looker.draws(speed, SLOW_SCRAPES, believed_s=2)
    assert looker.draws(speed, SLOW_SCRAPES)


@pytest.mark.parametrize("run", [drawn.LARGE, *drawn.MODES], ids=lambda run: run.job)
def test_every_panel_has_data_in_each_mode_and_with_many_ranks(
    looker: Looker, run: story.Run
) -> None:
    shown = [each for file in FILES for each in panels(file)]
    assert [each["title"] for each in shown if not looker.draws(each, run)] == []


def test_legends_are_readable_with_64_ranks(looker: Looker) -> None:
    """The ranks in them stay the same; if chosen at each step, there would be many more."""
    for file in FILES:
        for each in panels(file):
            if each["type"] in ("timeseries", "bargauge") and "operator" not in str(each):
                entries = sum(len(answer) for answer in looker.answers(each, drawn.LARGE))
                assert 0 < entries <= ENTRIES_MAX, f"{each['title']}: {entries}"
    rows = looker.answers(panel("Who is waited for, when? All ranks"), drawn.LARGE)[0]
    names = [series["metric"]["row"] for series in rows]
    assert len(set(names)) >= 64
    assert sorted(names, key=lambda name: int(name.split(".")[0])) == sorted(names)


def test_the_slow_rank_is_named_with_pod_and_node(looker: Looker) -> None:
    costs = panel("Who costs most now?")
    ((slow,),) = looker.answers(costs, drawn.LARGE)
    assert slow["metric"] == {"worker": "2.0", "pod": "wide-2-1", "node": "node-2"}
    assert costs["targets"][0]["legendFormat"] == "{{pod}} ({{worker}}) on {{node}}"


@pytest.mark.parametrize("run", [ONE, drawn.LARGE], ids=["5 ranks", "64 ranks"])
def test_shares_are_relative_to_the_time_of_one_rank(looker: Looker, run: story.Run) -> None:
    """A sum over 64 ranks would be 64 times as large as the slow rank's share of each second."""
    ((slow,),) = looker.answers(panel("Who costs most now?"), run)
    assert values(slow)[0] == pytest.approx(story.LATE_S, rel=0.05)
    for file in FILES:
        for each in panels(file):
            if each["fieldConfig"]["defaults"]["unit"] == "percentunit":
                answers = looker.answers(each, run)
                highest = max((max(values(s)) for answer in answers for s in answer), default=0)
                assert highest <= 1.02, each["title"]


def test_an_ended_job_does_not_look_alive(looker: Looker) -> None:
    """The query is made ten minutes after the end, with the whole run on the screen."""
    for file in FILES:
        for each in panels(file):
            if each["type"] == "stat" and "operator" not in str(each["targets"]):
                alive = looker.answers(each, ONE, later_s=600)
                assert [answer for answer in alive if answer] == [], each["title"]


def test_zero_and_missing_data_look_different(looker: Looker) -> None:
    """In a job that is not scraped no panel may show "none" or 0."""
    for title in ("How many reductions failed?", "Who was started again"):
        ((zero,), *_) = looker.answers(panel(title), ONE)
        assert set(values(zero)) == {0.0}, title
    for file in FILES:
        for each in panels(file):
            asked = str(each["targets"])
            if "$job" in asked:
                assert not any(looker.answers(each, NOBODY)), each["title"]


def test_a_lost_rank_is_one_annotation(looker: Looker) -> None:
    marks = json.loads(FILES[1].read_text())["annotations"]["list"]
    at = {}
    for mark in marks:
        asked = drawn.filled(mark["expr"], ONE, 30, ONE.lasts_s)
        end_s = story.BEGAN_S + ONE.lasts_s
        answer = looker.server.range(asked, story.BEGAN_S, end_s, float(mark["step"][:-1]))
        at[mark["name"]] = [
            int(moment) - story.BEGAN_S for series in answer for moment, _ in series["values"]
        ]
    assert len(at["Ranks are lost or leave"]) == 1
    assert 0 <= at["Ranks are lost or leave"][0] - story.KILLED_S <= drawn.CHOSEN_S + 60
    assert at["Coordinator replaced"] == []
    assert min(at["Alerts"]) >= story.KILLED_S
    assert at["Ranks join"]


def test_a_table_keeps_its_columns_while_only_agents_report(looker: Looker) -> None:
    """A column without an answer to its query would be called "Value"."""
    jobs = panel("Which jobs train?", "cluster")
    begun = looker.answers(jobs, ONE)
    assert all(len(answer) == len(begun[0]) for answer in begun)
    for target in jobs["targets"]:
        assert re.search(r"paceline_coordinator_connected_info", target["expr"])


def test_the_loss_is_the_mean_over_the_applied_round(looker: Looker) -> None:
    (figures,) = looker.answers(panel("What does the script report?"), ONE)
    by_name = {series["metric"]["figure"]: values(series) for series in figures}
    assert set(by_name) == {"loss", "accuracy"}
    assert by_name["loss"] == pytest.approx([2.0] * len(by_name["loss"]))
