"""Shell completion of names; it prints no errors, because the user has not run a command yet."""

from __future__ import annotations

import typer
from paceline_api.errors import PacelineError

from paceline.cli.choice import Where, cluster
from paceline.jobs.local import LocalJobs


def complete_job(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the jobs on this machine and in the cluster that begin with `incomplete`.

    The cluster is that of the options, else that of the kubeconfig. With an option for a cluster,
    jobs on this machine are left out.

    Args:
        ctx: The command line so far.
        incomplete: Beginning of the name.

    Returns:
        Names; empty if nothing can be asked.
    """
    given = ctx.params
    where = Where(given.get("namespace"), given.get("context"), given.get("kubeconfig"))
    names: list[str] = []
    try:
        names += [] if where.given else [job.name for job in LocalJobs().all()]
        names += [job.name for job in cluster(where).all()]
    except PacelineError:
        pass  # no cluster is configured, or it cannot be reached
    return [name for name in names if name.startswith(incomplete)]


def complete_context(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the contexts of the kubeconfig that begin with `incomplete`."""
    try:
        from paceline_api.access.login import contexts

        names = contexts(ctx.params.get("kubeconfig"))
    except (ModuleNotFoundError, PacelineError):
        return []
    return [name for name in names if name.startswith(incomplete)]
