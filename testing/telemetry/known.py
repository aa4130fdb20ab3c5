"""All series of Paceline with their labels, from the code that exports them.

`ask` sends a question to Prometheus's own parser and rules. The labels of the target come from the
scrape: the PodMonitor turns the pod's label paceline.dev/job-name into `paceline_dev_job_name`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from paceline.telemetry.catalog import CATALOG, LABELS
from paceline_operator.metrics import OperatorMetrics
from prometheus_client.metrics_core import Metric as Family

from testing.cluster import programs
from testing.cluster.fixtures import or_skip

JOB = "paceline_dev_job_name"
WORKER = ("0.0", "1.0")
OF_OPERATOR = {
    "controller": ("trainingjob",),
    "name": ("trainingjob",),
    "result": ("success", "error"),
    "method": ("GET", "WATCH"),
    "code": ("200", "500"),
    "kind": ("pods", "trainingjobs"),
    "cause": ("ended",),
    "state": ("Training", "QuotaExceeded"),
    "reason": ("length", "share"),
}
HERE = {
    "namespace": "team",
    JOB: "first",
    "pod": "first-0-1",
    "node": "node-a",
    "job": "team/workers",
}
OPERATOR = {"namespace": "sys", "pod": "operator-0", "job": "operator", "instance": "b:8080"}
FOREIGN = {"container_memory_working_set_bytes": {"container": ("trainer",)}}
"""Series of the kubelet, which any Prometheus of a cluster scrapes."""
GROWING = {
    "paceline_figure_number",
    "paceline_figure_weight_number",
    "paceline_incarnation_number",
}
"""Gauges whose increase is drawn."""
OF_RULES = {
    "ALERTS": {
        "alertname": ("PacelineStraggler",),
        "alertstate": ("firing",),
        "severity": ("warning",),
        "worker": WORKER,
    },
    "job:paceline_active_ranks:max": {},
}
"""Series that Prometheus derives from the rules, as far as dashboards query them."""


@dataclass(frozen=True)
class Series:
    """One series: its type, its labels and the labels of its target."""

    kind: str
    labels: Mapping[str, tuple[str, ...]]
    """Labels of the series itself, with the values that each may have."""
    target: Mapping[str, str]

    def names(self) -> set[str]:
        """Return the names of all labels."""
        return {*self.labels, *self.target}


def of_ranks() -> dict[str, Series]:
    """Return the series of worker pods: of their ranks and agents."""
    target = HERE | {"instance": "a:9464"}
    series: dict[str, Series] = {}
    for metric in CATALOG:
        own: dict[str, tuple[str, ...]] = {} if metric.once else {"worker": WORKER}
        own |= {name: LABELS[name] for name in metric.labels}
        series |= _samples(metric.name, metric.kind, own, metric.buckets, target)
    return series


def of_operator() -> dict[str, Series]:
    """Return the series of the operator."""
    series: dict[str, Series] = {}
    for metric in OperatorMetrics().registry._collector_to_names:
        family: Family = next(iter(metric.collect()))
        own = {name: OF_OPERATOR[name] for name in getattr(metric, "_labelnames", ())}
        bounds = [b for b in getattr(metric, "_upper_bounds", ()) if b != float("inf")]
        name = f"{family.name}_total" if family.type == "counter" else family.name
        series |= _samples(name, family.type, own, bounds, OPERATOR)
    return series


def of_others() -> dict[str, Series]:
    """Return the series of the kubelet and of Prometheus's rules."""
    return {name: Series("gauge", own, HERE) for name, own in (FOREIGN | OF_RULES).items()}


def _samples(
    name: str,
    kind: str,
    own: Mapping[str, tuple[str, ...]],
    bounds: Sequence[float],
    target: Mapping[str, str],
) -> dict[str, Series]:
    if kind != "histogram":
        return {name: Series(kind, own, target)}
    bucket = {**own, "le": (*map(str, bounds), "+Inf")}
    parts = {"_bucket": bucket, "_sum": own, "_count": own}
    return {f"{name}{end}": Series("counter", labels, target) for end, labels in parts.items()}


def known() -> dict[str, Series]:
    """Return all series that dashboards and alerts may use."""
    return of_ranks() | of_operator() | of_others()


def lines(steps: int) -> Iterator[str]:
    """Yield all series with all label values, for PromQL's unit tests; none is stale."""
    for name, series in known().items():
        if ":" in name:
            continue  # the rules produce this series
        for values in product(*series.labels.values()):
            labels = dict(series.target) | dict(zip(series.labels, values, strict=True))
            text = ",".join(f'{label}="{value}"' for label, value in labels.items())
            grows = series.kind == "counter" or name in GROWING
            yield f"  {name}{{{text}}} {'0+3' if grows else '1+0'}x{steps}"


def ask(**question: Any) -> dict[str, Any]:
    """Send a question to the rules program; skip the test if it is not built."""
    with or_skip():
        program = programs.require("prometheus-rules")
    done = subprocess.run(
        [program], input=json.dumps(question), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def misused(uses: Sequence[Mapping[str, str]], recorded: Mapping[str, set[str]]) -> list[str]:
    """Return the names, labels and label values of an expression that nothing exports."""
    series, wrong = known(), []
    for use in uses:
        name, label, value = use["metric"], use["label"], use["value"]
        if name in recorded:
            if label and label not in recorded[name]:
                wrong.append(f"{name} has no label {label}")
        elif name not in series:
            wrong.append(f"nobody exports {name}")
        elif label and label not in series[name].names():
            wrong.append(f"{name} has no label {label}")
        elif value and value not in series[name].labels.get(label, (value,)):
            wrong.append(f"{label} of {name} is never {value}")
    return wrong
