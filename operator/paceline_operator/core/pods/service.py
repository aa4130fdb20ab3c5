"""The one headless Service of a namespace: host names for the coordinators of all its jobs (C10).

It selects coordinators only, since a Service over thousands of workers costs its controllers more
than the training. It belongs to no job, so it has no owner.
"""

from __future__ import annotations

from typing import Any, Final

from paceline_api import names

KEEP_S: Final = 600.0
"""Seconds that a namespace without jobs keeps its Service."""
REFRESH_S: Final = 600.0
"""Seconds between two applications while there are jobs, in case it was deleted."""


def service(namespace: str) -> dict[str, Any]:
    """Return the manifest of the Service for a namespace."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": names.COORDINATOR_SERVICE,
            "namespace": namespace,
            "labels": {
                "app.kubernetes.io/name": "paceline",
                "app.kubernetes.io/managed-by": "paceline-operator",
            },
        },
        "spec": {
            "clusterIP": "None",
            # Agents must find a coordinator that is starting, and both while one is replaced.
            "publishNotReadyAddresses": True,
            "selector": {names.LABEL_ROLE: names.ROLE_COORDINATOR},
            "ports": [
                {
                    "name": "control",
                    "port": names.COORDINATOR_PORT,
                    "targetPort": "control",
                    "protocol": "TCP",
                }
            ],
        },
    }
