"""All dashboards and panels have one form: the same settings, and queries that are built alike.

The JSON in charts/paceline/dashboards is edited by hand or in Grafana, which adds settings of its
own. These tests name the panel that differs from the others.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from paceline.core.protocol.records import DROP_MEANINGS

from scripts.dashboards import FILES, formatted

JOB = 'namespace="$namespace", paceline_dev_job_name="$job"'
SELECTORS = {
    "paceline-cluster": ('namespace=~"$namespace"',),
    "paceline-job": (f'{JOB}, worker=~"$worker"', JOB),
    "paceline-rank": (f'{JOB}, worker="$worker"', JOB),
}
"""First labels that each selector of a dashboard may have."""
WITHOUT_JOB = re.compile(r'namespace="\$namespace", container="trainer"')
"""Selector of the kubelet's series, which have no label of the job."""
METRIC = re.compile(r"\b(paceline_(?!operator|dev_)\w+|ALERTS|job:[\w:]+)(\{[^}]*\})?")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
UNITS = {"s", "bytes", "Bps", "percentunit", "reqps", "none", "locale"}
AT_ONCE = ("stat", "table", "bargauge")
"""Kinds of panels that show the present and not a range."""
COLORS = {
    "stat": {"mode": "thresholds"},
    "table": {"mode": "thresholds"},
    "timeseries": {"mode": "palette-classic"},
}
"""Mode of the color by kind of panel; blue for the others."""
PANEL_KEYS = {
    *("id", "gridPos", "type", "title", "description", "datasource"),
    *("fieldConfig", "options", "targets", "transformations"),
}
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def board(stem: str) -> dict[str, Any]:
    (file,) = (file for file in FILES if file.stem == stem)
    dashboard: dict[str, Any] = json.loads(file.read_text())
    return dashboard


def panels(file: Path) -> list[dict[str, Any]]:
    return [panel for panel in board(file.stem)["panels"] if panel["type"] != "row"]


ALL = [panel for file in FILES for panel in panels(file)]


@each_file
def test_make_generate_would_not_change_the_file(file: Path) -> None:
    assert file.read_text() == formatted(file), "make generate"


def test_panels_are_numbered_and_placed_from_left_to_right(tmp_path: Path) -> None:
    sizes = [(24, 1), (12, 4), (8, 6), (8, 4), (24, 1), (24, 2)]
    written = tmp_path / "board.json"
    written.write_text(json.dumps({"panels": [{"gridPos": {"w": w, "h": h}} for w, h in sizes]}))
    placed = json.loads(formatted(written))["panels"]
    assert [panel["id"] for panel in placed] == [1, 2, 3, 4, 5, 6]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in placed]
    assert places == [(0, 0), (0, 1), (12, 1), (0, 7), (0, 11), (0, 12)]


@each_file
def test_dashboards_share_all_other_settings(file: Path) -> None:
    own = {"description", "uid", "title", "annotations", "templating", "panels"}
    first, this = board(FILES[0].stem), board(file.stem)
    assert this.keys() == first.keys()
    assert {key: this[key] for key in this.keys() - own} == {
        key: first[key] for key in first.keys() - own
    }
    assert this["uid"] == file.stem
    assert this["title"] == file.stem.replace("-", " ").capitalize()


def test_variables_and_annotations_are_the_same_in_all_dashboards() -> None:
    cluster, job, rank = (board(file.stem) for file in FILES)
    of_job, of_rank = job["templating"]["list"], rank["templating"]["list"]
    assert cluster["templating"]["list"][:2] == of_job[:2] == of_rank[:2]
    assert of_job[2:4] == of_rank[2:4]
    assert job["annotations"] == rank["annotations"]


@each_file
def test_variables_have_one_form(file: Path) -> None:
    for variable in board(file.stem)["templating"]["list"][2:]:
        name = variable["name"]
        assert variable["datasource"] == SOURCE
        assert variable["query"] == {"query": variable["definition"], "refId": name}
        assert (variable["refresh"], variable["hide"]) == (2, 0), name
        assert variable["sort"] == (3 if name == "worker" else 1), "3 sorts by number"
        if variable.get("multi"):
            assert (variable["includeAll"], variable["allValue"]) == (True, ".*"), name
        wanted = {"selected": True, "text": "All", "value": "$__all"}
        assert variable["current"] == (wanted if variable.get("multi") else {}), name


@each_file
def test_a_panel_has_only_the_settings_that_are_checked(file: Path) -> None:
    """Grafana's export adds others, such as its own version."""
    for panel in panels(file):
        kind, defaults = panel["type"], panel["fieldConfig"]["defaults"]
        count = defaults["unit"] == "locale"
        title = panel["title"]
        assert panel.keys() == PANEL_KEYS, title
        assert panel["datasource"] == SOURCE, title
        assert defaults["unit"] in UNITS or defaults["unit"].startswith("suffix:"), title
        blue = {"mode": "fixed", "fixedColor": "blue"}
        assert defaults["color"] == COLORS.get(kind, blue), title
        assert defaults["thresholds"]["mode"] == "absolute", title
        assert defaults.get("decimals") == (0 if count else 1 if kind in AT_ONCE else None), title
        log = defaults["custom"].get("scaleDistribution") == {"type": "log", "log": 10}
        assert defaults.get("min") == (None if log or kind == "table" else 0), title
        for override in panel["fieldConfig"]["overrides"]:
            properties = {each["id"]: each["value"] for each in override["properties"]}
            assert override["matcher"]["id"] == "byName"
            counts = properties.get("unit") == "locale"
            assert counts == (properties.get("decimals") == 0), title


@each_file
def test_a_panel_has_the_options_of_its_kind(file: Path) -> None:
    for panel in panels(file):
        first = next(each for each in ALL if each["type"] == panel["type"])
        free = {"textMode", "cellValues"}
        assert panel["options"].keys() == first["options"].keys()
        assert {k: v for k, v in panel["options"].items() if k not in free} == {
            k: v for k, v in first["options"].items() if k not in free
        }
        if panel["type"] == "stat":
            assert panel["options"]["textMode"] in ("value", "value_and_name")
        if panel["type"] == "heatmap":
            unit = panel["fieldConfig"]["defaults"]["unit"]
            assert panel["options"]["cellValues"] == {"unit": unit}


@each_file
def test_lines_and_columns_are_drawn_in_one_manner(file: Path) -> None:
    for panel in panels(file):
        defaults = panel["fieldConfig"]["defaults"]
        custom, unit = defaults["custom"], defaults["unit"]
        if panel["type"] == "table":
            assert custom == {"align": "auto", "cellOptions": {"type": "auto"}, "minWidth": 60}
            continue
        if panel["type"] != "timeseries":
            assert custom == {}, panel["title"]
            continue
        stacked = custom["stacking"]["mode"] == "normal"
        log = custom["scaleDistribution"]["type"] == "log"
        line = len(defaults["thresholds"]["steps"]) > 1
        # While all values are zero, the axis ends at a small value.
        top = {} if log else {"axisSoftMax": {"percentunit": 0.1, "s": 0.01}.get(unit, 1)}
        assert custom == {
            "drawStyle": "line",
            # A stacked line of zeros lies on the one below and would paint over its edge.
            "lineWidth": 0 if stacked else 1,
            "fillOpacity": 60 if stacked else 0,
            "lineInterpolation": "stepAfter" if unit == "locale" else "linear",
            "showPoints": "never" if stacked else "auto",
            "pointSize": 4,
            # Two and a half of the longest interval between scrapes.
            "spanNulls": 150_000,
            "scaleDistribution": {"type": "log", "log": 10} if log else {"type": "linear"},
            "thresholdsStyle": {"mode": "line" if line else "off"},
            "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
            **top,
        }, panel["title"]


@each_file
def test_queries_of_a_panel_have_one_form(file: Path) -> None:
    for panel in panels(file):
        at_once = panel["type"] in AT_ONCE
        for letter, target in zip("ABCDEFGHIJKL", panel["targets"], strict=False):
            assert target == {
                "refId": letter,
                "datasource": SOURCE,
                "expr": target["expr"],
                "legendFormat": target["legendFormat"],
                "interval": "$scrape",
                "instant": at_once,
                "range": not at_once,
                "format": "table" if panel["type"] == "table" else "time_series",
            }, panel["title"]
            if "{{worker}}" in target["legendFormat"]:
                assert "{{pod}} ({{worker}})" in target["legendFormat"], panel["title"]


@each_file
def test_each_query_of_a_table_is_a_named_column(file: Path) -> None:
    for panel in panels(file):
        if panel["type"] != "table":
            assert panel["transformations"] == [], panel["title"]
            continue
        merge, organize = panel["transformations"]
        assert (merge, organize["id"]) == ({"id": "merge", "options": {}}, "organize")
        hidden, renamed = (organize["options"][key] for key in ("excludeByName", "renameByName"))
        several = len(panel["targets"]) > 1
        wanted = {"paceline_dev_job_name": "job"}
        for target in panel["targets"]:
            column = f"Value #{target['refId']}" if several else "Value"
            if target["legendFormat"]:
                wanted[column] = target["legendFormat"]
            else:
                assert hidden[column]
        assert renamed == wanted
        assert hidden["Time"]
        columns = {override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]}
        assert columns <= {*renamed.values(), "worker"}


@each_file
def test_every_metric_is_selected_by_the_variables(file: Path) -> None:
    """A metric without the job's labels would add up all jobs."""
    expressions = [
        target["expr"]
        for panel in board(file.stem)["panels"]
        for target in panel.get("targets", ())
    ]
    expressions += [mark["expr"] for mark in board(file.stem)["annotations"]["list"]]
    for expression in expressions:
        for metric, selector in METRIC.findall(expression):
            labels = selector.strip("{}").removeprefix('alertstate="firing", ')
            assert labels.startswith(SELECTORS[file.stem]), f"{metric}{selector} in {expression}"
        for labels in re.findall(r"\bcontainer_\w+\{([^}]*)\}", expression):
            assert WITHOUT_JOB.fullmatch(labels), expression


@each_file
def test_windows_follow_the_dashboard(file: Path) -> None:
    """Series that are chosen at each step anew would be dots of many colors."""
    for panel in panels(file):
        for target in panel["targets"]:
            expression = re.sub(r'"[^"]*"', '""', target["expr"])
            windows = set(re.findall(r"\[[^\]]*\](?: @ end\(\))?", expression))
            known = {"[$__rate_interval]", "[$__range] @ end()"}
            known |= {"[$__range]"} if target["instant"] else set()
            assert windows <= known, panel["title"]
            if "topk(" in expression and target["range"]:
                assert "@ end()" in expression, panel["title"]


@each_file
def test_a_mean_divides_sum_and_count_of_the_same_series(file: Path) -> None:
    for panel in panels(file):
        for target in panel["targets"]:
            part = r"rate\((\w+)_{}(\{{[^}}]*\}}\[[^\]]*\](?: @ end\(\))?)\)"
            sums, counts = (
                set(re.findall(part.format(end), target["expr"])) for end in ("sum", "count")
            )
            if sums and counts:
                assert sums == counts, panel["title"]


@each_file
def test_annotations_have_one_form(file: Path) -> None:
    for mark in board(file.stem)["annotations"]["list"]:
        free = {key: mark[key] for key in ("name", "iconColor", "expr", "titleFormat")}
        assert mark == free | {
            "datasource": SOURCE,
            "enable": True,
            "hide": False,
            "step": "60s",
            "textFormat": "",
            "tagKeys": "",
            "useValueForTime": False,
        }
        assert set(re.findall(r"offset (\S+?)\)?(?=[\s)]|$)", mark["expr"])) <= {"60s"}


def test_every_reason_for_a_drop_is_explained_beside_its_figures() -> None:
    (panel,) = (
        each
        for each in board("paceline-job")["panels"]
        if each["title"] == "Which samples were dropped?"
    )
    for reason, meaning in DROP_MEANINGS.items():
        assert f"{reason}: {meaning}." in panel["description"]
