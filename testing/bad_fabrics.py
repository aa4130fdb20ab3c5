"""Specs of a FabricProfile that break one rule each, by the field that the error names."""

from __future__ import annotations

from typing import Any, Final

BREAKING: Final[dict[str, dict[str, Any]]] = {
    "spec.pod.dnsPolicy": {"pod": {"hostNetwork": True, "dnsPolicy": "ClusterFirst"}},
    "spec.pod.capabilities": {"pod": {"capabilities": ["CAP_IPC_LOCK"]}},
    "spec.pod.runAsUser": {"pod": {"privileged": True, "runAsUser": 1000}},
    "spec.match.nodeExpressions": {
        "match": {"nodeExpressions": [{"key": "a", "operator": "Exists", "values": ["b"]}]}
    },
}
