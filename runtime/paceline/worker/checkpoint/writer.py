"""Writes checkpoints in a thread of its own, one order after the other, and says what became of it.

A checkpoint is written under a name that nobody reads, brought to the disk, and gets its name by
one rename (R19); the folder is ours alone until then. A kill at any moment leaves the one before.
An error, of the disk or our own, is an answer like any other: training does not depend on it, and
the thread takes the next order.
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
from safetensors import SafetensorError
from safetensors.torch import save_file

from paceline import private_files
from paceline.clock import NS_PER_S, now_ns
from paceline.core.protocol.snapshot import LogSnapshot
from paceline.core.rank.events import Published, Written
from paceline.errors import CheckpointError
from paceline.worker.checkpoint import format as disk
from paceline.worker.state.bit_sums import hash_of, hash_of_model
from paceline.worker.state.committed import StateCopy
from paceline.worker.state.flat import as_reals

log = logging.getLogger("paceline.checkpoint")

WRITING: Final = ".writing-"
ROOM_BYTES: Final = 1 << 20
"""Beside the tensors: manifest, log, headers."""

EXPECTED: Final = (OSError, SafetensorError, CheckpointError)
"""What a disk does; anything else is a mistake of this program."""

Answer = Written | Published
Order = Callable[[], Answer | None]


class CheckpointWriter:
    """`post` gets the answers, on the writer's thread."""

    def __init__(
        self,
        path: Path,
        identity: disk.Identity,
        *,
        keep: int,
        post: Callable[[Answer], None],
        pid: int,
    ) -> None:
        """`pid`: a number that only ranks of the same group have, which write into one folder. The
        first of them publishes it."""
        self.hidden_s = 0.0
        """Spent in the background, beside training."""
        self._path, self._identity, self._keep, self._post = path, identity, keep, post
        self._pid = pid
        self._folder: Path | None = None
        """Under way, or written and not published."""
        self._orders: SimpleQueue[Order | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="paceline-checkpoint", daemon=True)

    def save(self, copy: StateCopy, snapshot: LogSnapshot, *, finished: bool) -> None:
        """Answered by Written."""
        self._order(lambda: self._save(copy, snapshot, finished=finished))

    def publish(self, version: int) -> None:
        """What was written last; answered by Published."""
        self._order(lambda: self._publish(version))

    def drop(self) -> None:
        """Throw away what was written last."""
        self._order(self._drop)

    def close(self, timeout_s: float) -> None:
        """What is not published goes, unless the disk is too slow: then the next publisher does
        that."""
        if self._thread.is_alive():
            self._orders.put(self._drop)
            self._orders.put(None)
            self._thread.join(timeout_s)

    # ---- the thread -----------------------------------------------------------------------

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
        """A disk that fills up in the middle would be reported in torch's words."""
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
        """The same version was published before: by another rank, or in a history that ended."""
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
        """In words; empty if a newer one is published, whose publisher has removed this one."""
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
            with contextlib.suppress(OSError):  # it is gone, or another shard's part is in it
                self._folder.rmdir()
            self._folder = None

    def _clean(self, published: int) -> None:
        """Keep the newest ones; what killed writers have left of versions before goes too."""
        for version in disk.versions(self._path)[: -self._keep]:
            shutil.rmtree(disk.folder_of(self._path, version), ignore_errors=True)
        for left in self._path.glob(f"{WRITING}*"):
            number = left.name.removeprefix(WRITING).partition("-")[0]
            if number.isdecimal() and int(number) <= published:
                shutil.rmtree(left, ignore_errors=True)


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    """The format knows complex64; other complex numbers go as pairs of reals."""
    return tensor if tensor.dtype is torch.complex64 else as_reals(tensor)


def _write_files(folder: Path, copy: StateCopy, snapshot: LogSnapshot) -> tuple[disk.File, ...]:
    model = {name: _storable(tensor) for name, tensor in copy.model.items()}
    state = {str(n): _storable(tensor) for n, tensor in enumerate(copy.buffers)}
    save_file(model, folder / disk.MODEL)
    save_file(state, folder / disk.STATE)
    readable = folder.stat().st_mode & 0o666
    for path in (folder / disk.MODEL, folder / disk.STATE):
        path.chmod(readable)  # the library leaves them to their owner alone
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
    """Of a folder too: a rename or a new file is durable only when its folder is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    """Never empty: no words would say that it went well."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    words = str(error).partition("\n")[0]
    if isinstance(error, EXPECTED) and words:
        return words
    return f"{type(error).__name__}: {words}".removesuffix(": ")
