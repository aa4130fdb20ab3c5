"""Every promise of the code has a row in docs/testing, and every row names existing tests.

The layer of a test is read from its source, so that generating the page does not import torch. The
exhaustive test here compares that with what pytest collects.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paceline_api.reasons import Reason

from scripts import layers, promises
from scripts.layers import ORDER, Layer, NoSuchTestError, layer_of
from testing import collected

ROOT = Path(__file__).parent.parent
NOT_HELD = 0
"""Number of promises without a test. It may only shrink: write a test, then lower it."""
COLLECT_S = 1200
"""Bound on one collection. It takes 30 s, and many times that on a busy machine."""
UNKNOWN = "R" + "99"
"""A rule that does not exist, built so that the check of citations does not find it here."""


@pytest.mark.long
def test_every_promise_has_a_row_and_every_row_has_existing_tests() -> None:
    problems = "\n  ".join(promises.problems())
    assert not problems, f"docs/testing/promises.yaml:\n  {problems}"


def test_the_number_of_untested_promises_matches_the_recorded_one() -> None:
    left = promises.not_held()
    assert len(left) == NOT_HELD, f"write the tests, or lower NOT_HELD: {left}"


def test_every_kind_of_promise_is_found_in_the_code() -> None:
    """A table whose format changed would otherwise require no rows."""
    declared = {section.key: section.declared() for section in promises.SECTIONS}
    assert {"I1", "I18"} <= declared["promises"].keys()
    assert {"R1", "R45", "R54"} <= declared["rules"].keys()
    assert {"slow", "coordinator-kill"} <= declared["injected faults"].keys()
    assert {"kill", "batch dropped in backward"} <= declared["faults of histories"].keys()
    assert "One file holds two jobs." in declared["mistakes"]
    assert "collective.buffers.policy" in declared["fields of a TrainingJob"]
    assert "pod.env.valueFrom" in declared["fields of a FabricProfile"]
    assert {"run", "version"} <= declared["commands"].keys()
    assert "paceline_steps_total" in declared["metrics of a worker"]
    assert "paceline_rounds_committed_total" in declared["metrics of the coordinator"]
    assert "paceline_operator_watch_events_total" in declared["metrics of the operator"]
    for key, texts in declared.items():
        assert all(texts.values()), (
            f"{key}: nothing is said of {[n for n, s in texts.items() if not s]}"
        )


@pytest.mark.long
def test_missing_and_unknown_rows_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {key: dict(row) for key, row in promises.held().items()}
    del rows["rules"]["R7"]
    rows["commands"]["fly"] = ["tests/test_tidy.py::test_no_todo_markers_or_breakpoints_are_left"]
    rows["rules"]["R8"] = ["tests/core/test_no.py::test_x", "tests/test_tidy.py::test_no_such"]
    rows["poems"] = {}
    monkeypatch.setattr(promises, "held", lambda: rows)
    monkeypatch.setattr(promises, "not_held", lambda: ["rules: R1", f"rules: {UNKNOWN}"])
    problems = promises.problems()
    assert len(problems) == 7, problems
    for part in (
        "poems: there is no such section",
        "rules: R7 is promised and has no row",
        f"rules: {UNKNOWN} has a row and is not promised",
        "rules: R1 has a row; take it out of `not held`",
        "commands: fly has a row and is not promised",
        "there is no file tests/core/test_no.py",
        "has no function test_no_such",
    ):
        assert any(part in problem for problem in problems), (part, problems)
    with pytest.raises(LookupError, match="R7 is promised"):
        promises.markdown()


def test_the_test_of_a_reason_names_the_reason() -> None:
    """A row can therefore not name a test that never sees its reason."""
    wrong = [
        f"{value}: no test of {tests} has the word"
        for value, tests in promises.held()["reasons"].items()
        if not any(
            re.search(rf"\b({'|'.join(words_for(value, test))})\b", source_of(test))
            for test in tests
        )
    ]
    assert not wrong, "\n".join(wrong)


def words_for(value: str, test: str) -> list[str]:
    """Return how the file of a test may write a reason."""
    text = (ROOT / test.partition("::")[0]).read_text()
    constants = re.findall(rf'^(\w+) = "{value}"$', text, re.M)
    (name,) = (reason.name for reason in Reason if reason == value)
    return [value, rf"Reason\.{name}", *constants]


def source_of(test: str) -> str:
    """Return the text of a test function with its decorators."""
    file, _, rest = test.partition("::")
    text = (ROOT / file).read_text()
    name = rest.partition("[")[0]
    node = next(
        n
        for n in ast.walk(layers.tree_of(ROOT / file))
        if isinstance(n, ast.FunctionDef) and n.name == name
    )
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


# ---- layers --------------------------------------------------------------------------------------

HEAD = "import pytest\nfrom layers import exhaustive, exhaustive_except\n"
MODULES = {
    "": ("", Layer.FAST),
    "@pytest.mark.processes": ("", Layer.TEST),
    "@pytest.mark.timeout(3)": ("", Layer.FAST),
    "@pytest.mark.exhaustive": ("", Layer.ALL),
    "@slow": ("slow = pytest.mark.processes", Layer.TEST),
    "# by the module": ("pytestmark = pytest.mark.processes", Layer.TEST),
    "# by a list": ("pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1)]", Layer.ALL),
    "# by programs": ("pytestmark = pytest.mark.cluster_programs", Layer.TEST),
    "@pytest.mark.parametrize('a', [1, 2])": ("", Layer.FAST),
    "@pytest.mark.parametrize('a', [1, exhaustive(2)])": ("", Layer.FAST),
    "@pytest.mark.parametrize('a', [exhaustive(1), exhaustive(2)])": ("", Layer.ALL),
    "@pytest.mark.parametrize('a', A)": (
        "A = [pytest.param(n, marks=pytest.mark.exhaustive) for n in range(3)]",
        Layer.ALL,
    ),
    "@pytest.mark.parametrize('b', [1])\n@pytest.mark.parametrize('a', [exhaustive(1)])": (
        "",
        Layer.ALL,
    ),
    "@pytest.mark.parametrize('a', exhaustive_except([1], [1, 2]))": ("", Layer.FAST),
    "@pytest.mark.parametrize('a', exhaustive_except([], [1, 2]))": ("", Layer.ALL),
}


def layer_in(monkeypatch: pytest.MonkeyPatch, root: Path, text: str, case: str = "") -> Layer:
    (root / "tests").mkdir(exist_ok=True)
    (root / "tests/test_it.py").write_text(text)
    monkeypatch.setattr(layers, "ROOT", root)
    layers._module.cache_clear()
    try:
        return layer_of(f"tests/test_it.py::test_x{case}")
    finally:
        layers._module.cache_clear()


@pytest.mark.parametrize("decorator", MODULES)
def test_the_layer_of_a_test_follows_from_its_marks(
    decorator: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    above, layer = MODULES[decorator]
    text = f"{HEAD}{above}\n{decorator}\ndef test_x(): ...\n"
    assert layer_in(monkeypatch, tmp_path, text) is layer


@pytest.mark.parametrize(
    ("values", "case", "layer"),
    [
        ("['a', exhaustive('b')]", "[a]", Layer.FAST),
        ("['a', exhaustive('b')]", "[b]", Layer.ALL),
        ("[pytest.param(1, id='b', marks=pytest.mark.exhaustive), 2]", "[b]", Layer.ALL),
        ("exhaustive_except(['a'], KNOWN)", "[a]", Layer.FAST),
        ("exhaustive_except(['a'], KNOWN)", "[b]", Layer.ALL),
        ("exhaustive_except(KEPT, KNOWN)", "[b]", Layer.ALL),
    ],
)
def test_a_parameter_may_be_in_another_layer_than_its_test(
    values: str, case: str, layer: Layer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = f"{HEAD}KEPT = ('a',)\n@pytest.mark.parametrize('p', {values})\ndef test_x(p): ...\n"
    assert layer_in(monkeypatch, tmp_path, text, case) is layer


@pytest.mark.parametrize(
    "name",
    [
        "tests/benchmarks/test_heads.py::test_heads_save_messages_at_a_bounded_delay",
        "testing/jobs/conformance.py::the_whole_script",
        "tests/test_tidy.py",
        "tests/test_tidy.py::none_of",
    ],
)
def test_a_test_that_no_layer_runs_is_refused(name: str) -> None:
    with pytest.raises(NoSuchTestError, match=r"no layer runs|write it as"):
        layer_of(name)


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.timeout(COLLECT_S + 60)
def test_pytest_collects_the_named_tests_with_the_stated_layers() -> None:
    """Compare each named test and case with the marks that pytest finds."""
    named = {test for row in promises.held().values() for tests in row.values() for test in tests}
    files = sorted({test.partition("::")[0] for test in named})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "testing.collected", "--collect-only", *files],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
        capture_output=True,
        text=True,
        timeout=COLLECT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = [x for x in done.stdout.splitlines() if x.startswith(collected.PREFIX)]
    marks: dict[str, list[str]] = json.loads(line.removeprefix(collected.PREFIX))
    for test in sorted(named):
        name, _, case = test.rstrip("]").partition("[")
        cases = [of for node, of in marks.items() if is_case(node, name, case)]
        assert cases, f"{test}: pytest collects no such test or case"
        assert layer_of(test) is min(map(layer_of_marks, cases), key=ORDER.index), test


def is_case(node: str, name: str, case: str) -> bool:
    """Return True if `case` is the id of a parameter of the node, or the beginning of its id."""
    function, _, of = node.rstrip("]").partition("[")
    parts = {of, *of.split("-"), of.partition("_")[0]}
    return function == name and (not case or case in parts)


def layer_of_marks(marks: list[str]) -> Layer:
    if layers.EXHAUSTIVE in marks:
        return Layer.ALL
    return Layer.TEST if layers.SLOW_MARKS.intersection(marks) else Layer.FAST
