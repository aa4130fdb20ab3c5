"""What a shell offers for a word that is not whole yet. It is silent: nobody has asked anything."""

from __future__ import annotations

import typer
from paceline_api.errors import PacelineError

from paceline.cli.choice import Where, cluster
from paceline.jobs.local import LocalJobs


def complete_job(ctx: typer.Context, incomplete: str) -> list[str]:
    """Jobs of this machine, and those of the cluster that is named, or is the kubeconfig's."""
    given = ctx.params
    where = Where(given.get("namespace"), given.get("context"), given.get("kubeconfig"))
    names: list[str] = []
    try:
        names += [] if where.given else [job.name for job in LocalJobs().all()]
        names += [job.name for job in cluster(where).all()]
    except PacelineError:
        pass  # no cluster, or no way to it
    return [name for name in names if name.startswith(incomplete)]


def complete_context(ctx: typer.Context, incomplete: str) -> list[str]:
    try:
        from paceline_api.access.login import contexts

        names = contexts(ctx.params.get("kubeconfig"))
    except (ModuleNotFoundError, PacelineError):
        return []
    return [name for name in names if name.startswith(incomplete)]
