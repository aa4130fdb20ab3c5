"""Grafana's dashboards are complete and readable, and their expressions use exported metrics."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from testing.cluster import programs
from testing.cluster.fixtures import or_skip
from testing.telemetry import known

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "charts/paceline"
FILES = sorted((CHART / "dashboards").glob("*.json"))
RULES = CHART / "rules/paceline.yaml"
STEP_S, STEPS = 30, 40
NAMES = {"$namespace": "team", "$job": "first", "$worker": ".*"}
VARIABLES = NAMES | {"$__rate_interval": "2m", "$__range": "10m"}
GROUP = re.compile(r"\$1")
"""A group reference of label_replace; no variable of Grafana begins with a digit."""
CONFIG_MAP_BYTES_MAX = 1 << 20
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def panels(file: Path) -> list[dict[str, Any]]:
    all_panels = json.loads(file.read_text())["panels"]
    return [panel for panel in all_panels if panel["type"] != "row"]


def filled(expression: str, own: Mapping[str, str]) -> str:
    """Fill in the variables, and drop `@ end()`, which the engine of rules does not know."""
    expression = expression.replace(" @ end()", "")
    for variable, value in {**VARIABLES, **own}.items():
        expression = expression.replace(variable, value)
    assert "$" not in GROUP.sub("", expression), expression
    return expression


def expressions(file: Path) -> dict[str, str]:
    """Return each expression by its place in the dashboard."""
    own = {"$worker": "0.0"} if file.stem == "paceline-rank" else {}
    by_place = {
        f"{panel['title']} ({target['legendFormat']})": filled(target["expr"], own)
        for panel in panels(file)
        for target in panel["targets"]
    }
    for variable in json.loads(file.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
            assert asked is not None, variable["definition"]
            by_place[f"variable {variable['name']}"] = (
                f"count by ({asked[2]}) ({filled(asked[1], own)})"
            )
    for mark in json.loads(file.read_text())["annotations"]["list"]:
        by_place[f"mark {mark['name']}"] = filled(mark["expr"], own)
    return by_place


def helm(*options: str) -> list[dict[str, Any]]:
    with or_skip():
        program = programs.require("helm")
    words = [str(program), "template", "x", str(CHART), "-n", "sys", *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [body for body in yaml.load_all(done.stdout, yaml.CSafeLoader) if body]


def test_all_three_dashboards_exist() -> None:
    assert [file.stem for file in FILES] == ["paceline-cluster", "paceline-job", "paceline-rank"]


@each_file
def test_every_panel_has_a_title_unit_and_description(file: Path) -> None:
    titles = [panel["title"] for panel in panels(file)]
    assert len(set(titles)) == len(titles)
    for panel in panels(file):
        assert panel["title"][0].isupper(), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert 15 < len(panel["description"]) < 450, panel["title"]
        assert panel["targets"], panel["title"]


@each_file
def test_panels_do_not_overlap(file: Path) -> None:
    taken: set[tuple[int, int]] = set()
    all_panels = json.loads(file.read_text())["panels"]
    assert len({panel["id"] for panel in all_panels}) == len(all_panels)
    for panel in all_panels:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {(grid["x"] + x, grid["y"] + y) for x in range(grid["w"]) for y in range(grid["h"])}
        assert not taken & cells, panel["title"]
        taken |= cells


@each_file
def test_the_data_source_can_be_chosen(file: Path) -> None:
    dashboard = json.loads(file.read_text())
    first, scrape, *others = dashboard["templating"]["list"]
    assert (first["name"], first["type"]) == ("datasource", "datasource")
    assert scrape["name"] == "scrape"
    asking = [
        *others,
        *dashboard["annotations"]["list"],
        *panels(file),
        *(t for p in panels(file) for t in p["targets"]),
    ]
    assert {each["datasource"]["uid"] for each in asking} == {"${datasource}"}


@each_file
@pytest.mark.cluster_programs
@pytest.mark.processes
def test_expressions_use_exported_metrics_only(file: Path) -> None:
    asked = expressions(file)
    answer = known.ask(expressions=[*asked.values()])
    assert answer["faults"] == []
    for where, uses in zip(asked, answer["uses"], strict=True):
        assert known.misused(uses, {}) == [], where


@each_file
@pytest.mark.cluster_programs
@pytest.mark.processes
def test_no_panel_is_empty_if_every_metric_has_data(file: Path) -> None:
    """Labels that do not match would leave a panel empty, even if all names are right."""
    asked = expressions(file)
    answer = known.ask(
        expressions=[*asked.values()],
        rules=str(RULES),
        series="\n".join([f"load {STEP_S}s", *known.lines(STEPS)]),
        step_s=STEP_S,
        until_s=STEP_S * STEPS,
    )
    assert answer["faults"] == []
    empty = [where for where, n in zip(asked, answer["results"], strict=True) if n == 0]
    assert empty == []


def test_every_metric_of_a_worker_is_used_or_exempt() -> None:
    """A new metric needs a panel or a rule, or a reason in this list."""
    apart = {
        "paceline_rank_index",  # changes with each generation and means nothing over time
        "paceline_weight_copies_total",  # a panel shows their seconds
        "paceline_shadow_late_gradients_total",  # `paceline run` reports it with what is saved
        "paceline_coordinator_connections_total",  # another panel shows if there is a connection
        "paceline_refused_total",  # the log reports it, and the job continues
        "paceline_agent_refused_total",
    }
    drawn = "".join(text for file in FILES for text in expressions(file).values())
    drawn += RULES.read_text()
    exported = {re.sub("_(bucket|sum|count)$", "", name) for name in known.of_ranks()}
    assert {name for name in exported if name not in drawn} == apart


@each_file
def test_rates_follow_the_scrape_interval_of_the_dashboard(file: Path) -> None:
    """They do not use the interval that Grafana's data source assumes."""
    scrape = json.loads(file.read_text())["templating"]["list"][1]
    assert [each["value"] for each in scrape["options"]] == ["5s", "15s", "30s", "60s"]
    assert scrape["current"]["value"] == "30s"
    for panel in panels(file):
        assert {target["interval"] for target in panel["targets"]} == {"$scrape"}, panel["title"]


@each_file
def test_missing_data_is_shown_as_missing(file: Path) -> None:
    for panel in panels(file):
        text = panel["fieldConfig"]["defaults"]["noValue"]
        match = re.match(r"no (data|end|epochs|checkpoints?)\b|ended, or not scraped", text)
        assert match, f"{panel['title']}: {text}"


@each_file
def test_single_values_are_queried_for_the_present(file: Path) -> None:
    """The last value of the whole range would be that of a job that has ended."""
    for panel in panels(file):
        if panel["type"] in ("stat", "bargauge", "table"):
            assert all(t["instant"] and not t["range"] for t in panel["targets"]), panel["title"]


@each_file
def test_every_panel_has_thresholds_of_its_own(file: Path) -> None:
    """Without steps of our own Grafana's defaults apply, which are red from 80 on for any unit."""
    alerts = {"0.2", "0.3"}
    for panel in panels(file):
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert steps[0]["value"] is None, panel["title"]
        assert 80 not in [step["value"] for step in steps]
        drawn = panel["fieldConfig"]["defaults"]["custom"].get("thresholdsStyle", {}).get("mode")
        if drawn == "line":
            assert str(steps[1]["value"]) in alerts, panel["title"]
    rules = RULES.read_text()
    assert "worker:paceline_blamed:ratio_rate5m > 0.2" in rules
    assert "job:paceline_exposed:ratio_rate5m > 0.3" in rules


@each_file
def test_links_lead_to_dashboards_with_job_rank_and_time(file: Path) -> None:
    uids = {json.loads(each.read_text())["uid"] for each in FILES}
    links = json.loads(file.read_text())["links"]
    assert all(link["includeVars"] and link["keepTime"] for link in links)
    panel_links = []
    for panel in panels(file):
        config = panel["fieldConfig"]
        panel_links += config["defaults"].get("links", [])
        for override in config["overrides"]:
            for of in override["properties"]:
                panel_links += of["value"] if of["id"] == "links" else []
    for link in panel_links:
        target, _, query = link["url"].removeprefix("/d/").partition("?")
        assert target in uids
        given = dict(part.split("=") for part in query.split("&") if "=" in part)
        assert {"var-namespace", "var-job", "var-datasource", "var-scrape"} <= set(given)
        assert ("var-worker" in given) == (target == "paceline-rank")
        assert "${__url_time_range}" in query
    assert bool(panel_links) == (file.stem != "paceline-rank")


@each_file
def test_legends_of_workers_name_the_pod(file: Path) -> None:
    for panel in panels(file):
        for target in panel["targets"]:
            legend = target["legendFormat"]
            if "{{worker}}" in legend:
                assert "{{pod}}" in legend, panel["title"]


@each_file
def test_lines_are_visible_in_every_time_series(file: Path) -> None:
    """The settings keep single points, edges of stacks, values at the border and zeros visible."""
    for panel in panels(file):
        if panel["type"] != "timeseries":
            continue
        title, defaults = panel["title"], panel["fieldConfig"]["defaults"]
        custom, stacked = defaults["custom"], defaults["custom"]["stacking"]["mode"] == "normal"
        assert custom["lineWidth"] == (0 if stacked else 1), title
        assert custom["showPoints"] == ("never" if stacked else "auto"), title
        assert custom["spanNulls"] >= 2 * 60_000, title
        log = custom["scaleDistribution"]["type"] == "log"
        assert log or custom["axisSoftMax"] > 0, title
        assert log == ("min" not in defaults), "a logarithmic axis has no zero"
        if "participation" in str(panel["targets"]):
            assert defaults["max"] > 1.0, "all of them would lie on the border"
        quantiles = [t["legendFormat"] for t in panel["targets"] if "_quantile(" in t["expr"]]
        if "_seconds" in str(panel["targets"]) and quantiles and file.stem != "paceline-cluster":
            assert "longest" in quantiles, title
            assert log, title


@each_file
def test_units_and_decimals_match_what_is_counted(file: Path) -> None:
    for panel in panels(file):
        defaults = panel["fieldConfig"]["defaults"]
        unit = defaults["unit"]
        assert unit not in ("short", "ops"), f"{panel['title']}: 4.62 K, ops/s"
        assert (unit == "locale") == (defaults.get("decimals") == 0), panel["title"]
        if unit == "locale" and panel["type"] == "timeseries":
            assert defaults["custom"]["lineInterpolation"] == "stepAfter", panel["title"]
        for override in panel["fieldConfig"]["overrides"]:
            for each in override["properties"]:
                assert each != {"id": "unit", "value": "ops"}, panel["title"]


@each_file
def test_rows_of_panels_are_full_and_titles_fit(file: Path) -> None:
    all_panels = json.loads(file.read_text())["panels"]
    for y in {panel["gridPos"]["y"] for panel in all_panels}:
        beside = [panel["gridPos"] for panel in all_panels if panel["gridPos"]["y"] == y]
        assert sum(grid["w"] for grid in beside) == 24, y
        assert len({grid["h"] for grid in beside}) == 1, y
    for panel in panels(file):
        assert len(panel["title"]) <= 6.5 * panel["gridPos"]["w"], panel["title"]
        if panel["type"] == "table":
            assert panel["gridPos"]["w"] >= 8, panel["title"]


def test_alerts_and_docs_name_existing_panels() -> None:
    titles = [panel["title"] for file in FILES for panel in panels(file)]
    named = re.findall(r'"([^"{}]+\?)"', " ".join(RULES.read_text().split()))
    named += re.findall(r'"([^"]+\?)"', (ROOT / "docs/monitoring.md").read_text())
    assert len(named) > 5
    assert [name for name in named if not any(t.startswith(name) for t in titles)] == []


def test_the_first_screen_of_a_job_has_the_main_metrics() -> None:
    """At 1080 pixels Grafana shows about 26 units of height."""
    first = [
        panel
        for panel in panels(next(file for file in FILES if file.stem == "paceline-job"))
        if panel["gridPos"]["y"] + panel["gridPos"]["h"] <= 17
    ]
    asked = " ".join(target["expr"] for panel in first for target in panel["targets"])
    for metric in (
        "paceline_figure_number",
        "paceline_epoch_number",
        "paceline_remaining_seconds",
        "paceline_contribution_age_rounds_count",
        "paceline_compute_seconds_total",
        "paceline_exposed_seconds_total",
        "paceline_blamed_seconds_total",
        "paceline_checkpoint_rounds",
        "ALERTS",
    ):
        assert metric in asked, metric


def test_membership_changes_and_alerts_are_annotated() -> None:
    for stem in ("paceline-job", "paceline-rank"):
        (file,) = (file for file in FILES if file.stem == stem)
        marks = json.loads(file.read_text())["annotations"]["list"]
        assert [mark["name"] for mark in marks] == [
            "Ranks join",
            "Ranks are lost or leave",
            "Coordinator replaced",
            "Alerts",
        ]
        assert all(mark["enable"] and mark["step"] == "60s" for mark in marks)


@pytest.mark.cluster_programs
@pytest.mark.processes
def test_the_chart_ships_the_dashboards_unchanged() -> None:
    off = {body["kind"] for body in helm()}
    assert not off & {"ConfigMap", "PrometheusRule"}
    options = "metrics.dashboards.enabled=true,metrics.dashboards.annotations.grafana_folder=ML"
    maps = [body for body in helm(f"--set={options}") if body["kind"] == "ConfigMap"]
    assert len(maps) == len(FILES)
    for config_map, file in zip(maps, FILES, strict=True):
        assert config_map["data"] == {file.name: file.read_text()}
        assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert config_map["metadata"]["annotations"] == {"grafana_folder": "ML"}
        assert len(json.dumps(config_map)) < CONFIG_MAP_BYTES_MAX


@pytest.mark.cluster_programs
@pytest.mark.processes
def test_the_chart_ships_the_rules_unchanged() -> None:
    options = "--set=metrics.rules.enabled=true,metrics.rules.labels.prometheus=main"
    (rule,) = (body for body in helm(options) if body["kind"] == "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(RULES.read_text())
    assert rule["metadata"]["labels"]["prometheus"] == "main"
