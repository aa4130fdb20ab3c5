"""Prerequisites of the test cluster, and the errors that name the ones that are missing.

The API server alone needs neither root nor a package. Real nodes need root, cgroup v1 (which
Kubernetes 1.34 still supports and on which this harness was built) and a few Debian packages. `make
cluster-programs` installs these packages if it may.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

CNI_PLUGINS = Path("/usr/lib/cni")
CGROUPS = Path("/sys/fs/cgroup")
# Program or file that shows that a package is installed -> the package.
PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    str(CNI_PLUGINS / "bridge"): "containernetworking-plugins",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ipset": "ipset",
    "ip": "iproute2",
    "/bin/busybox": "busybox-static",
    "nsenter": "util-linux",
    "mkfs.ext4": "e2fsprogs",
}
IMAGE_PACKAGES = {"buildah": "buildah", "debootstrap": "debootstrap"}
BROWSER_PACKAGES = {"chromium": "chromium"}
"""Browser for the tests of the page that `paceline report` writes."""
APT_TIMEOUT_S = 900.0


class MissingPrerequisiteError(Exception):
    """Raised when the machine lacks something that only its owner can provide."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"{what}\nhint: {hint}")


def missing_packages(wanted: dict[str, str]) -> list[str]:
    """Return the packages of `wanted` whose program or file is not on this machine."""
    # Debian keeps these in sbin, which a plain user's PATH lacks.
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    there = {shows: bool(shutil.which(shows, path=path)) for shows in wanted}
    return sorted({package for shows, package in wanted.items() if not there[shows]})


def require_nodes() -> None:
    """Raise MissingPrerequisiteError unless this machine can run real nodes."""
    if os.geteuid() != 0:
        raise MissingPrerequisiteError("real nodes need root", "run the tests as root")
    if not (CGROUPS / "memory").is_dir():
        raise MissingPrerequisiteError(
            "real nodes need cgroup v1 here", "boot with systemd.unified_cgroup_hierarchy=0"
        )
    if not Path("/dev/loop-control").exists():
        raise MissingPrerequisiteError("real nodes need loop devices", "modprobe loop")
    if missing := missing_packages(PACKAGES):
        raise MissingPrerequisiteError(
            f"missing packages: {' '.join(missing)}", f"apt-get install {' '.join(missing)}"
        )


def install_packages() -> list[str]:
    """Install the missing packages and return their names.

    Returns:
        the packages that were installed; empty if none was missing.

    Raises:
        MissingPrerequisiteError: packages are missing, and this is no Debian, the user is not root
            or apt-get failed.
    """
    missing = missing_packages(PACKAGES | IMAGE_PACKAGES | BROWSER_PACKAGES)
    if not missing:
        return []
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise MissingPrerequisiteError(
            f"missing packages: {' '.join(missing)}",
            f"as root: apt-get install --no-install-recommends {' '.join(missing)}",
        )
    install = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *missing]
    if _apt(install).returncode:
        _apt(["apt-get", "update", "--quiet"])
        done = _apt(install)
        if done.returncode:
            raise MissingPrerequisiteError(
                f"apt-get could not install them:\n{done.stdout[-4000:]}", "see its message"
            )
    return missing


def _apt(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=APT_TIMEOUT_S,
    )
