"""Argo CD's health of a job: the Lua script of examples/argocd, run by a Lua interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa.lua51 import LuaRuntime
from paceline_api.reasons import ConditionType
from paceline_operator.core.report.conditions import WantedCondition
from paceline_operator.core.report.standing import NEEDS_SOMEBODY, standing

FILE = Path(__file__).parents[2] / "examples/argocd/health.yaml"
KEY = "resource.customizations.health.paceline.dev_TrainingJob"
SCRIPT = yaml.safe_load(FILE.read_text())["data"][KEY]


def health(generation: int = 1, **status: Any) -> tuple[str, str]:
    """Return the health that Argo CD computes for a job with this status, with the job as `obj`."""
    lua = LuaRuntime()
    job = {"metadata": {"generation": generation}, "spec": {}}
    if status:
        job["status"] = status
    lua.globals().obj = lua.table_from(job, recursive=True)
    result = lua.execute(SCRIPT)
    return result.status, result.message


def condition(kind: ConditionType, holds: bool = True, message: str = "why") -> dict[str, str]:
    status = "True" if holds else "False"
    return {"type": str(kind), "status": status, "reason": "Reason", "message": message}


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ([], ("Progressing", "the job trains")),
        ([condition(ConditionType.COMPLETE)], ("Healthy", "why")),
        ([condition(ConditionType.FAILED)], ("Degraded", "why")),
        ([condition(ConditionType.FAILED, message="")], ("Degraded", "Reason")),
        ([condition(ConditionType.SUSPENDED)], ("Suspended", "why")),
        ([condition(ConditionType.DEGRADED)], ("Progressing", "why")),
        (
            [
                condition(ConditionType.DEGRADED),
                condition(ConditionType.STALLED, message="mend it"),
            ],
            ("Degraded", "mend it"),
        ),
        (
            [condition(ConditionType.SUSPENDED), condition(ConditionType.STALLED, False)],
            ("Suspended", "why"),
        ),
        ([condition(ConditionType.RESIZING)], ("Progressing", "why")),
        ([condition(ConditionType.SCHEDULED, False)], ("Progressing", "why")),
        ([condition(ConditionType.RING_READY, False)], ("Progressing", "why")),
        (
            [condition(ConditionType.SUSPENDED, False), condition(ConditionType.RING_READY)],
            ("Progressing", "the job trains"),
        ),
    ],
)
def test_conditions_map_to_the_health_of_argo_cd(
    conditions: list[dict[str, str]], expected: tuple[str, str]
) -> None:
    assert health(observedGeneration=1, conditions=conditions) == expected


@pytest.mark.parametrize("reason", NEEDS_SOMEBODY)
def test_problems_that_need_a_user_are_shown_as_degraded(reason: str) -> None:
    """The conditions are those that the operator writes for Flux (kstatus)."""
    wanted = [WantedCondition(ConditionType.DEGRADED, True, reason, "mend it")]
    conditions = [condition(c.type, c.holds, c.message) for c in (*wanted, *standing({}, wanted))]
    assert health(observedGeneration=1, conditions=conditions) == ("Degraded", "mend it")


def test_a_job_without_a_status_is_progressing() -> None:
    assert health() == ("Progressing", "the operator has not yet seen this change")


def test_the_status_of_an_earlier_generation_is_ignored() -> None:
    suspended = [condition(ConditionType.SUSPENDED)]
    status, _ = health(2, observedGeneration=1, conditions=suspended)
    assert status == "Progressing"


@pytest.mark.parametrize("kind", [ConditionType.COMPLETE, ConditionType.FAILED])
def test_an_ended_job_keeps_its_health_when_its_spec_changes(kind: ConditionType) -> None:
    """Changing the spec of an ended job does not run it again."""
    ended = [condition(ConditionType.SUSPENDED), condition(kind)]
    assert health(9, observedGeneration=1, conditions=ended)[0] in ("Healthy", "Degraded")
