"""charts/paceline/dashboards/*.json: the dashboards in the chart, one file each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from scripts.cluster_panels import JOBS, OPERATOR
from scripts.grafana import JOB, MARK_S, Dashboard, Mark, Variable, text
from scripts.job_panels import OF_JOB, UPPER, J
from scripts.job_upkeep_panels import LOWER
from scripts.rank_panels import RANK

CLUSTER_DASHBOARD: Final = Dashboard(
    "paceline-cluster",
    "Paceline cluster",
    "All TrainingJobs side by side, and the operator that looks after them.",
    (
        Variable(
            "namespace",
            "Namespace",
            "label_values(paceline_committed_rounds, namespace)",
            several=True,
        ),
    ),
    (JOBS, OPERATOR),
)

AGO: Final = f"offset {MARK_S}s"


def _grown(counter: str, by: str) -> str:
    """Return a query for the moments at which a counter grows.

    A counter that appears for the first time counts as well, if the job existed before.

    Returns:
        A PromQL expression.
    """
    now, then = (f"max by ({by}) ({counter}{J}{when})" for when in ("", f" {AGO}"))
    new = f"({now} unless {then}) and on () max(paceline_committed_rounds{J} {AGO})"
    return f"({now} > {then}) or ({new})"


MARKS: Final = (
    Mark("Ranks join", _grown("paceline_joined_total", ""), "joined", "green"),
    Mark("Ranks are lost or leave", _grown("paceline_left_total", "why"), "left: {{why}}", "red"),
    Mark(
        "Coordinator replaced",
        f"max(paceline_incarnation_number{J}) > max(paceline_incarnation_number{J} {AGO})",
        "coordinator replaced",
        "purple",
    ),
    Mark(
        "Alerts",
        f'max by (alertname, worker) (ALERTS{{alertstate="firing", {OF_JOB}}})',
        "{{alertname}} {{worker}}",
        "orange",
    ),
)
OF_ONE_JOB: Final = (
    Variable("namespace", "Namespace", "label_values(paceline_committed_rounds, namespace)"),
    Variable(
        "job",
        "Job",
        f'label_values(paceline_committed_rounds{{namespace="$namespace"}}, {JOB})',
    ),
)

JOB_DASHBOARD: Final = Dashboard(
    "paceline-job",
    "Paceline job",
    "One TrainingJob: is it making progress, where does its time go, who is waited for.",
    (
        *OF_ONE_JOB,
        Variable(
            "worker", "Worker", f"label_values(paceline_committed_rounds{J}, worker)", several=True
        ),
    ),
    UPPER + LOWER,
    MARKS,
)

RANK_DASHBOARD: Final = Dashboard(
    "paceline-rank",
    "Paceline rank",
    "One worker of a TrainingJob against the others.",
    (
        *OF_ONE_JOB,
        Variable("worker", "Worker", f"label_values(paceline_committed_rounds{J}, worker)"),
    ),
    RANK,
    MARKS,
)


def dashboards() -> dict[str, Callable[[], str]]:
    """Return the generator of each dashboard by its path in the repository."""
    return {
        f"charts/paceline/dashboards/{each.uid}.json": partial(text, each)
        for each in (CLUSTER_DASHBOARD, JOB_DASHBOARD, RANK_DASHBOARD)
    }
