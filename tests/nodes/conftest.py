"""Fixtures for tests on real nodes: one cluster with Paceline, and one namespace per test.

When a test fails, the report shows the operator's log and everything about the test's jobs.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from testing.cluster.image_build import ImageBuilder
from testing.cluster.nodes import Cluster
from tests.nodes.jobs import Job, NewJob
from tests.nodes.platform import Platform


@pytest.fixture(scope="session")
def platform(cluster: Cluster, image_builder: ImageBuilder) -> Platform:
    platform = Platform(cluster)
    platform.load_images(image_builder)
    platform.install()
    return platform


@pytest.fixture
def jobs() -> list[Job]:
    """Return the jobs that the test has created, for the failure report."""
    return []


@pytest.fixture
def new_job(platform: Platform, cluster_namespace: str, jobs: list[Job]) -> Iterator[NewJob]:
    folders: list[Path] = []

    def make(name: str = "job") -> Job:
        folder = Path(tempfile.mkdtemp(prefix="paceline-job-"))
        folder.chmod(0o755)
        folders.append(folder)
        job = Job(platform, cluster_namespace, name, folder)
        jobs.append(job)
        return job

    yield make
    for job in jobs:
        job.watcher.stop()
        job.api.delete(job.path)
    for folder in folders:
        shutil.rmtree(folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    values = getattr(item, "funcargs", {})
    if report.when == "call" and report.failed and "platform" in values:
        platform: Platform = values["platform"]
        for job in values.get("jobs", ()):
            report.sections.append((f"job {job.name}", _text_of(job.story)))
        report.sections.append(("operator", _text_of(platform.operator_logs)[-20000:]))
    return report


def _text_of(tell: Callable[[], str]) -> str:
    """Return the text, or why it cannot be read: a broken cluster must not end the session."""
    try:
        return tell()
    except Exception as error:
        return f"could not be read: {error}"
