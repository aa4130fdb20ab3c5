"""Constructors of the two back ends of `Jobs`: this machine and a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.jobs.errors import MissingExtraError
from paceline.jobs.local import LocalJobs

if TYPE_CHECKING:
    from paceline.jobs.cluster.jobs import ClusterJobs


def local(folder: Path) -> LocalJobs:
    """Return the back end for this machine.

    Args:
        folder: Folder that contains `runs/`, in which new runs are created.

    Returns:
        The jobs of this user on this machine.
    """
    return LocalJobs(folder=folder)


def cluster(
    kubeconfig: Path | None = None,
    context: str | None = None,
    namespace: str | None = None,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> ClusterJobs:
    """Return the back end for a cluster, which is chosen as kubectl chooses it.

    It reads the kubeconfig and sends no request. An unusable kubeconfig raises AccessError.

    Args:
        kubeconfig: Path of the kubeconfig; None takes KUBECONFIG, else ~/.kube/config, else the
            service account of this pod.
        context: Context in the kubeconfig; None takes the current one.
        namespace: Namespace of the jobs; None takes that of the context.
        say: Called with a message when the API server is away while a job is watched, and when it
            is back. Any thread of the back end may call it.

    Returns:
        The jobs of one namespace.

    Raises:
        MissingExtraError: The package `kubernetes` is not installed.
        ModuleNotFoundError: Another package is missing, which is an installation error.
    """
    try:
        from paceline_api.access.access import access

        from paceline.jobs.cluster.jobs import ClusterJobs
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("kubernetes", "urllib3"):
            raise
        raise MissingExtraError(
            "speaking to a cluster needs the package kubernetes, which is not installed",
            hint="pip install 'paceline[kubernetes]'",
        ) from None
    return ClusterJobs(access(kubeconfig, context), namespace, say=say)
