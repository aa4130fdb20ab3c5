"""Writes checkpoints on a thread of its own, one order after the other, and answers each order.

A checkpoint is written under a name that no reader looks for, and flushed to the disk. Then one
rename gives it its name (R19). Until then the folder belongs to this rank, or to its group. A kill
at any moment leaves the checkpoint before it intact. An error, of the disk or of this program, is
an answer like any other: training does not depend on it, and the thread takes the next order.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Final

import msgspec
import torch
from paceline_api.times import NS_PER_S
from safetensors import SafetensorError
from safetensors.torch import save_file

from paceline import private_files
from paceline.clock import now_ns
from paceline.core.protocol.snapshot import LogSnapshot
from paceline.core.rank.events import Published, Written
from paceline.errors import CheckpointError
from paceline.worker.checkpoint import format as disk
from paceline.worker.state.bit_sums import hash_of, hash_of_model
from paceline.worker.state.committed import StateCopy
from paceline.worker.state.flat import as_reals

log = logging.getLogger("paceline.checkpoint")

WRITING: Final = ".writing-"
"""Prefix of the folder of a checkpoint that is not published yet."""
ROOM_BYTES: Final = 1 << 20
"""Disk space that is needed beside the tensors, for manifest, log and headers, in bytes."""

EXPECTED: Final = (OSError, SafetensorError, CheckpointError)
"""Errors that a disk may cause; any other one is a mistake of this program."""

Answer = Written | Published
Order = Callable[[], Answer | None]


class CheckpointWriter:
    """The writer of one rank, with its thread.

    The communication thread gives the orders. `post` is called with the answers, on the writer's
    thread.
    """

    def __init__(
        self,
        path: Path,
        identity: disk.Identity,
        *,
        keep: int,
        post: Callable[[Answer], None],
        pid: int,
    ) -> None:
        """Create a writer; its thread starts with the first order.

        Args:
            path: Folder of all checkpoints of the job.
            identity: Job, model, data and shard of this rank.
            keep: Number of checkpoints to keep.
            post: Takes the answers, on the writer's thread.
            pid: A number that only the ranks of one group share. They write into one folder, which
                the first of them publishes.
        """
        self.hidden_s = 0.0
        """Seconds for which the writer has worked beside training."""
        self._path, self._identity, self._keep, self._post = path, identity, keep, post
        self._pid = pid
        self._folder: Path | None = None
        """Folder of the checkpoint that is being written, or is written and not published."""
        self._orders: SimpleQueue[Order | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="paceline-checkpoint", daemon=True)

    def save(self, copy: StateCopy, snapshot: LogSnapshot, *, finished: bool) -> None:
        """Write a checkpoint; answered by Written. The writer owns the copy from now on."""
        self._order(lambda: self._save(copy, snapshot, finished=finished))

    def publish(self, version: int) -> None:
        """Give the checkpoint that was written last its name; answered by Published."""
        self._order(lambda: self._publish(version))

    def drop(self) -> None:
        """Throw away the checkpoint that was written last."""
        self._order(self._drop)

    def close(self, timeout_s: float) -> None:
        """End the thread after the orders that it has.

        It removes what is not published. If the disk is too slow for that, the next publisher does
        it.

        Args:
            timeout_s: Upper bound on the wait, in seconds.
        """
        if self._thread.is_alive():
            self._orders.put(self._drop)
            self._orders.put(None)
            self._thread.join(timeout_s)

    # ---- the writer's thread --------------------------------------------------------------

    def _order(self, order: Order) -> None:
        if not self._thread.is_alive():
            self._thread.start()
        self._orders.put(order)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            begun_ns = now_ns()
            answer = order()
            self.hidden_s += (now_ns() - begun_ns) / NS_PER_S
            if answer is not None:
                self._post(answer)

    def _save(self, copy: StateCopy, snapshot: LogSnapshot, *, finished: bool) -> Answer:
        self._drop()
        version = snapshot.version
        self._folder = self._path / f"{WRITING}{version}-{socket.gethostname()}-{self._pid}"
        folder = disk.part_of(self._folder, self._identity)
        problem = ""
        try:
            _make_folder(self._path, folder)
            self._check_room(copy)
            files = _write_files(folder, copy, snapshot)
            manifest = disk.Manifest(
                format=disk.FORMAT,
                job=self._identity.job,
                version=version,
                generation=snapshot.gen.id,
                digest=snapshot.digest,
                request=snapshot.request,
                finished=finished,
                weights_hash=hash_of_model(copy.weights, [hash_of([t]) for t in copy.frozen]),
                layout=self._identity.layout,
                plan=snapshot.plan,
                files=files,
                shards=self._identity.shards,
            )
            _write(folder / disk.MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
            _sync(folder)
        except Exception as error:
            problem = self._failed(version, error)
        return Written(version, problem)

    def _check_room(self, copy: StateCopy) -> None:
        """Check that the disk has space for the checkpoint.

        A disk that fills up in the middle would be reported by an error of a library instead.

        Raises:
            OSError: There is too little space.
        """
        needed = sum(t.nbytes for t in (*copy.model.values(), *copy.buffers)) + ROOM_BYTES
        free = shutil.disk_usage(self._path).free
        if free < needed:
            raise OSError(f"{needed:,} bytes are needed in {self._path}, {free:,} are free")

    def _publish(self, version: int) -> Answer | None:
        folder, self._folder = self._folder, None
        if self._identity.shard:
            return None
        target = disk.folder_of(self._path, version)
        problem = ""
        try:
            if folder is None:
                raise OSError("it was thrown away")
            if self._identity.shards > 1:
                if len(disk.shards_in(folder)) < self._identity.shards:
                    raise OSError("a shard of it was thrown away")
                _sync(folder)
            if target.exists():
                self._replace(target, folder)
            else:
                folder.rename(target)
            _sync(self._path)
            self._clean(version)
        except Exception as error:
            self._folder = folder
            problem = self._failed(version, error)
        return Published(version, problem)

    def _replace(self, target: Path, folder: Path) -> None:
        """Publish a version that exists already: another rank's, or one of a history that ended.

        The existing one is kept if both describe the same state, and replaced otherwise.
        """
        with contextlib.suppress(CheckpointError):
            manifests = [
                disk.read_manifest(disk.part_of(f, self._identity)) for f in (target, folder)
            ]
            if manifests[0].kept(manifests[0].plan) == manifests[1].kept(manifests[1].plan):
                shutil.rmtree(folder)
                return
        shutil.rmtree(target)
        folder.rename(target)

    def _failed(self, version: int, error: Exception) -> str:
        """Clean up after an error and describe it.

        Returns:
            A text for people; empty if a newer checkpoint is published, whose publisher may have
            removed this one.
        """
        why = _reason(error)
        if not isinstance(error, EXPECTED):
            log.error("checkpoint of version %d: unexpected", version, exc_info=error)
        self._drop()
        try:
            newest = max(disk.versions(self._path), default=-1)
        except OSError:
            newest = -1
        if newest > version:
            return ""
        log.warning("checkpoint of version %d in %s: %s", version, self._path, why)
        return why

    def _drop(self) -> None:
        if self._folder is not None:
            shutil.rmtree(disk.part_of(self._folder, self._identity), ignore_errors=True)
            with contextlib.suppress(OSError):  # it is gone, or holds another shard
                self._folder.rmdir()
            self._folder = None

    def _clean(self, published: int) -> None:
        """Keep the newest checkpoints; remove what killed writers left up to this version."""
        for version in disk.versions(self._path)[: -self._keep]:
            shutil.rmtree(disk.folder_of(self._path, version), ignore_errors=True)
        for left in self._path.glob(f"{WRITING}*"):
            number = left.name.removeprefix(WRITING).partition("-")[0]
            if number.isdecimal() and int(number) <= published:
                shutil.rmtree(left, ignore_errors=True)


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or pairs of reals for a complex type that the format lacks."""
    return tensor if tensor.dtype is torch.complex64 else as_reals(tensor)


def _write_files(folder: Path, copy: StateCopy, snapshot: LogSnapshot) -> tuple[disk.File, ...]:
    model = {name: _storable(tensor) for name, tensor in copy.model.items()}
    state = {str(n): _storable(tensor) for n, tensor in enumerate(copy.buffers)}
    save_file(model, folder / disk.MODEL)
    save_file(state, folder / disk.STATE)
    readable = folder.stat().st_mode & 0o666
    for path in (folder / disk.MODEL, folder / disk.STATE):
        path.chmod(readable)  # safetensors lets only the owner read them
        _sync(path)
    _write(folder / disk.LOG, msgspec.msgpack.encode(snapshot))
    _write(folder / disk.HEADER, json.dumps(copy.header).encode())
    return tuple(disk.file_of(path) for path in sorted(folder.iterdir()))


def _make_folder(kept: Path, folder: Path) -> None:
    """Make a folder as readable as that of all checkpoints, which its user may have shared."""
    kept.mkdir(parents=True, exist_ok=True)
    mode = 0o700 | (kept.stat().st_mode & 0o777)
    for made in (*reversed(folder.relative_to(kept).parents[:-1]), folder.relative_to(kept)):
        (kept / made).mkdir(mode, exist_ok=kept / made != folder)


def _write(path: Path, data: bytes) -> None:
    readable = path.parent.stat().st_mode & 0o666
    with open(private_files.create(path, readable), "wb") as stream:  # noqa: PTH123
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk; a rename is durable only when its folder is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    """Return a text for an error that is never empty, since an empty one would mean success."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    words = str(error).partition("\n")[0]
    if isinstance(error, EXPECTED) and words:
        return words
    return f"{type(error).__name__}: {words}".removesuffix(": ")
