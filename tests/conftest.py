"""What holds for the whole test run: order and time of its stages, and what a skip means.

A stage is a folder of tests/. Cheap and pure stages come first, so that a broken decision is not
first seen as a hanging process. Side by side (`pytest --numprocesses`) what needs a Kubernetes is
one lane, which shares its clusters and mostly waits; it begins at once, and the other lanes take
the rest in order, test by test. From three lanes on what needs nodes, which is two thirds of it, is
a lane of its own.

Under CI=true a skip is a failure, since it would mean that CI has lost a prerequisite without
anybody seeing it. Only what CI need not be is exempt: a machine with a GPU, a user other than root,
one who may mount.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

HERE = Path(__file__).parent
ROOT_STAGE = "repository"
STAGES = (
    *(ROOT_STAGE, "api", "access", "core", "jobs", "sim", "telemetry", "worker", "train"),
    *(
        "operator",
        "transport",
        "control",
        "agent",
        "coordinator",
        "local",
        "cli",
        "examples",
        "system",
    ),
    *("cluster", "operator/real", "nodes"),
)
KUBERNETES = ("cluster", "operator/real", "nodes")
NODE_FILES = ("test_nodes.py", "test_image_build.py")
"""In tests/cluster, what uses fixtures of tests/nodes and no other ones."""
MAY_SKIP = ("GPU", "root may write everywhere", "no right to mount")

# Smoke sizes of the benchmarks start dozens of processes: `make bench-smoke`.
collect_ignore = [] if os.environ.get("PACELINE_BENCHMARKS") == "1" else ["benchmarks"]
pytest_plugins = ["cluster.fixtures"]

# The same examples in each run: a search for new ones is a soak, which prints its seed.
settings.register_profile(
    "paceline", derandomize=not os.environ.get("PACELINE_SOAK"), deadline=None
)
settings.load_profile("paceline")

_seconds: defaultdict[str, float] = defaultdict(float)
_tests: Counter[str] = Counter()


def stage_of(path: Path) -> str:
    parts = path.relative_to(HERE).parts
    if parts[:2] == ("operator", "real"):
        return "operator/real"
    return parts[0] if len(parts) > 1 else ROOT_STAGE


def _place(item: pytest.Item) -> int:
    stage = stage_of(item.path)
    return STAGES.index(stage) if stage in STAGES else len(STAGES)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=_place)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: stage_of(item.path) not in KUBERNETES)


class Lanes(LoadScopeScheduling):
    """Hands out what shares a cluster as one piece, and all other tests one by one."""

    def _split_scope(self, nodeid: str) -> str:
        path = HERE.parent / nodeid.partition("::")[0]
        stage = stage_of(path)
        if stage not in KUBERNETES:
            return nodeid
        on_nodes = stage == "nodes" or path.name in NODE_FILES
        return "kubernetes on nodes" if on_nodes and self.numnodes >= 3 else "kubernetes"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Lanes:
    config.option.loadscopereorder = False
    return Lanes(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        _refuse_skip(report)
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    stage = stage_of(HERE.parent / report.fspath)
    _seconds[stage] += report.duration
    _tests[stage] += report.when == "call" or (report.when == "setup" and not report.passed)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped:
        _refuse_skip(report)
    return report


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else report.longreprtext
    if os.environ.get("CI") != "true" or any(why in reason for why in MAY_SKIP):
        return
    report.outcome = "failed"
    report.longrepr = f"{reason}\nUnder CI=true a missing prerequisite is an error: install it."


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("time of each stage", sep="-")
    for stage in sorted(_seconds, key=lambda s: STAGES.index(s) if s in STAGES else len(STAGES)):
        terminalreporter.write_line(f"{stage:<13} {_tests[stage]:5} tests {_seconds[stage]:8.1f} s")
