"""Clusters as context managers: take room, start, hand out, tear everything down.

What tests (fixtures.py) and people (__main__.py) both use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from testing.cluster import disks, image_build, instance, leftovers, prerequisites, programs
from testing.cluster.control_plane import RAISED, ControlPlane, Limits
from testing.cluster.image_build import ImageBuilder
from testing.cluster.nodes import Cluster


def never() -> bool:
    return False


@contextmanager
def control_plane(
    *,
    audit: bool = False,
    controllers: str | None = "*",
    limits: Limits | None = RAISED,
    keep_logs: Callable[[], bool] = never,
) -> Iterator[ControlPlane]:
    """A control plane without nodes. `controllers=None`: only etcd and API server.

    `keep_logs` is asked at the end whether the folder of logs is still wanted; after an error in
    here it always is.
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
    """Builds images; archives that are wanted later are copied elsewhere before the end."""
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
    """A control plane with two real nodes and DNS."""
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
