"""Decision of `spec.failurePolicy` about one failure; the first rule that matches decides.

Agents and the coordinator apply it to ranks, and the operator to pods. Each of them counts only
what the others do not see.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline_api.settings import FailureRuleSettings
from paceline_api.types.enums import FailureAction


def ruled(
    rules: Iterable[FailureRuleSettings], exit_code: int, reason: str = ""
) -> FailureAction | None:
    """Return the action of the first rule that matches a failure.

    Args:
        rules: The rules of the job, in order.
        exit_code: Exit code of the process; -n for signal n, which matches as 128 + n; 0 if it says
            nothing.
        reason: Reason that Kubernetes gives for the end of the container or pod.

    Returns:
        The action; None if no rule matches.
    """
    code = 128 - exit_code if exit_code < 0 else exit_code
    for rule in rules:
        if code in rule.on_exit_codes or reason in rule.on_reasons:
            return rule.action
    return None
