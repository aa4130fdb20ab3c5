"""Checkpoints on disk: what they are made of, which one is the newest, how one is read (R19, C1).

    <path>/v<version>/            one checkpoint; it has this name only when it is complete
        manifest.json             whose it is, of which version, size and checksum of each file
        log.msgpack               the round log as plain data: leases, counters, settings
        model.safetensors         weights and buffers by the model's own names, for any reader
        state.json                optimizer and scheduler without their tensors
        state.safetensors         the tensors that state.json names by number
    <path>/v<version>/shard-<j>/  instead, where ranks share a model: the same of each shard (R53)
    <path>/.writing-*             under way, or left by a process that was killed

A checkpoint is data: nothing of it is ever unpickled, since a pickle is a program and many may
write to a shared folder. Nothing here writes (`worker.checkpoint.writer`). A checkpoint that is
damaged, or of another job, model or data set, is an error with a way out, never a reason to begin
from zero.
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
from safetensors import SafetensorError
from safetensors.torch import load_file

from paceline.core.protocol.ids import GenerationId
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
MANIFEST_BYTES_MAX: Final = 1_000_000
NAME_CHARS_MAX: Final = 60
"""Of a name in an error."""
SHARD: Final = "shard-"
CHUNK_BYTES: Final = 1 << 20
LOOKS: Final = 5
"""The newest one may be replaced by a newer one while it is looked at."""
START_AFRESH: Final = (
    "to train from the beginning, remove the folder or change spec.checkpoint.path"
)


class File(msgspec.Struct, frozen=True):
    name: str
    size: int
    crc32: int


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint is (R19). Written after all other files."""

    format: int
    job: str
    version: int
    generation: GenerationId
    """Last GEN record of the log."""
    digest: str
    """Of the log up to this version."""
    request: int
    finished: bool
    weights_hash: int
    layout: str
    """Fingerprint of the parameters' names, shapes and types."""
    plan: DataPlan
    files: tuple[File, ...]
    shards: int = 1
    """Ranks that held one copy of the model together (R50)."""

    def kept(self, plan: DataPlan) -> Kept:
        """Return what a rank with this plan can do with it: the end of a shorter job is not the end
        of one with more epochs."""
        finished = self.finished and plan == self.plan
        return Kept(self.generation, self.version, self.digest, self.request, finished)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a checkpoint must be of to be of use to a rank."""

    job: str
    layout: str
    plan: DataPlan
    shard: int = 0
    """Of the model, which the rank holds."""
    shards: int = 1
    """Ranks that hold one copy of the model together."""


@dataclass(frozen=True, slots=True)
class Loaded:
    log: LogSnapshot
    header: dict[str, Any]
    model: dict[str, torch.Tensor]
    buffers: list[torch.Tensor]


def folder_of(path: Path, version: int) -> Path:
    return path / f"v{version}"


def part_of(folder: Path, wanted: Identity) -> Path:
    """What this rank writes and reads of a checkpoint."""
    return folder if wanted.shards == 1 else folder / f"{SHARD}{wanted.shard}"


def shards_in(folder: Path) -> list[Path]:
    """Empty: each rank holds the whole model, or the folder does not exist."""
    return sorted(folder.glob(f"{SHARD}*"))


def versions(path: Path) -> list[int]:
    """Of the published checkpoints, oldest first. OSError if the folder cannot be read."""
    if not path.exists():
        return []
    names = (p.name[1:] for p in path.iterdir() if p.name.startswith("v"))
    return sorted(int(name) for name in names if name.isdecimal())


def find(path: Path, wanted: Identity) -> Kept | None:
    """The newest checkpoint, None if there is none. Cheap: no file is read but the manifest.

    CheckpointError if the newest one is damaged or of something else."""
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
    """CheckpointError, unless the checkpoint is whole, as far as its sizes tell, and fits."""
    if (found := _shards_of(folder)) != wanted.shards:
        raise CheckpointError(
            f"checkpoint {folder} is of groups of {found} ranks that hold one copy of the model "
            f"together, and this job has groups of {wanted.shards}",
            hint=f"set spec.parallelism.model to {found}; {START_AFRESH}",
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
        # A name may lead out of the folder, or be none.
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
    try:
        data = read_file(folder / MANIFEST, MANIFEST_BYTES_MAX)
        manifest = msgspec.json.decode(data, type=Manifest)
    except OSError as error:
        raise _damaged(folder, f"{MANIFEST} cannot be read: {_words(error)}") from None
    except UNDECODABLE as error:
        raise _damaged(folder, f"{MANIFEST} is no manifest: {error}") from None
    if manifest.format != FORMAT:
        raise CheckpointError(
            f"checkpoint {folder} has format {manifest.format}, this version reads {FORMAT}",
            hint=f"use the version of Paceline that wrote it; {START_AFRESH}",
        )
    return manifest


def load(path: Path, kept: Kept, wanted: Identity) -> Loaded:
    """The whole checkpoint, every byte checked. Raises CheckpointError."""
    folder = folder_of(path, kept.version)
    manifest = check(folder, wanted)
    found = manifest.kept(wanted.plan)
    if found != kept:
        raise CheckpointError(
            f"checkpoint {folder} is another one than the group agreed on: {found} "
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
    """ValueError if the file is something else, such as a pickle under this name."""
    try:
        # Read, not mapped: a file that is cut later must not kill the process.
        return load_file(path, backend="pread")
    except SafetensorError as error:
        raise ValueError(f"{path.name} is no safetensors file: {error}") from None


def file_of(path: Path) -> File:
    """Size and checksum, read from the disk."""
    crc = size = 0
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
    return File(path.name, size, crc)


def _shards_of(folder: Path) -> int:
    """Of how many it was made; CheckpointError if some are gone."""
    parts = shards_in(folder)
    if not parts:
        return 1
    made = read_manifest(parts[0]).shards
    if len(parts) != made:
        raise _damaged(folder, f"it has {len(parts)} of {made} shards")
    return made


def _damaged(folder: Path, why: str) -> CheckpointError:
    whole = folder.parent if folder.name.startswith(SHARD) else folder
    return CheckpointError(
        f"checkpoint {folder} is damaged: {why}",
        hint=f"remove {whole} to go on from the one before it, or bring the file back",
    )


def _words(error: OSError) -> str:
    return error.strerror or str(error)
