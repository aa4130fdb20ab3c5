"""What of an image is not Python's: the packages of its Debian, for its list of parts (CycloneDX).

Read from the base's own dpkg, so without a network and for whatever base there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

STATUS: Final = "var/lib/dpkg/status"
OS_RELEASE: Final = "usr/lib/os-release"
INSTALLED: Final = "install ok installed"


@dataclass(frozen=True)
class Distribution:
    """Which system it is, as os-release says."""

    id: str
    """debian"""
    version: str
    """12; empty for one without releases."""


@dataclass(frozen=True)
class SystemPackage:
    """One that dpkg has installed."""

    name: str
    version: str
    architecture: str
    source: str
    """Of which it was built, where that has another name; empty: it has the same."""


def installed(status: bytes) -> tuple[SystemPackage, ...]:
    """Return what dpkg's status lists as installed, by name."""
    found = (_fields(part) for part in status.decode(errors="replace").split("\n\n"))
    packages = (
        SystemPackage(
            each["Package"],
            each["Version"],
            each.get("Architecture", "all"),
            each.get("Source", "").partition(" ")[0],
        )
        for each in found
        if each.get("Status") == INSTALLED and "Package" in each and "Version" in each
    )
    return tuple(sorted(packages, key=lambda one: (one.name, one.architecture)))


def distribution(os_release: bytes) -> Distribution:
    """Return what os-release says."""
    lines = os_release.decode(errors="replace").splitlines()
    values = {
        name: value.strip("\"'")
        for name, equals, value in (line.partition("=") for line in lines)
        if equals
    }
    return Distribution(values.get("ID", "linux"), values.get("VERSION_ID", ""))


def components(packages: Iterable[SystemPackage], system: Distribution) -> Iterator[dict[str, Any]]:
    """Yield each package as a component of CycloneDX, with the name that scanners look up."""
    for one in packages:
        purl = _purl(one, system)
        yield {
            "type": "library",
            "bom-ref": purl,
            "name": one.name,
            "version": one.version,
            "purl": purl,
        }


def _purl(one: SystemPackage, system: Distribution) -> str:
    release = f"{system.id}-{system.version}" if system.version else system.id
    words = {"arch": one.architecture, "distro": release}
    if one.source:
        words["upstream"] = one.source
    asked = "&".join(f"{name}={quote(value, safe='')}" for name, value in sorted(words.items()))
    name, version = quote(one.name, safe=""), quote(one.version, safe="")
    return f"pkg:deb/{quote(system.id, safe='')}/{name}@{version}?{asked}"


def _fields(paragraph: str) -> Mapping[str, str]:
    """The fields of one line each; those that go on below are not asked for."""
    lines = (line.partition(": ") for line in paragraph.splitlines() if not line.startswith(" "))
    return {name: value for name, colon, value in lines if colon}
