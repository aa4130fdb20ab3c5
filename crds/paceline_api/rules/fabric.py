"""Rules about a FabricProfile, in Python and in CEL, with one error text for both.

The API server checks the CEL rules when a profile is applied. The operator checks the same rules
again when it reads one, since an older definition may have let it through.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from paceline_api.types.enums import DnsPolicy, NodeOperator
from paceline_api.types.fabric import AUTO, OWN, FabricSpec

RESERVED: Final = (AUTO, OWN)
"""Names that no object can have: jobs use them with a meaning of their own."""
_CAPABILITY: Final = r"^(ALL|[A-Z][A-Z_]*)$"
_WITH_VALUES: Final = (NodeOperator.IN, NodeOperator.NOT_IN)


@dataclass(frozen=True, slots=True)
class FabricRule:
    """A condition that every valid profile meets."""

    path: str
    """The field that the error names."""
    problem: str
    hint: str
    check: Callable[[FabricSpec], bool]
    """Return True for a valid spec."""
    cel: str
    """True for a valid profile; `self` is the spec."""

    @property
    def message(self) -> str:
        """The error text."""
        return f"{self.path} {self.problem}; {self.hint}"


def _resolves_services(spec: FabricSpec) -> bool:
    pod = spec.pod
    on_host = pod is not None and pod.host_network
    return not on_host or (
        pod is not None and pod.dns_policy is DnsPolicy.CLUSTER_FIRST_WITH_HOST_NET
    )


def _capabilities_have_their_names(spec: FabricSpec) -> bool:
    names = (spec.pod.capabilities if spec.pod else None) or ()
    return all(re.match(_CAPABILITY, name) and not name.startswith("CAP_") for name in names)


def _expressions_are_complete(spec: FabricSpec) -> bool:
    expressions = (spec.match.node_expressions if spec.match else None) or ()
    return all((e.operator in _WITH_VALUES) == bool(e.values) for e in expressions)


def _runs_as_root(spec: FabricSpec) -> bool:
    pod = spec.pod
    return pod is None or not pod.privileged or pod.run_as_user in (None, 0)


_VALUES_CEL: Final = "(e.operator in ['In', 'NotIn']) == (has(e.values) && size(e.values) > 0)"
FABRIC_RULES: Final = (
    FabricRule(
        path="spec.pod.dnsPolicy",
        problem="is not ClusterFirstWithHostNet, and spec.pod.hostNetwork is true: such pods would "
        "not find their coordinator",
        hint="set it to ClusterFirstWithHostNet",
        check=_resolves_services,
        cel="!has(self.pod) || !has(self.pod.hostNetwork) || !self.pod.hostNetwork || "
        "(has(self.pod.dnsPolicy) && self.pod.dnsPolicy == 'ClusterFirstWithHostNet')",
    ),
    FabricRule(
        path="spec.pod.capabilities",
        problem="has a name that is no capability of Kubernetes",
        hint="write each in capitals and without CAP_, such as IPC_LOCK",
        check=_capabilities_have_their_names,
        cel="!has(self.pod) || !has(self.pod.capabilities) || self.pod.capabilities.all(c, "
        f"c.matches('{_CAPABILITY}') && !c.startsWith('CAP_'))",
    ),
    FabricRule(
        path="spec.pod.runAsUser",
        problem="is not 0, and spec.pod.privileged is true: the privileges of a container are "
        "those of its root",
        hint="set it to 0, or remove one of the two",
        check=_runs_as_root,
        cel="!has(self.pod) || !has(self.pod.privileged) || !self.pod.privileged || "
        "!has(self.pod.runAsUser) || self.pod.runAsUser == 0",
    ),
    FabricRule(
        path="spec.match.nodeExpressions",
        problem="has an operator without the values that it needs, or with values that it has no "
        "use for",
        hint="give In and NotIn values, and Exists and DoesNotExist none",
        check=_expressions_are_complete,
        cel="!has(self.match) || !has(self.match.nodeExpressions) || "
        f"self.match.nodeExpressions.all(e, {_VALUES_CEL})",
    ),
)
NAME_MESSAGE: Final = (
    f"metadata.name is {' or '.join(RESERVED)}, which a job writes into spec.fabric.profile with a "
    "meaning of its own; use another name"
)
NAME_CEL: Final = f"!(self.metadata.name in {list(RESERVED)})"
"""True for an object that jobs can name; `self` is the object."""


def broken_rule(spec: FabricSpec) -> FabricRule | None:
    """Return the first rule that a profile breaks; None for a valid one."""
    return next((rule for rule in FABRIC_RULES if not rule.check(spec)), None)
