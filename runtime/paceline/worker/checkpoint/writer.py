"""Writes checkpoints in a thread of its own, one order after the other, and says what became of it.

A checkpoint is written under a name that nobody reads, brought to the disk, and gets its name by
one rename (R19); the folder is ours alone until then. A kill at any moment leaves the one before.
An error of the disk is an answer like any other: training does not depend on it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Final

import msgspec
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from paceline.clock import NS_PER_S, now_ns
from paceline.core.protocol.snapshot import LogSnapshot
from paceline.core.rank.events import Published, Written
from paceline.errors import CheckpointError
from paceline.worker.checkpoint import format as disk
from paceline.worker.state.committed import StateCopy, hash_of

log = logging.getLogger("paceline.checkpoint")

WRITING: Final = ".writing-"
ROOM_BYTES: Final = 1 << 20
"""Beside the tensors: manifest, log, metadata."""

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
    ) -> None:
        self.hidden_s = 0.0
        """Spent in the background, beside training."""
        self._path, self._identity, self._keep, self._post = path, identity, keep, post
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
        folder = self._path / f"{WRITING}{version}-{socket.gethostname()}-{os.getpid()}"
        self._folder = folder
        problem = ""
        try:
            folder.mkdir(parents=True)
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
                weights_hash=hash_of(copy.weights),
                layout=self._identity.layout,
                plan=snapshot.plan,
                files=files,
            )
            _write(folder / disk.MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
            _sync_folder(folder)
        except (OSError, RuntimeError, CheckpointException) as error:
            problem = self._failed(version, error)
        return Written(version, problem)

    def _check_room(self, copy: StateCopy) -> None:
        """A disk that fills up in the middle would be reported in torch's words."""
        needed = sum(t.nbytes for t in (*copy.model.values(), *copy.buffers)) + ROOM_BYTES
        free = shutil.disk_usage(self._path).free
        if free < needed:
            raise OSError(f"{needed:,} bytes are needed in {self._path}, {free:,} are free")

    def _publish(self, version: int) -> Answer:
        folder, self._folder = self._folder, None
        target = disk.folder_of(self._path, version)
        problem = ""
        try:
            if folder is None:
                raise OSError("it was thrown away")
            if target.exists():
                self._replace(target, folder)
            else:
                folder.rename(target)
            _sync_folder(self._path)
            self._clean(version)
        except (OSError, CheckpointError) as error:
            self._folder = folder
            problem = self._failed(version, error)
        return Published(version, problem)

    def _replace(self, target: Path, folder: Path) -> None:
        """The same version was published before: by another rank, or in a history that ended."""
        with contextlib.suppress(CheckpointError):
            if disk.read_manifest(target).kept == disk.read_manifest(folder).kept:
                shutil.rmtree(folder)
                return
        shutil.rmtree(target)
        folder.rename(target)

    def _failed(self, version: int, error: BaseException) -> str:
        """In words; empty if a newer one is published, whose publisher has removed this one."""
        why = _reason(error)
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
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _clean(self, published: int) -> None:
        """Keep the newest ones; what killed writers have left of versions before goes too."""
        for version in disk.versions(self._path)[: -self._keep]:
            shutil.rmtree(disk.folder_of(self._path, version), ignore_errors=True)
        for left in self._path.glob(f"{WRITING}*"):
            number = left.name.removeprefix(WRITING).partition("-")[0]
            if number.isdecimal() and int(number) <= published:
                shutil.rmtree(left, ignore_errors=True)


def _write_files(folder: Path, copy: StateCopy, snapshot: LogSnapshot) -> tuple[disk.File, ...]:
    tensors = {disk.MODEL + name: tensor for name, tensor in copy.model.items()}
    tensors |= {f"{disk.STATE}{n}": tensor for n, tensor in enumerate(copy.buffers)}
    with warnings.catch_warnings():
        # One process writes: that torch.distributed is not used is the intent.
        warnings.simplefilter("ignore", UserWarning)
        dcp_save(tensors, storage_writer=FileSystemWriter(folder), no_dist=True)
    _write(folder / disk.LOG, msgspec.msgpack.encode(snapshot))
    _write(folder / disk.HEADER, json.dumps(copy.header).encode())
    return tuple(disk.file_of(path) for path in sorted(folder.iterdir()))


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(path: Path) -> None:
    """A rename or a new file is durable only when its folder is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    """The words of the system call that failed, wherever torch has put them."""
    inner: BaseException | None = error
    if isinstance(error, CheckpointException) and error.failures:
        inner = next(iter(error.failures.values()))[0]
    seen: list[BaseException] = []
    while inner is not None and inner not in seen:
        if isinstance(inner, OSError):
            return inner.strerror or str(inner)
        seen.append(inner)
        inner = inner.__cause__ or inner.__context__
    return str(seen[0] if seen else error).partition("\n")[0]
