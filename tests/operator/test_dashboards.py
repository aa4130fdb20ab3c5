"""Grafana's dashboards: whole, readable, and each expression finds what the code exports."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import programs
from cluster.fixtures import or_skip
from telemetry import known

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "charts/paceline"
FILES = sorted((CHART / "dashboards").glob("*.json"))
RULES = CHART / "rules/paceline.yaml"
STEP_S, STEPS = 30, 40
NAMES = {"$namespace": "team", "$job": "first", "$worker": ".*"}
VARIABLES = NAMES | {"$__rate_interval": "2m", "$__range": "10m"}
GROUP = re.compile(r"\$1")
"""Of label_replace; no variable of Grafana begins with a digit."""
CONFIG_MAP_BYTES_MAX = 1 << 20
pytestmark = pytest.mark.processes
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def panels(file: Path) -> list[dict[str, Any]]:
    found = json.loads(file.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def filled(expression: str, own: Mapping[str, str]) -> str:
    """As of one moment, at which `@ end()` says nothing; the engine of rules does not know it."""
    expression = expression.replace(" @ end()", "")
    for variable, value in (VARIABLES | own).items():
        expression = expression.replace(variable, value)
    assert "$" not in GROUP.sub("", expression), expression
    return expression


def expressions(file: Path) -> dict[str, str]:
    """By where it stands."""
    own = {"$worker": "0.0"} if file.stem == "paceline-rank" else {}
    found = {
        f"{panel['title']} ({target['legendFormat']})": filled(target["expr"], own)
        for panel in panels(file)
        for target in panel["targets"]
    }
    for variable in json.loads(file.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
            assert asked is not None, variable["definition"]
            found[f"variable {variable['name']}"] = (
                f"count by ({asked[2]}) ({filled(asked[1], own)})"
            )
    for mark in json.loads(file.read_text())["annotations"]["list"]:
        found[f"mark {mark['name']}"] = filled(mark["expr"], own)
    return found


def helm(*options: str) -> list[dict[str, Any]]:
    with or_skip():
        program = programs.require("helm")
    words = [str(program), "template", "x", str(CHART), "-n", "sys", *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def test_all_are_there() -> None:
    assert [file.stem for file in FILES] == ["paceline-cluster", "paceline-job", "paceline-rank"]


@each_file
def test_every_panel_can_be_read(file: Path) -> None:
    titles = [panel["title"] for panel in panels(file)]
    assert len(set(titles)) == len(titles)
    for panel in panels(file):
        assert panel["title"][0].isupper(), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert 15 < len(panel["description"]) < 300, panel["title"]
        assert panel["targets"], panel["title"]


@each_file
def test_panels_lie_beside_each_other(file: Path) -> None:
    taken: set[tuple[int, int]] = set()
    found = json.loads(file.read_text())["panels"]
    assert len({panel["id"] for panel in found}) == len(found)
    for panel in found:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {(grid["x"] + x, grid["y"] + y) for x in range(grid["w"]) for y in range(grid["h"])}
        assert not taken & cells, panel["title"]
        taken |= cells


@each_file
def test_the_source_of_data_can_be_chosen(file: Path) -> None:
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
def test_expressions_name_what_is_exported(file: Path) -> None:
    asked = expressions(file)
    answer = known.ask(expressions=[*asked.values()])
    assert answer["faults"] == []
    for where, uses in zip(asked, answer["uses"], strict=True):
        assert known.misused(uses, {}) == [], where


@each_file
def test_no_panel_is_empty_where_everything_happens(file: Path) -> None:
    """Labels that do not match would leave it so, though all names are right."""
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


def test_what_a_worker_exports_is_used() -> None:
    """A new metric has a panel or a rule, or its reason here."""
    apart = {
        "paceline_rank_index",  # changes with each generation and means nothing over time
        "paceline_weight_copies_total",  # their seconds are drawn
        "paceline_shadow_late_gradients_total",  # `paceline run` reports it with what is saved
        "paceline_coordinator_connections_total",  # whether there is one is drawn
    }
    drawn = "".join(text for file in FILES for text in expressions(file).values())
    drawn += RULES.read_text()
    exported = {re.sub("_(bucket|sum|count)$", "", name) for name in known.of_ranks()}
    assert {name for name in exported if name not in drawn} == apart


def test_the_chart_brings_them_as_they_are() -> None:
    off = {found["kind"] for found in helm()}
    assert not off & {"ConfigMap", "PrometheusRule"}
    options = "metrics.dashboards.enabled=true,metrics.dashboards.annotations.grafana_folder=ML"
    maps = [found for found in helm(f"--set={options}") if found["kind"] == "ConfigMap"]
    assert len(maps) == len(FILES)
    for found, file in zip(maps, FILES, strict=True):
        assert found["data"] == {file.name: file.read_text()}
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert found["metadata"]["annotations"] == {"grafana_folder": "ML"}
        assert len(json.dumps(found)) < CONFIG_MAP_BYTES_MAX


def test_the_chart_brings_the_rules_as_they_are() -> None:
    options = "--set=metrics.rules.enabled=true,metrics.rules.labels.prometheus=main"
    (rule,) = (found for found in helm(options) if found["kind"] == "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(RULES.read_text())
    assert rule["metadata"]["labels"]["prometheus"] == "main"
