"""All fuzz targets, in modules by the source of the bytes."""

from __future__ import annotations

from typing import Final

from testing.fuzz.target import Target
from testing.fuzz.targets import cluster, files, messages, sockets, users

TARGETS: Final[dict[str, Target]] = {
    target.name: target
    for module in (messages, sockets, files, users, cluster)
    for target in module.TARGETS
}
