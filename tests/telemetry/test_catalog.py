"""The catalog of metrics is well formed and bounded, and docs/reference is generated from it."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.telemetry.catalog import CATALOG, LABELS, MetricKind, Writer

from scripts.metrics_reference import markdown

UNITS = ("_seconds", "_ratio", "_rounds", "_ranks", "_bytes", "_number", "_index", "_info")
SERIES_MAX = 300
ROOT = Path(__file__).parents[2]


def test_metric_names_have_a_prefix_and_a_unit() -> None:
    for metric in CATALOG:
        name = metric.name
        assert re.fullmatch(r"paceline_[a-z_]+", name), name
        assert name.endswith("_total") == (metric.kind is MetricKind.COUNTER), name
        assert metric.kind is MetricKind.COUNTER or name.endswith(UNITS), f"{name}: unit missing"
    assert len({metric.name for metric in CATALOG}) == len(CATALOG)


def test_labels_are_bounded_and_explained() -> None:
    for metric in CATALOG:
        assert set(metric.labels) <= LABELS.keys(), metric.name
        assert metric.help.endswith("."), metric.name
        assert "\n" not in metric.help, metric.name
    assert {label for metric in CATALOG for label in metric.labels} == LABELS.keys()


def test_histogram_buckets_are_ascending_and_few() -> None:
    for metric in CATALOG:
        assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name
        assert len(metric.buckets) <= 10, metric.name


def test_one_worker_stays_below_the_limit_of_series() -> None:
    """Count the series that one rank can touch.

    Usually a rank uses one mode and every trigger. Two modes (a change while running) and one
    transport with all algorithms are counted here.
    """
    assumed = {"figure": 4, "mode": 2, "transport": 1, "size_class": 5, "state": 1}
    assumed |= {"wire": 1, "bits": 1, "entry": 2, "refusal": 2}
    series = 0
    for metric in CATALOG:
        children = 1
        for label in metric.labels:
            children *= assumed.get(label, len(LABELS[label]))
        series += children * (len(metric.buckets) + 3 if metric.buckets else 1)
    assert series < SERIES_MAX, series


def test_the_metrics_reference_is_up_to_date() -> None:
    path = ROOT / "docs" / "reference" / "metrics.md"
    assert path.read_text() == markdown(), "run: make generate"


def test_every_metric_has_a_known_writer() -> None:
    assert {metric.writer for metric in CATALOG} == set(Writer)
