"""Resources of device plugins: how to recognize them and how to read their amounts."""

from __future__ import annotations

import re
from typing import Final

UNITS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
"""Factors of the decimal suffixes that Kubernetes allows for whole amounts."""
OWN_RESOURCES: Final = ("kubernetes.io/", "hugepages-", "attachable-volumes-")
"""Prefixes of resources that belong to Kubernetes itself and not to a device plugin."""


def amount_of(quantity: str) -> int:
    """Return a whole amount as Kubernetes writes it, such as 8 or 1k; 0 for anything else."""
    match = re.fullmatch(r"(\d{1,15})([kMG]?)", quantity)
    return int(match[1]) * UNITS[match[2]] if match else 0


def is_device(resource: str) -> bool:
    """Return True if a resource belongs to a device plugin, such as nvidia.com/gpu."""
    return "/" in resource and not resource.startswith(OWN_RESOURCES)
