"""The samples in examples/autoscaling use a metric that falls as workers are added."""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from testing.cluster import prometheus
from testing.cluster.fixtures import or_skip

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "examples/autoscaling"
RULES = ROOT / "charts/paceline/rules/paceline.yaml"
HPA = yaml.safe_load((SAMPLES / "hpa.yaml").read_text())["spec"]
KEDA = yaml.safe_load((SAMPLES / "keda.yaml").read_text())["spec"]
TRIGGER = KEDA["triggers"][0]
EXTERNAL = HPA["metrics"][0]["external"]
(RULE,) = yaml.safe_load((SAMPLES / "prometheus-adapter.yaml").read_text())["externalRules"]
PER_WORKER = 250
"""Samples per second of one worker."""


def of_adapter() -> str:
    """Return the query that prometheus-adapter builds from its rule for this autoscaler."""
    labels = {"namespace": "default", **EXTERNAL["metric"]["selector"]["matchLabels"]}
    matchers = ",".join(f'{name}="{value}"' for name, value in labels.items())
    series = re.match(r"[\w:]+", RULE["seriesQuery"])
    assert series
    query: str = RULE["metricsQuery"]
    return query.replace("<<.Series>>", series[0]).replace("<<.LabelMatchers>>", matchers)


QUERIES = {"hpa": of_adapter(), "keda": TRIGGER["metadata"]["query"]}


def seconds(query: str, tmp_path: Path, *, workers: int, per_worker: float = PER_WORKER) -> Any:
    """Return the answer of Prometheus after ten minutes of a job, or None if it is empty."""
    target = 'namespace="default",paceline_dev_job_name="digits"'
    other = 'namespace="default",paceline_dev_job_name="other"'
    series = [
        {
            "series": f'paceline_samples_total{{{of},worker="{slot}.0",kind="fresh"}}',
            "values": f"0+{30 * per_worker}x40",
        }
        for of, count in ((target, workers), (other, 7))
        for slot in range(count)
    ]
    asked = {"expr": query, "eval_time": "15m", "exp_samples": []}
    case = {"interval": "30s", "input_series": series, "promql_expr_test": [asked]}
    file = tmp_path / "case.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": [case]}))
    with or_skip():
        program = prometheus.require("promtool")
    done = subprocess.run(
        [program, "test", "rules", str(file)], capture_output=True, text=True, timeout=60
    )
    if done.returncode == 0:
        return None
    # The test expects no samples, so promtool prints those it found: labels and a number.
    (value,) = re.findall(r"got:.*? ([\d.]+(?:[Ee][+-]\d+)?)\s", done.stdout + done.stderr)
    return float(value)


@pytest.mark.cluster_programs
@pytest.mark.processes
@pytest.mark.parametrize("name", QUERIES)
def test_the_metric_is_inversely_proportional_to_the_workers(name: str, tmp_path: Path) -> None:
    query = QUERIES[name]
    for workers in (1, 2, 4, 8):
        value = seconds(query, tmp_path, workers=workers)
        assert value == pytest.approx(1000 / (PER_WORKER * workers), rel=0.01)
    assert seconds(query, tmp_path, workers=2, per_worker=0) is None, "it does not progress"
    assert seconds(query, tmp_path, workers=0) is None, "there is no such job"


def desired(workers: int, figure: float, target: float) -> int:
    """Return what an autoscaler computes for a target of type Value, with its tolerance."""
    ratio = figure / target
    return workers if abs(ratio - 1) <= 0.1 else math.ceil(ratio * workers)


@pytest.mark.parametrize("per_worker", [100, 250, 333, 1000, 5000])
def test_the_autoscaler_settles_at_the_fewest_workers_that_are_fast_enough(
    per_worker: float,
) -> None:
    target = quantity(EXTERNAL["target"]["value"])
    workers = 2
    for _ in range(3):
        workers = desired(workers, 1000 / (per_worker * workers), target)
    wanted = 1000 / target
    assert workers * per_worker >= 0.9 * wanted
    assert workers == desired(workers, 1000 / (per_worker * workers), target)
    assert (workers - 1) * per_worker <= wanted


def quantity(text: str) -> float:
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def test_the_hpa_and_keda_samples_agree() -> None:
    assert HPA["scaleTargetRef"] == KEDA["scaleTargetRef"]
    assert (HPA["minReplicas"], HPA["maxReplicas"]) == (
        *(KEDA["minReplicaCount"], KEDA["maxReplicaCount"]),
    )
    assert quantity(EXTERNAL["target"]["value"]) == float(TRIGGER["metadata"]["threshold"])
    assert EXTERNAL["target"]["type"] == TRIGGER["metricType"] == "Value"
    assert HPA["behavior"] == KEDA["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert RULE["name"]["as"] == EXTERNAL["metric"]["name"]
    assert TRIGGER["metadata"]["ignoreNullValues"] == "false"
    for query in QUERIES.values():
        for record in re.findall(r"job:\w+:\w+", query):
            assert f"record: {record}" in RULES.read_text()
