"""What `spec.failurePolicy` says of one end. The first rule that matches decides.

Agents and coordinator ask it of ranks, the operator of pods: each counts what it alone sees.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline_api.settings import FailureRuleSettings
from paceline_api.types.enums import FailureAction


def ruled(
    rules: Iterable[FailureRuleSettings], exit_code: int, reason: str = ""
) -> FailureAction | None:
    """`exit_code`: negative for a signal, as of a process; 0: it says nothing. `reason`: of the
    container's end. None: no rule matches."""
    code = 128 - exit_code if exit_code < 0 else exit_code
    for rule in rules:
        if code in rule.on_exit_codes or reason in rule.on_reasons:
            return rule.action
    return None
