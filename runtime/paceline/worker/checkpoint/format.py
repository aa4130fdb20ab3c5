"""The format of checkpoints on disk: what they consist of, and how to find and read one (R19, C1).

    <path>/v<version>/            one checkpoint; it has this name only when it is complete
        manifest.json             job, version and generation; size and checksum of each file
        log.msgpack               the round log as plain data: leases, counters, settings
        model.safetensors         weights and buffers by the model's own names, for any reader
        state.json                optimizer and scheduler without their tensors
        state.safetensors         the tensors that state.json names by number
    <path>/v<version>/shard-<j>/  instead, where ranks share a model: the same of each shard (R53)
    <path>/.writing-*             in progress, or left by a process that was killed

A checkpoint is data. Nothing in it is ever unpickled, because a pickle is a program and many may
write to a shared folder. Nothing here writes (see `worker.checkpoint.writer`). A checkpoint that is
damaged, or belongs to another job, model or data set, is an error with a remedy. It is never a
reason to begin from zero.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from paceline_api.bounded import read_file
from paceline_api.decoding import UNDECODABLE
from paceline_api.errors import printable
from paceline_api.ids import GenerationId
from safetensors import SafetensorError
from safetensors.torch import load_file

from paceline.core.protocol.records import DataPlan
from paceline.core.protocol.snapshot import Kept, LogSnapshot
from paceline.errors import CheckpointError, StateError
from paceline.worker.state.codec import read_header

FORMAT: Final = 3
MANIFEST: Final = "manifest.json"
LOG: Final = "log.msgpack"
HEADER: Final = "state.json"
MODEL: Final = "model.safetensors"
STATE: Final = "state.safetensors"
NEEDED: Final = (LOG, MODEL, HEADER, STATE)
"""Files that every checkpoint has, beside its manifest."""
MANIFEST_BYTES_MAX: Final = 1_000_000
NAME_CHARS_MAX: Final = 60
"""Upper bound on the length of a file's name in an error, in characters."""
SHARD: Final = "shard-"
CHUNK_BYTES: Final = 1 << 20
LOOKS: Final = 5
"""Number of attempts to find the newest checkpoint, which may be replaced in between."""
START_AFRESH: Final = (
    "to train from the beginning, remove the folder or change spec.checkpoint.path"
)


class File(msgspec.Struct, frozen=True):
    """A file of a checkpoint, with its size in bytes and its CRC-32."""

    name: str
    size: int
    crc32: int


class Manifest(msgspec.Struct, frozen=True):
    """The description of a checkpoint (R19). It is written after all other files."""

    format: int
    job: str
    version: int
    generation: GenerationId
    """Id of the last GEN record in the log."""
    digest: str
    """Digest of the log up to this version."""
    request: int
    finished: bool
    weights_hash: int
    layout: str
    """Fingerprint of the parameters' names, shapes and types."""
    plan: DataPlan
    files: tuple[File, ...]
    shards: int = 1
    """Number of ranks that held one copy of the model together (R50)."""

    def kept(self, plan: DataPlan) -> Kept:
        """Return the checkpoint as a rank with this data plan can use it.

        Args:
            plan: The rank's plan. If it has more epochs than the checkpoint's, the end of the
                shorter job is not the end of this one.

        Returns:
            The checkpoint's place in the log, and whether the job has ended with it.
        """
        finished = self.finished and plan == self.plan
        return Kept(self.generation, self.version, self.digest, self.request, finished)


@dataclass(frozen=True, slots=True)
class Identity:
    """The properties that a checkpoint must have to be of use to a rank."""

    job: str
    layout: str
    plan: DataPlan
    shard: int = 0
    """Index of the model's shard that the rank holds."""
    shards: int = 1
    """Number of ranks that hold one copy of the model together."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that was read and checked, with its tensors on the host."""

    log: LogSnapshot
    header: dict[str, Any]
    model: dict[str, torch.Tensor]
    buffers: list[torch.Tensor]


def folder_of(path: Path, version: int) -> Path:
    """Return the folder of a published version."""
    return path / f"v{version}"


def part_of(folder: Path, wanted: Identity) -> Path:
    """Return the part of a checkpoint's folder that this rank writes and reads."""
    return folder if wanted.shards == 1 else folder / f"{SHARD}{wanted.shard}"


def shards_in(folder: Path) -> list[Path]:
    """Return the folders of shards; empty without shards, or if the folder does not exist."""
    return sorted(folder.glob(f"{SHARD}*"))


def versions(path: Path) -> list[int]:
    """Return the published versions, oldest first; OSError if the folder is unreadable."""
    if not path.exists():
        return []
    names = (p.name[1:] for p in path.iterdir() if p.name.startswith("v"))
    return sorted(int(name) for name in names if name.isdecimal())


def find(path: Path, wanted: Identity) -> Kept | None:
    """Find the newest checkpoint. Cheap: only its manifest is read.

    A CheckpointError is also raised if the newest checkpoint is damaged or does not match.

    Args:
        path: Folder of all checkpoints.
        wanted: What the checkpoint must match.

    Returns:
        The newest checkpoint; None if there is none.

    Raises:
        CheckpointError: The folder cannot be listed, or changes all the time.
    """
    for _ in range(LOOKS):
        try:
            known = versions(path)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoints in {path} cannot be listed: {_words(error)}",
                hint="make spec.checkpoint.path a folder that every rank can read and write",
            ) from None
        if not known:
            return None
        folder = folder_of(path, known[-1])
        try:
            return check(folder, wanted).kept(wanted.plan)
        except CheckpointError:
            if folder.exists():
                raise
    raise CheckpointError(f"the checkpoints in {path} change all the time", hint=START_AFRESH)


def check(folder: Path, wanted: Identity) -> Manifest:
    """Check that a checkpoint matches and that its files have the right sizes.

    A CheckpointError is also raised if the manifest or a shard is missing.

    Args:
        folder: Folder of the checkpoint.
        wanted: What the checkpoint must match.

    Returns:
        The manifest of this rank's part.

    Raises:
        CheckpointError: The checkpoint belongs to another job, model, data plan or number of
            shards.
        _damaged: Its files are not those of its manifest; this is a CheckpointError, too.
    """
    if (shards := _shards_of(folder)) != wanted.shards:
        raise CheckpointError(
            f"checkpoint {folder} is of groups of {shards} ranks that hold one copy of the model "
            f"together, and this job has groups of {wanted.shards}",
            hint=f"set spec.parallelism.model to {shards}; {START_AFRESH}",
        )
    folder = part_of(folder, wanted)
    manifest = read_manifest(folder)
    if manifest.job != wanted.job:
        raise CheckpointError(
            f"checkpoint {folder} is of job {manifest.job}, not of {wanted.job}",
            hint="give each job a spec.checkpoint.path of its own",
        )
    if manifest.layout != wanted.layout:
        raise CheckpointError(
            f"checkpoint {folder} is of a model with other parameters than this script's",
            hint=f"use the model that it was made with; {START_AFRESH}",
        )
    if not manifest.plan.goes_on_as(wanted.plan):
        raise CheckpointError(
            f"checkpoint {folder} was made with another data plan than this script's: "
            f"{manifest.plan.differences(wanted.plan)}",
            hint="use the same data set, batch size and seed, and as many epochs or more; "
            f"{START_AFRESH}",
        )
    listed = {file.name for file in manifest.files}
    if lacking := set(NEEDED) - listed:
        raise _damaged(folder, f"{MANIFEST} does not list {', '.join(sorted(lacking))}")
    if others := listed - set(NEEDED):
        # The name may be a path out of the folder, or no file name at all.
        shown = printable(min(others))[:NAME_CHARS_MAX]
        raise _damaged(folder, f"{MANIFEST} lists {shown}, which no checkpoint has")
    for file in manifest.files:
        path = folder / file.name
        size = path.stat().st_size if path.is_file() else -1
        if size != file.size:
            what = "is missing" if size < 0 else f"has {size} bytes instead of {file.size}"
            raise _damaged(folder, f"{file.name} {what}")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint, or of one shard.

    Args:
        folder: Folder of the checkpoint or of the shard.

    Returns:
        The manifest.

    Raises:
        CheckpointError: It has the format of another version of Paceline.
        _damaged: It cannot be read; this is a CheckpointError, too.
    """
    try:
        data = read_file(folder / MANIFEST, MANIFEST_BYTES_MAX)
        manifest = msgspec.json.decode(data, type=Manifest)
    except OSError as error:
        raise _damaged(folder, f"{MANIFEST} cannot be read: {_words(error)}") from None
    except UNDECODABLE as error:
        raise _damaged(folder, f"{MANIFEST} is not a manifest: {error}") from None
    if manifest.format != FORMAT:
        raise CheckpointError(
            f"checkpoint {folder} has format {manifest.format}, this version reads {FORMAT}",
            hint=f"use the version of Paceline that wrote it; {START_AFRESH}",
        )
    return manifest


def load(path: Path, kept: Kept, wanted: Identity) -> Loaded:
    """Load a whole checkpoint and check every byte of it.

    Args:
        path: Folder of all checkpoints.
        kept: The checkpoint that the ranks agreed on.
        wanted: What the checkpoint must match.

    Returns:
        The checkpoint, with all tensors on the host.

    Raises:
        CheckpointError: The folder holds another checkpoint under this version.
        _damaged: A file is damaged; this is a CheckpointError, too.
    """
    folder = folder_of(path, kept.version)
    manifest = check(folder, wanted)
    on_disk = manifest.kept(wanted.plan)
    if on_disk != kept:
        raise CheckpointError(
            f"checkpoint {folder} is another one than the group agreed on: {on_disk} "
            f"instead of {kept}",
            hint="make spec.checkpoint.path one folder that all ranks share",
        )
    folder = part_of(folder, wanted)
    for file in manifest.files:
        if file_of(folder / file.name) != file:
            raise _damaged(folder, f"the bytes of {file.name} have changed")
    try:
        log = msgspec.msgpack.decode((folder / LOG).read_bytes(), type=LogSnapshot)
        header = read_header((folder / HEADER).read_bytes())
        model, state = _tensors(folder / MODEL), _tensors(folder / STATE)
        buffers = [state[str(number)] for number in range(len(state))]
    except KeyError as error:
        raise _damaged(folder, f"{STATE} lacks tensor {error}") from None
    except StateError as error:
        raise _damaged(folder, f"it cannot be loaded: {error.message}") from None
    except (OSError, ValueError, *UNDECODABLE) as error:
        raise _damaged(folder, f"it cannot be loaded: {error}") from None
    return Loaded(log=log, header=header, model=model, buffers=buffers)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file.

    Returns:
        The tensors by name.

    Raises:
        ValueError: The file is something else, such as a pickle under this name.
    """
    try:
        # Read instead of mapped: a file that is truncated later must not kill the process.
        return load_file(path, backend="pread")
    except SafetensorError as error:
        raise ValueError(f"{path.name} is not a safetensors file: {error}") from None


def file_of(path: Path) -> File:
    """Return a file's name, size and checksum, as read from the disk."""
    crc = size = 0
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
    return File(path.name, size, crc)


def _shards_of(folder: Path) -> int:
    """Return the number of shards of which a checkpoint was made.

    Returns:
        The number; 1 if each rank held the whole model.

    Raises:
        _damaged: Some of the shards are missing; this is a CheckpointError.
    """
    parts = shards_in(folder)
    if not parts:
        return 1
    made = read_manifest(parts[0]).shards
    if len(parts) != made:
        raise _damaged(folder, f"it has {len(parts)} of {made} shards")
    return made


def _damaged(folder: Path, why: str) -> CheckpointError:
    """Return the error for a damaged checkpoint."""
    whole = folder.parent if folder.name.startswith(SHARD) else folder
    return CheckpointError(
        f"checkpoint {folder} is damaged: {why}",
        hint=f"remove {whole} to go on from the one before it, or bring the file back",
    )


def _words(error: OSError) -> str:
    """Return the system's text for an error."""
    return error.strerror or str(error)
