"""The bill of materials of an image lists the Debian packages of its base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import oci, release, release_images
from scripts.release_images import ReleaseError
from scripts.system_packages import Distribution, SystemPackage, components, distribution, installed
from tests.release import small_image

LIBC = SystemPackage("libc6", "2.36-9+deb12u10", "amd64", "glibc")
BOOKWORM = Distribution("debian", "12")


def test_a_base_lists_installed_packages_and_no_removed_ones(tmp_path: Path) -> None:
    base = release_images.read_base(small_image.base_tar(tmp_path / "base.tar"))
    assert base.packages == (LIBC, SystemPackage("libstdc++6", "1:12.2.0-14", "amd64", ""))
    assert base.distribution == BOOKWORM


def test_package_urls_are_those_that_scanners_look_up() -> None:
    [libc] = components([LIBC], BOOKWORM)
    name = "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=amd64&distro=debian-12&upstream=glibc"
    assert libc["purl"] == libc["bom-ref"] == name
    [rolling] = components([SystemPackage("a", "1:2", "all", "")], Distribution("debian", ""))
    assert rolling["purl"] == "pkg:deb/debian/a@1%3A2?arch=all&distro=debian"


def test_the_bill_of_materials_has_python_and_system_packages(tmp_path: Path) -> None:
    base = release_images.read_base(small_image.base_tar(tmp_path / "base.tar"))
    target = tmp_path / "operator-1.cdx.json"
    python = {"type": "library", "name": "kopf", "version": "1", "bom-ref": "kopf-1@1"}
    target.write_bytes(oci.as_json({"bomFormat": "CycloneDX", "components": [python]}))
    release.add_system_packages(target, base)
    listed = json.loads(target.read_text())
    assert [one["name"] for one in listed["components"]] == ["kopf", "libc6", "libstdc++6"]
    refs = [one["bom-ref"] for one in listed["components"]]
    assert len(set(refs)) == len(refs)


def test_a_base_without_a_package_list_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_images, "STATUS", "var/lib/dpkg/elsewhere")
    with pytest.raises(ReleaseError, match="does not say which packages"):
        release_images.read_base(small_image.base_tar(tmp_path / "base.tar"))


def test_invalid_dpkg_and_os_release_files_give_no_packages() -> None:
    for data in (b"", b"\xff\xfe", b"Package\n\n: \n", b"Package: a\nStatus: install ok installed"):
        assert installed(data) == ()
        assert distribution(data).id == "linux"
