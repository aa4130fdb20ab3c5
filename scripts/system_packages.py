"""The Debian packages of an image, for its software bill of materials (CycloneDX).

They are read from the base's own dpkg, so this needs no network and works with any base.
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
    """Operating system, as os-release names it."""

    id: str
    """Identifier, such as debian."""
    version: str
    """Version, such as 12; empty for a system without releases."""


@dataclass(frozen=True)
class SystemPackage:
    """One package that dpkg has installed."""

    name: str
    version: str
    architecture: str
    source: str
    """Name of the source package; empty if it is the same name."""


def installed(status: bytes) -> tuple[SystemPackage, ...]:
    """Return the packages that dpkg's status lists as installed, by name."""
    paragraphs = (_fields(part) for part in status.decode(errors="replace").split("\n\n"))
    packages = (
        SystemPackage(
            each["Package"],
            each["Version"],
            each.get("Architecture", "all"),
            each.get("Source", "").partition(" ")[0],
        )
        for each in paragraphs
        if each.get("Status") == INSTALLED and "Package" in each and "Version" in each
    )
    return tuple(sorted(packages, key=lambda one: (one.name, one.architecture)))


def distribution(os_release: bytes) -> Distribution:
    """Return the system that os-release names."""
    lines = os_release.decode(errors="replace").splitlines()
    values = {
        name: value.strip("\"'")
        for name, equals, value in (line.partition("=") for line in lines)
        if equals
    }
    return Distribution(values.get("ID", "linux"), values.get("VERSION_ID", ""))


def components(packages: Iterable[SystemPackage], system: Distribution) -> Iterator[dict[str, Any]]:
    """Yield each package as a CycloneDX component, with the purl that scanners look up."""
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
    """Return the fields of one line each; longer ones are not needed."""
    lines = (line.partition(": ") for line in paragraph.splitlines() if not line.startswith(" "))
    return {name: value for name, colon, value in lines if colon}
