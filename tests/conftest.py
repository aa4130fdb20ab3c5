"""Configuration of the whole test run: its layers, the order of the tests, and skips.

A stage is a folder of tests/. The layers are marks: `make test-fast` runs what has no mark
`processes` or `long`, `make test` everything without the mark `exhaustive`, `make test-all`
everything (docs/testing.md).

Tests without processes run first, so that a wrong decision does not first show up as a hanging
process. The others follow, the longest first, so that no long test is left alone at the end
(tests/durations.json, written by `make durations`).

In a parallel run (`pytest --numprocesses`) the tests on a Kubernetes API server are one lane, and
those on real nodes another: each shares its cluster and mostly waits. The other lanes take the
rest, test by test, or file by file where a file has a fixture of scope "module". While the programs
of the test cluster are still being built (scripts/run_tests.py), tests with the mark
`cluster_programs` wait.

Under CI=true a skip is a failure, since it would mean that CI has lost a prerequisite without
anybody noticing. Exempt is only what a CI machine need not have: a GPU, a user other than root, the
right to mount, packages with which a script of the table is tried.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Generator
from functools import cache
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
        "scripts",
        "system",
    ),
    *("cluster", "operator/real", "nodes"),
)
KUBERNETES = ("cluster", "operator/real", "nodes")
ON_NODES = ("tests/nodes/", "tests/cluster/test_nodes.py", "tests/cluster/test_image_build.py")
"""What the ids of tests on real nodes begin with."""
READ_ALL_SOURCES = (
    *("test_tidy.py", "test_promises.py", "test_prose.py", "test_rooms.py"),
    *("test_entry_points.py", "test_reference.py"),
)
"""Files whose tests parse the whole repository. They run in one lane, so it is parsed once."""
SHARED_BY_A_FILE = 'scope="module"'
"""Text in the source of a file that has a fixture shared by all its tests."""
DURATIONS = HERE / "durations.json"
"""Seconds of each slow test, used for ordering only. A test that is missing counts as quick."""
ENV_BUILD_LOCK = "PACELINE_TEST_BUILD_LOCK"
"""Environment variable with the file that scripts/run_tests.py locks while it builds the cluster.
"""
MAY_SKIP = (
    "GPU",
    "root may write everywhere",
    "no right to mount",
    "no dependency of the tests",
)

# The smoke tests of the benchmarks start dozens of processes; `make bench-smoke` runs them.
collect_ignore = [] if os.environ.get("PACELINE_BENCHMARKS") == "1" else ["benchmarks"]
pytest_plugins = ["testing.cluster.fixtures", "testing.left_plugin"]

# Each run uses the same examples. A soak searches for new ones and prints its seed.
settings.register_profile(
    "paceline", derandomize=not os.environ.get("PACELINE_SOAK"), deadline=None
)
settings.load_profile("paceline")

ENV_WRITE_DURATIONS = "PACELINE_TEST_WRITE_DURATIONS"
SLOW_S = 2.0

_seconds: defaultdict[str, float] = defaultdict(float)
_tests: Counter[str] = Counter()
_seconds_of: defaultdict[str, float] = defaultdict(float)


def stage_of(path: Path) -> str:
    parts = path.relative_to(HERE).parts
    if parts[:2] == ("operator", "real"):
        return "operator/real"
    return parts[0] if len(parts) > 1 else ROOT_STAGE


def _seconds_before() -> dict[str, float]:
    durations: dict[str, float] = json.loads(DURATIONS.read_text()) if DURATIONS.is_file() else {}
    return durations


def pytest_configure() -> None:
    """Stop ignoring SIGINT, which a shell ignores in background jobs.

    All processes of the tests would inherit that, and no test could interrupt them.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    durations = _seconds_before()
    longest: defaultdict[Path, float] = defaultdict(float)
    for item in items:
        if stage_of(item.path) in KUBERNETES:
            item.add_marker(pytest.mark.cluster_programs)
        longest[item.path] = max(longest[item.path], durations.get(item.nodeid, 0.0))

    def place(item: pytest.Item) -> tuple[bool, bool, float, int]:
        stage = stage_of(item.path)
        waits = item.get_closest_marker("cluster_programs") is not None
        processes = item.get_closest_marker("processes") is not None or waits
        if stage in KUBERNETES:  # one lane: tests of a file share what the file starts
            return True, True, 0.0, STAGES.index(stage)
        order = STAGES.index(stage) if stage in STAGES else len(STAGES)
        seconds = durations.get(item.nodeid, 0.0)
        if shares_a_fixture(item.path):
            seconds = longest[item.path]
        return waits, processes, -seconds if processes else 0.0, order

    items.sort(key=place)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: stage_of(item.path) not in KUBERNETES)


class Imported:
    """Keep the collector of garbage from visiting what lasts until the end, test after test.

    A worker holds a million such objects: the tests, and the modules that they have imported.
    """

    MODULES = 150
    """Modules imported since the last time from which on it is worth the time."""

    def __init__(self) -> None:
        self._modules = 0

    def keep(self) -> None:
        """Take all present objects out of the collector's sight."""
        gc.collect()
        gc.freeze()
        self._modules = len(sys.modules)

    def look(self) -> None:
        """Do so if many modules were imported."""
        if len(sys.modules) - self._modules >= self.MODULES:
            self.keep()


IMPORTED = Imported()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    IMPORTED.keep()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    IMPORTED.look()


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """Collect once; pytest itself does it twice again, and need not visit the same objects."""
    IMPORTED.keep()
    atexit.register(gc.unfreeze)  # some libraries report what is left at the interpreter's end


@cache
def shares_a_fixture(path: Path) -> bool:
    return SHARED_BY_A_FILE in path.read_text()


class Lanes(LoadScopeScheduling):
    """Distributes tests to lanes one by one, except those that share something.

    Tests that share a cluster, the parsed repository or a fixture of their file stay together.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = HERE.parent / nodeid.partition("::")[0]
        if stage_of(path) in KUBERNETES:
            return "nodes" if nodeid.startswith(ON_NODES) else "kubernetes"
        if path.name in READ_ALL_SOURCES:
            return "sources"
        return str(path) if shares_a_fixture(path) else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Lanes:
    config.option.loadscopereorder = False
    return Lanes(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Wait for the build before the test starts, so that its time limit does not count it."""
    if item.get_closest_marker("cluster_programs") and (lock := os.environ.get(ENV_BUILD_LOCK)):
        with Path(lock).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        _refuse_skip(report)
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    stage = stage_of(HERE.parent / report.fspath)
    _seconds[stage] += report.duration
    _seconds_of[report.nodeid] += report.duration
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
    if os.environ.get(ENV_WRITE_DURATIONS):
        now = {name: round(s, 1) for name, s in _seconds_of.items() if s >= SLOW_S}
        DURATIONS.write_text(json.dumps(dict(sorted(now.items())), indent=0) + "\n")
    terminalreporter.section("time of each stage", sep="-")
    for stage in sorted(_seconds, key=lambda s: STAGES.index(s) if s in STAGES else len(STAGES)):
        terminalreporter.write_line(f"{stage:<13} {_tests[stage]:5} tests {_seconds[stage]:8.1f} s")
