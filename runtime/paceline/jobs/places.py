"""The two places where jobs are, each as its back end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.jobs.errors import MissingExtraError
from paceline.jobs.local import LocalJobs

if TYPE_CHECKING:
    from paceline.jobs.cluster.jobs import ClusterJobs


def local(folder: Path) -> LocalJobs:
    """This machine; `folder`: where `runs/` is."""
    return LocalJobs(folder=folder)


def cluster(
    kubeconfig: Path | None = None,
    context: str | None = None,
    namespace: str | None = None,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> ClusterJobs:
    """The cluster of a kubeconfig; None for what kubectl would take. `say`: as in ClusterJobs.
    Raises AccessError, MissingExtraError."""
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
