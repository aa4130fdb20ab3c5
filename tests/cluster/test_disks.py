"""A node does not hold the disk of an image build."""

from __future__ import annotations

import os
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest

from testing.cluster import disks, leftovers

pytestmark = pytest.mark.processes

HOLDS = "{forget} echo up; exec sleep 60"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts")
@pytest.mark.parametrize("forgets", [True, False])
def test_a_node_holds_the_disk_of_an_image_build_only_if_it_keeps_the_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    disk = tmp_path / "layers.img"
    disks.make(disk)
    disks.mount(disk, tmp_path / "images")
    # buildah mounts a container like this while it builds.
    disks.make(tmp_path / "inner.img")
    disks.mount(tmp_path / "inner.img", tmp_path / "images" / "container")
    script = HOLDS.format(forget=disks.FORGET_OTHERS if forgets else "")
    command = ["unshare", "--mount", "bash", "-ec", script, "node", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as node:
        try:
            assert node.stdout is not None
            assert node.stdout.readline() == b"up\n"
            leftovers.unmount_below(tmp_path)
            monkeypatch.setattr(disks, "TIMEOUT_S", 60.0 if forgets else 0.5)
            with nullcontext() if forgets else pytest.raises(disks.DiskBusyError):
                disks.wait_released(disk)
        finally:
            node.kill()
            leftovers.unmount_below(tmp_path)
    disks.wait_released(disk)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts")
def test_a_disk_that_a_killed_build_has_left_mounted_is_freed(tmp_path: Path) -> None:
    disk = tmp_path / "layers.img"
    disks.make(disk)
    disks.mount(disk, tmp_path / "images")
    disks.make(tmp_path / "inner.img")
    disks.mount(tmp_path / "inner.img", tmp_path / "images" / "container")
    try:
        disks.free(disk)
        assert not (tmp_path / "images/container").exists()
    finally:
        leftovers.unmount_below(tmp_path)
