"""Container images without a registry: docker archives of a few files, written in Python.

They are enough for what the cluster itself needs and for pods that run the host's own Python. An
archive has the same bytes each time.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BUSYBOX_PROGRAM = Path("/bin/busybox")
PAUSE = "paceline.test/pause:1"
BUSYBOX = "paceline.test/busybox:1"
COREDNS = "paceline.test/coredns:1"
HOST = "paceline.test/host:1"


@dataclass
class Image:
    """Contents of one image; parent folders of files and links need not be listed."""

    tag: str
    files: dict[str, Path | bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    folders: dict[str, int] = field(default_factory=dict)
    entrypoint: tuple[str, ...] = ()

    def write(self, target: Path) -> Path:
        """Write the image as a docker archive and return the path."""
        layer = self._layer()
        config = json.dumps(self._config(layer)).encode()
        manifest = [{"Config": "config.json", "RepoTags": [self.tag], "Layers": ["layer.tar"]}]
        with tarfile.open(target, "w") as archive:
            _add(archive, "manifest.json", json.dumps(manifest).encode())
            _add(archive, "config.json", config)
            _add(archive, "layer.tar", layer)
        return target

    def _config(self, layer: bytes) -> dict[str, Any]:
        process: dict[str, Any] = {"Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]}
        if self.entrypoint:
            process["Entrypoint"] = list(self.entrypoint)
        digest = f"sha256:{hashlib.sha256(layer).hexdigest()}"
        root = {"type": "layers", "diff_ids": [digest]}
        return {"architecture": "amd64", "os": "linux", "config": process, "rootfs": root}

    def _layer(self) -> bytes:
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as layer:
            for name, mode in self.folders.items():
                entry = tarfile.TarInfo(name)
                entry.type, entry.mode = tarfile.DIRTYPE, mode
                layer.addfile(entry)
            for name, what in self.files.items():
                _add(layer, name, what if isinstance(what, bytes) else what.read_bytes())
            for name, to in self.links.items():
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, to
                layer.addfile(entry)
        return content.getvalue()


def system_images(coredns: Path) -> list[Image]:
    """Return the images that every node has: pause, busybox, CoreDNS and the host's Python."""
    applets = subprocess.run(
        [BUSYBOX_PROGRAM, "--list"], capture_output=True, text=True, check=True, timeout=10
    ).stdout.split()
    busybox: dict[str, Path | bytes] = {"bin/busybox": BUSYBOX_PROGRAM}
    links = {f"bin/{name}": "busybox" for name in applets if name != "busybox"}
    # Links to the folders that the host's /usr is mounted over, in Debian's layout.
    merged = {name: f"usr/{name}" for name in ("bin", "lib", "lib64", "sbin")}
    users = b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"
    return [
        Image(PAUSE, busybox, entrypoint=("/bin/busybox", "sleep", "infinity")),
        Image(BUSYBOX, busybox | {"etc/passwd": users}, links, {"tmp": 0o1777}),
        Image(COREDNS, {"coredns": coredns}, entrypoint=("/coredns",)),
        Image(HOST, {"etc/passwd": users}, merged, {"tmp": 0o1777, "usr": 0o755}),
    ]


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o755
    archive.addfile(entry, io.BytesIO(content))
