"""Clusters as context managers: reserve an instance, start, yield, tear everything down.

Both the tests (fixtures.py) and the command line (__main__.py) use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from testing.cluster import disks, image_build, instance, leftovers, prerequisites, programs
from testing.cluster.control_plane import RAISED, ControlPlane, Limits
from testing.cluster.image_build import ImageBuilder
from testing.cluster.nodes import Cluster


def never() -> bool:
    """Return False: the default for `keep_logs`."""
    return False


@contextmanager
def control_plane(
    *,
    audit: bool = False,
    controllers: str | None = "*",
    limits: Limits | None = RAISED,
    keep_logs: Callable[[], bool] = never,
) -> Iterator[ControlPlane]:
    """Run a control plane without nodes.

    Args:
        audit: write an audit log.
        controllers: flag of the controller manager; None starts only etcd and the API server.
        limits: request rates of controller manager and scheduler; None keeps Kubernetes' defaults.
        keep_logs: called at the end of the block; True keeps the folder of logs. The logs are
            always kept after an error.

    Yields:
        the started control plane.
    """
    for name in programs.CONTROL_PLANE:
        programs.require(name)
    room = instance.acquire()
    wanted = True
    try:
        plane = ControlPlane(room, audit=audit, controllers=controllers or "*", limits=limits)
        try:
            plane.start(controllers=controllers is not None)
            yield plane
            wanted = keep_logs()
        finally:
            plane.stop()
    finally:
        room.release(keep_logs=wanted)


@contextmanager
def image_builder() -> Iterator[ImageBuilder]:
    """Yield an image builder; copy the archives to keep before the block ends."""
    image_build.require_builder()
    room = instance.acquire()
    try:
        with image_build.storage_disk(room.folder) as disk:
            try:
                disks.make(disk)
                disks.mount(disk, room.folder / "images")
                yield ImageBuilder(room.folder / "images")
                for archive in (room.folder / "images").glob("*.tar"):
                    archive.unlink()
            finally:
                leftovers.unmount_below(room.folder)
                disks.wait_released(disk)
    finally:
        room.release(keep_logs=False)


@contextmanager
def two_nodes(*, audit: bool = True, keep_logs: Callable[[], bool] = never) -> Iterator[Cluster]:
    """Run a control plane with two real nodes and DNS."""
    for name in programs.CONTROL_PLANE | programs.NODE:
        programs.require(name)
    prerequisites.require_nodes()
    room = instance.acquire()
    wanted = True
    try:
        cluster = Cluster(room, audit=audit)
        try:
            cluster.start()
            yield cluster
            wanted = keep_logs()
        finally:
            cluster.stop()
    finally:
        room.release(keep_logs=wanted)
