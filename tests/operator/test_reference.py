"""The operator's page of the reference matches the code (docs/reference/operator.md)."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from paceline_api.reasons import ConditionType, Reason
from paceline_operator.core.refusals import RULES

from scripts.layers import tree_of
from scripts.operator_reference import CONDITIONS, EVENTS, OF_COORDINATOR, markdown, values_of

ROOT = Path(__file__).parent.parent.parent
CORE = ROOT / "operator/paceline_operator/core"
REPORT = "runtime/paceline/core/coordinator/report.py"
VALUES = (ROOT / "charts/paceline/values.yaml").read_text()


def calls(name: str) -> Iterator[ast.Call]:
    for path in CORE.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(name):
                yield node


def named(node: ast.AST, kind: str) -> set[str]:
    """Return the members of the enum `kind` that are written in `node`."""
    return {
        child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute) and ast.unparse(child.value) == kind
    }


def test_conditions_are_written_only_with_documented_reasons() -> None:
    for call in calls("Wanted"):
        for kind in named(call, "ConditionType"):
            for reason in named(call, "Reason"):
                assert Reason[reason] in CONDITIONS[ConditionType[kind]], (kind, reason)
    worst = next(
        node
        for node in ast.walk(tree_of(CORE / "report/conditions.py"))
        if isinstance(node, ast.FunctionDef) and node.name == "_worst"
    )
    documented = set(CONDITIONS[ConditionType.DEGRADED])
    assert {rule.reason for rule in RULES.values() if rule.reason} <= documented
    assert {Reason[reason] for reason in named(worst, "Reason")} <= documented
    for call in calls("End"):
        ends = {Reason[reason] for reason in named(call, "Reason")}
        assert ends <= {*CONDITIONS[ConditionType.FAILED], Reason.JOB_FINISHED}, ends


def test_events_have_only_documented_reasons() -> None:
    written = {reason for call in calls("Event") for reason in named(call, "Reason")}
    written |= {rule.reason.name for rule in RULES.values() if rule.reason}
    assert len(written) >= 10
    assert {Reason[reason] for reason in written} <= set(EVENTS)


def test_every_documented_reason_exists() -> None:
    """The operator writes it, or a coordinator sends it."""
    sources = "".join(path.read_text() for path in CORE.rglob("*.py"))
    runtime = "".join(path.read_text() for path in (ROOT / "runtime/paceline").rglob("*.py"))
    documented = {*EVENTS, *(reason for reasons in CONDITIONS.values() for reason in reasons)}
    for reason in documented - set(OF_COORDINATOR):
        assert f"Reason.{reason.name}" in sources, reason
    for reason in OF_COORDINATOR:
        assert f'"{reason}"' in runtime or f"Reason.{reason.name}" in runtime, reason


def reasons_in(name: str, argument: int) -> set[str]:
    """Return the reasons that the runtime passes to a function as this argument, as text."""
    given = (call.args[argument : argument + 1] for call in calls_of_runtime()[name])
    return {str(a.value) for words in given for a in words if isinstance(a, ast.Constant)}


@cache
def calls_of_runtime() -> dict[str, list[ast.Call]]:
    """Return the calls of each function or method in the runtime, by its last name."""
    by_name: defaultdict[str, list[ast.Call]] = defaultdict(list)
    for path in (ROOT / "runtime/paceline").rglob("*.py"):
        if path.is_relative_to(ROOT / "runtime/paceline/local"):
            continue  # a run on one machine has no conditions
        for node in ast.walk(tree_of(path)):
            match node:
                case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                    by_name[name].append(node)
    return by_name


@pytest.mark.long
def test_the_runtime_fails_jobs_only_with_documented_reasons() -> None:
    """They become the reason of Failed; an Event of another one would be JobFailed."""
    reasons = reasons_in("Broken", 0) | reasons_in("Fatal", 1)
    reasons |= reasons_in("fail", 0) | reasons_in("fail", 1)  # of a rank, and of the coordinator
    words = {reason for reason in reasons if re.fullmatch(r"([A-Z][a-z]+){2,}", reason)}
    assert len(words) >= 12
    assert words <= set(CONDITIONS[ConditionType.FAILED])


def test_the_coordinator_reports_only_documented_reasons_of_degraded() -> None:
    reasons = set()
    for node in ast.walk(tree_of(ROOT / REPORT)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "LiveCondition":
            kind, reason = (a.value for a in node.args[:2] if isinstance(a, ast.Constant))
            reasons |= {reason} if kind == "Degraded" else set()
    assert len(reasons) >= 8
    assert reasons <= set(CONDITIONS[ConditionType.DEGRADED])


def test_the_reference_page_is_up_to_date() -> None:
    page = (ROOT / "docs/reference/operator.md").read_text()
    assert page == markdown(VALUES), "run: make generate"


def test_values_are_read_with_their_comments() -> None:
    text = "# All of a.\na:\n  b: 1\n  c: {d: 2}\n\ne:\n  # Of f.\n  # And more.\n  f: x\n  g: []\n"
    assert [(v.path, v.default, v.text) for v in values_of(text)] == [
        ("a", "b: 1; c: {d: 2}", "All of a."),
        ("e.f", "x", "Of f. And more."),
        ("e.g", "[]", ""),
    ]
