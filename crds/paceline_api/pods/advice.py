"""Which field of a job a refusal of the API server is about, by the words of the refusal."""

from __future__ import annotations

import re
from typing import Final

POD_SECURITY: Final = "violates PodSecurity"
"""Text in a refusal of the API server that shows that pod security is the cause."""
NO_RIGHT: Final = re.compile(r"cannot [a-z]+ resource")
"""Words of the API server to somebody whose roles lack a right."""
NO_DRY_RUN: Final = "does not support dry run"
"""Words of the API server if a webhook with side effects has to be asked, so nothing is known."""
QUOTA: Final = "exceeded quota"
_RESOURCES: Final = ("must specify", "per Container", "per Pod", "limit", "requests.", "memory")
_OF_QUOTA: Final = (
    "spec.replicas or the resources of spec.template",
    "spec.coordinator.resources",
)
_OTHERWISE: Final = (
    "spec.template",
    "spec.coordinator, or what it has from spec.template: image, user, labels",
)
FIELDS: Final[tuple[tuple[tuple[str, ...], str, str], ...]] = (
    (
        ("service account", "serviceaccount"),
        "spec.template.spec.serviceAccountName",
        "spec.template.spec.serviceAccountName, which it has too",
    ),
    (
        ("PriorityClass", "priority class"),
        "spec.template.spec.priorityClassName",
        "spec.coordinator.priorityClassName, or that of spec.template, which it has otherwise",
    ),
    (
        ("RuntimeClass",),
        "spec.template.spec.runtimeClassName",
        "spec.template.spec.runtimeClassName, which it has too",
    ),
    (
        _RESOURCES,
        "the resources of the containers in spec.template",
        "spec.coordinator.resources",
    ),
    (
        ("label", "annotation"),
        "spec.template.metadata",
        "spec.template.metadata, whose labels and annotations it has",
    ),
)
"""Words of a refusal, and the field that they are about, in a worker and in the coordinator."""


def refused_field(message: str, *, of_worker: bool) -> str:
    """Return the field of a job that the refusal of a pod is about.

    Args:
        message: Words of the API server.
        of_worker: True for a worker's pod, False for the coordinator's.

    Returns:
        The field, or what to look at if the words name none.
    """
    if QUOTA in message:
        worker, coordinator = _OF_QUOTA
    else:
        fits = ((w, c) for words, w, c in FIELDS if any(word in message for word in words))
        worker, coordinator = next(fits, _OTHERWISE)
    return worker if of_worker else coordinator
