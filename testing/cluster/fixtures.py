"""pytest fixtures: a shared API server, a cluster with two real nodes, an image builder.

The top-level conftest loads this module as a plugin. Each session fixture is started once per test
run, when the first test requests it. A missing prerequisite skips the test by name, or is an error
under CI=true. After a run with failures the logs are kept, and the summary prints their folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from testing.cluster import running
from testing.cluster.control_plane import ControlPlane
from testing.cluster.image_build import ImageBuilder
from testing.cluster.nodes import Cluster
from testing.cluster.prerequisites import MissingPrerequisiteError

KEPT = pytest.StashKey[list[str]]()
KEPT_BY_WORKER = "paceline_kept_logs"


@pytest.fixture(scope="session")
def api_server(request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """etcd, API server with an audit log, controller manager and scheduler; no nodes."""
    with (
        or_skip(),
        running.control_plane(audit=True, keep_logs=lambda: _failed(request)) as plane,
    ):
        yield plane
        _remember(request, plane)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A control plane of its own with two real nodes, node1 and node2, and DNS."""
    with (
        or_skip(),
        running.two_nodes(keep_logs=lambda: _failed(request)) as nodes,
    ):
        yield nodes
        _remember(request, nodes.control_plane)


@pytest.fixture(scope="session")
def image_builder() -> Iterator[ImageBuilder]:
    """A builder of images from Dockerfiles; its archives are deleted at the end of the run."""
    with or_skip(), running.image_builder() as builder:
        yield builder


@pytest.fixture
def namespace(api_server: ControlPlane) -> Iterator[str]:
    """A new namespace for this test."""
    with api_server.namespace() as name:
        yield name


@pytest.fixture
def cluster_namespace(cluster: Cluster) -> Iterator[str]:
    """A new namespace for this test on the cluster with real nodes."""
    with cluster.control_plane.namespace() as name:
        yield name


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the folders of kept logs from an xdist worker to the process with the summary."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[KEPT_BY_WORKER] = session.config.stash.get(KEPT, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collect the folders of kept logs that an xdist worker sent."""
    output = getattr(node, "workeroutput", {})  # a worker that crashed sent nothing
    node.config.stash.setdefault(KEPT, []).extend(output.get(KEPT_BY_WORKER, []))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print where the logs of test clusters were kept."""
    for folder in config.stash.get(KEPT, []):
        terminalreporter.write_line(f"logs of a test cluster: {folder}")


def _failed(request: pytest.FixtureRequest) -> bool:
    return request.session.testsfailed > 0


def _remember(request: pytest.FixtureRequest, plane: ControlPlane) -> None:
    if _failed(request):
        kept = request.config.stash.setdefault(KEPT, [])
        kept.append(str(plane.folder / "logs"))


@contextmanager
def or_skip() -> Iterator[None]:
    """Skip the test if a prerequisite is missing; under CI=true let the error through."""
    try:
        yield
    except MissingPrerequisiteError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
