"""Resources of device plugins: which they are, and how many."""

from __future__ import annotations

import re
from typing import Final

UNITS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
OWN_RESOURCES: Final = ("kubernetes.io/", "hugepages-", "attachable-volumes-")


def amount_of(quantity: str) -> int:
    """Of a device: whole, as Kubernetes writes it, such as 8 or 1k; 0 for anything else."""
    found = re.fullmatch(r"(\d{1,15})([kMG]?)", quantity)
    return int(found[1]) * UNITS[found[2]] if found else 0


def is_device(resource: str) -> bool:
    return "/" in resource and not resource.startswith(OWN_RESOURCES)
