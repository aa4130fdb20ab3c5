"""OCI image layouts as one file: blobs named by their digest, a manifest, an index.

`ctr images import FILE` and `skopeo copy oci-archive:FILE` read them. The same content gives the
same bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
INDEX: Final = "application/vnd.oci.image.index.v1+json"
IMAGE_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
IMAGE_LAYER: Final = "application/vnd.oci.image.layer.v1.tar+gzip"
HELM_CONFIG: Final = "application/vnd.cncf.helm.config.v1+json"
HELM_CONTENT: Final = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
LEVEL = 6
"""Compression level of gzip, from 1 to 9."""


@dataclass(frozen=True)
class Blob:
    """A piece of content; large content stays in its file."""

    media_type: str
    content: bytes | Path
    digest: str
    size: int
    """Size in bytes."""

    def described(self, **more: Any) -> dict[str, Any]:
        """Return the OCI descriptor of this blob, with further fields."""
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size} | more


@dataclass(frozen=True)
class Layer:
    """A layer of an image."""

    blob: Blob
    diff_id: str
    """Digest of the tar inside the compressed blob."""


def blob(media_type: str, content: bytes | Path) -> Blob:
    """Return content, or a file's content, as a blob."""
    if isinstance(content, bytes):
        return Blob(media_type, content, _digest(hashlib.sha256(content)), len(content))
    with content.open("rb") as file:
        digest = _digest(hashlib.file_digest(file, "sha256"))
    return Blob(media_type, content, digest, content.stat().st_size)


def write_layer(target: Path, fill: Callable[[tarfile.TarFile], None]) -> Layer:
    """Write a compressed layer of an image to a file; `fill` adds its content."""
    with (
        target.open("wb") as file,
        gzip.GzipFile("", "wb", LEVEL, fileobj=file, mtime=0) as packed,
    ):
        plain = _Hashed(packed)
        with tarfile.open(fileobj=plain, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            fill(archive)
    return Layer(blob(IMAGE_LAYER, target), _digest(plain.hash))


def image_config(
    *,
    architecture: str,
    created: str,
    process: Mapping[str, Any],
    layers: Iterable[tuple[Layer, str]],
) -> Blob:
    """Return an image's config: how a container starts, and its layers with their origins."""
    layers = list(layers)
    config = {
        "architecture": architecture,
        "os": "linux",
        "created": created,
        "config": process,
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer, _ in layers]},
        "history": [{"created": created, "created_by": origin} for _, origin in layers],
    }
    return blob(IMAGE_CONFIG, as_json(config))


def write_archive(
    target: Path,
    *,
    config: Blob,
    layers: Iterable[Blob],
    annotations: Mapping[str, str],
    index_annotations: Mapping[str, str],
    stamp: int,
    platform: Mapping[str, str] | None = None,
) -> None:
    """Write a layout with one manifest.

    Args:
        target: File to write.
        config: Config of the image or chart.
        layers: Layers, lowest first.
        annotations: Annotations of the manifest.
        index_annotations: Annotations of the index, which name the manifest.
        stamp: Modification time of all entries, in seconds since 1970.
        platform: Platform in the index, if any.
    """
    layers = list(layers)
    manifest = blob(
        MANIFEST,
        as_json(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": config.described(),
                "layers": [layer.described() for layer in layers],
                "annotations": annotations,
            }
        ),
    )
    described = manifest.described(annotations=index_annotations)
    if platform:
        described["platform"] = platform
    index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [described]}
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as archive:
        add(archive, "oci-layout", as_json({"imageLayoutVersion": "1.0.0"}), stamp)
        add(archive, "index.json", as_json(index), stamp)
        for name, content in {
            f"blobs/{each.digest.replace(':', '/')}": each.content
            for each in (manifest, config, *layers)
        }.items():
            add(archive, name, content, stamp)


def add(
    archive: tarfile.TarFile, name: str, content: bytes | Path, stamp: int, mode: int = 0o644
) -> None:
    """Add a file that root owns to an archive."""
    entry = tarfile.TarInfo(name)
    entry.mtime, entry.mode = stamp, mode
    if isinstance(content, bytes):
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    else:
        entry.size = content.stat().st_size
        with content.open("rb") as file:
            archive.addfile(entry, file)


def as_json(value: object) -> bytes:
    """Return a value as compact JSON with sorted keys."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


class _Hashed(io.RawIOBase):
    """Forwards what is written to a file, and computes its digest."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile) -> None:
        self._file = file
        self.hash = hashlib.sha256()

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Write data and add it to the digest."""
        self.hash.update(data)
        return self._file.write(data)


def _digest(hashed: Any) -> str:
    return f"sha256:{hashed.hexdigest()}"
