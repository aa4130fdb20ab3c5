"""Pods that use the Python of the test run: its environment and this checkout, mounted read-only.

A change can thus be tried on real pods without building an image. The image `images.HOST` is an
empty Debian layout: the host's /usr is mounted into it.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

from testing.cluster.api import Json
from testing.cluster.images import HOST
from testing.cluster.prerequisites import MissingPrerequisiteError

CHECKOUT = Path(__file__).parents[2]
# The path is the same in the pod, as packages and console scripts expect.
PYTHON = sys.executable


def with_host_python(spec: Json) -> Json:
    """Return a copy of a pod spec whose containers run `images.HOST` with the host's Python."""
    if not Path("/lib").is_symlink():
        raise MissingPrerequisiteError(
            "pods cannot use this host's Python: /lib is not a link into /usr",
            "use Debian 12 or later",
        )
    spec = copy.deepcopy(spec)
    folders = mounted_folders()
    spec.setdefault("volumes", []).extend(
        {"name": f"host-{number}", "hostPath": {"path": str(folder), "type": "Directory"}}
        for number, folder in enumerate(folders)
    )
    for container in [*spec.get("initContainers", ()), *spec["containers"]]:
        container |= {"image": HOST, "imagePullPolicy": "Never"}
        container.setdefault("volumeMounts", []).extend(
            {"name": f"host-{number}", "mountPath": str(folder), "readOnly": True}
            for number, folder in enumerate(folders)
        )
    return spec


def mounted_folders() -> list[Path]:
    """Return the host folders that pods need, without any that lies inside another."""
    wanted = {Path("/usr"), Path(sys.base_prefix), Path(sys.prefix), CHECKOUT}
    return sorted(path for path in wanted if not any(up in wanted for up in path.parents))
