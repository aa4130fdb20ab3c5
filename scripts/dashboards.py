"""charts/paceline/dashboards/*.json: the dashboards that the chart brings, one file each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from scripts.cluster_panels import JOBS, OPERATOR
from scripts.grafana import JOB, Dashboard, Variable, text
from scripts.job_panels import UPPER, J
from scripts.job_upkeep_panels import LOWER

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

JOB_DASHBOARD: Final = Dashboard(
    "paceline-job",
    "Paceline job",
    "One TrainingJob: is it making progress, where does its time go, who is waited for.",
    (
        Variable("namespace", "Namespace", "label_values(paceline_committed_rounds, namespace)"),
        Variable(
            "job",
            "Job",
            f'label_values(paceline_committed_rounds{{namespace="$namespace"}}, {JOB})',
        ),
        Variable(
            "worker", "Worker", f"label_values(paceline_committed_rounds{J}, worker)", several=True
        ),
    ),
    UPPER + LOWER,
)


def dashboards() -> dict[str, Callable[[], str]]:
    """Files below the repository's root, each with what generates it."""
    return {
        f"charts/paceline/dashboards/{each.uid}.json": partial(text, each)
        for each in (CLUSTER_DASHBOARD, JOB_DASHBOARD)
    }
