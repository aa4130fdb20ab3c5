"""Control groups (v1) of a test cluster: per hierarchy one top group, with one group for each node.

The kubelet makes the groups of its pods below the group of its node. Processes beside the pods go
into the group `system`, so every process of the cluster can be found by the cluster's name.
"""

from __future__ import annotations

from pathlib import Path

from testing.cluster.prerequisites import CGROUPS

# The mount of cgroup v2, which is not a hierarchy of v1.
UNIFIED = "unified"
SYSTEM_HIERARCHY = "pids"
# A cluster's pods together count as much as six processes beside it, not as one.
CPU_SHARES = 6 * 1024


def hierarchies() -> list[Path]:
    """Return the folders of all cgroup v1 hierarchies, each once."""
    # Names such as cpu,cpuacct may be links to the same hierarchy.
    folders = {path.resolve() for path in CGROUPS.iterdir() if path.name != UNIFIED}
    return sorted(path for path in folders if path.is_dir())


def make(name: str) -> None:
    """Create the group `name`, which may be nested, in each hierarchy, ready to hold processes."""
    for hierarchy in hierarchies():
        path = hierarchy
        for part in name.split("/"):
            path = path / part
            path.mkdir(exist_ok=True)
            for setting in ("cpuset.cpus", "cpuset.mems"):
                # The setting is empty in a new group, and no process may enter until it is set.
                if (path / setting).is_file():
                    (path / setting).write_text((path.parent / setting).read_text())
            shares = path / "cpu.shares"
            if shares.is_file() and path.parent == hierarchy:
                shares.write_text(str(CPU_SHARES))


def joining(cluster: str) -> list[str]:
    """Return a command prefix that moves the command into the cluster's `system` group."""
    group = CGROUPS / SYSTEM_HIERARCHY / cluster / "system"
    group.mkdir(parents=True, exist_ok=True)
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]
