"""Input from run folders, checkpoints and shared memory, which another process has written."""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec
import torch
from paceline.agent.targets import Labels, TargetError, read_target
from paceline.agent.targets import ScrapeTarget as ScrapeTarget
from paceline.cli.table import line
from paceline.core.forecast.book import Book
from paceline.core.messages import DealtBatch
from paceline.core.protocol.records import DataPlan
from paceline.core.protocol.snapshot import LogSnapshot
from paceline.core.replay import journal
from paceline.errors import CheckpointError, ReplayError, StateError
from paceline.function import start as function_start
from paceline.function.errors import FunctionError
from paceline.function.packed import DESCRIPTION, FOLDER, PROGRAM, Description
from paceline.jobs.core import rendering
from paceline.jobs.local import LocalJobs
from paceline.local import control, index, plan_file
from paceline.local.rundir import LOCK, STATUS
from paceline.telemetry import records
from paceline.worker.checkpoint import format as checkpoints
from paceline.worker.journals import FOLDER as JOURNALS
from paceline.worker.journals import read_journals
from paceline.worker.state.codec import Decoder, Encoder, as_tensor, read_header
from paceline_api.errors import JobFileError
from paceline_api.ids import GenerationId, MemberId
from paceline_api.jobfile import JobFile, read_job_file, read_resolved_job
from paceline_api.settings import ResolvedJob
from paceline_api.status import Outcome, Status
from safetensors.torch import save

from testing.fuzz.samples import json_samples, msgpack_samples
from testing.fuzz.target import Form, Reader, Target, pure

Start = Callable[[ExitStack, Path], Reader]


def _file(name: str, read: Callable[[Path], object]) -> Start:
    """Return a start whose reader passes the input to `read` as a file of that name."""

    def start(_stack: ExitStack, folder: Path) -> Reader:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)

        def reader(data: bytes) -> object:
            path.write_bytes(data)
            return read(path)

        return reader

    return start


# ---- the run folder ------------------------------------------------------------------------------


def _job_file_seeds() -> tuple[bytes, ...]:
    job = json_samples(ResolvedJob)[0]
    return tuple(one.replace(b'{"a":1}', job) for one in json_samples(JobFile)[:1])


def _status_seeds() -> tuple[bytes, ...]:
    outcome = Outcome(complete=False, reason="ScriptFailed", message="it failed", hint="mend it")
    full = msgspec.json.decode(json_samples(Status)[0], type=Status)
    return tuple(
        msgspec.json.encode(msgspec.structs.replace(status, outcome=outcome, stragglers=()))
        for status in (full, Status("job", "", replicas=2))
    )


def _last_status(_stack: ExitStack, folder: Path) -> Reader:
    """Return a reader for the last status of a run, which also renders it."""
    folder.chmod(0o700)
    (folder / LOCK).touch()
    jobs = LocalJobs({}, folder)

    def reader(data: bytes) -> object:
        (folder / STATUS).write_bytes(data)
        status = jobs.status(str(folder))
        line(status.detail, status)
        return rendering.jobs([status], wide=True), rendering.explanation(jobs.explain(str(folder)))

    return reader


_TARGET: Final = ScrapeTarget(("host:80",), Labels("local", "job", "job-0-1", "host"))
_ENTRY: Final = index.RunEntry("job", "/run", "/run/s", 1)


def _journal_seed() -> bytes:
    entries = [
        msgspec.msgpack.decode(one, type=journal.Entry) for one in msgpack_samples(journal.Entry)
    ]
    opened = journal.Opened(journal.JOURNAL_VERSION, MemberId(0, 0, 1))
    return b"".join(journal.pack(one) for one in [opened, *entries])


def _function(_stack: ExitStack, folder: Path) -> Reader:
    """Return a reader for a description and a program, separated by a line end; it runs nothing."""
    (folder / FOLDER).mkdir()

    def reader(data: bytes) -> object:
        description, _, program = data.partition(b"\n")
        (folder / FOLDER / DESCRIPTION).write_bytes(description)
        (folder / FOLDER / PROGRAM).write_bytes(program)
        return function_start.read(folder / FOLDER)

    return reader


_DESCRIPTION: Final = msgspec.json.encode(Description("train", (3, 11)))

# ---- checkpoints ---------------------------------------------------------------------------------

_PLAN: Final = msgspec.json.decode(json_samples(DataPlan)[0], type=DataPlan)
_MANIFEST: Final = checkpoints.Manifest(
    format=checkpoints.FORMAT,
    job="digits",
    version=1,
    generation=GenerationId(1, "a", 1),
    digest="d",
    request=0,
    finished=False,
    weights_hash=1,
    layout="layout",
    plan=_PLAN,
    files=tuple(checkpoints.File(name, 0, 0) for name in checkpoints.NEEDED),
)
_IDENTITY: Final = checkpoints.Identity("digits", "layout", _PLAN)
_STATE: Final = {"step": 1, "rate": 0.5, "moment": torch.ones(2), "of": [(1, 2.0)], "no": None}


def _checkpoint_manifest(_stack: ExitStack, folder: Path) -> Reader:
    for name in checkpoints.NEEDED:
        (folder / name).touch()

    def reader(data: bytes) -> object:
        (folder / checkpoints.MANIFEST).write_bytes(data)
        return checkpoints.check(folder, _IDENTITY)

    return reader


def _checkpoint_part(name: str) -> Start:
    """Return a start for one file of a checkpoint.

    The manifest agrees with the input, since the writer of the file also wrote the manifest.

    Args:
        name: the file that the input replaces.

    Returns:
        the start, whose reader loads the checkpoint.
    """

    def start(_stack: ExitStack, folder: Path) -> Reader:
        whole = checkpoints.folder_of(folder, 1)
        whole.mkdir()
        parts = _checkpoint_files()
        for each, content in parts.items():
            (whole / each).write_bytes(content)

        def reader(data: bytes) -> object:
            (whole / name).write_bytes(data)
            listed = tuple(
                checkpoints.File(each, len(content), zlib.crc32(content))
                for each, content in (parts | {name: data}).items()
            )
            manifest = msgspec.structs.replace(_MANIFEST, files=listed)
            (whole / checkpoints.MANIFEST).write_bytes(msgspec.json.encode(manifest))
            kept = manifest.kept(_PLAN)
            return checkpoints.load(folder, kept, _IDENTITY)

        return reader

    return start


def _checkpoint_files() -> dict[str, bytes]:
    encoder = Encoder(as_tensor)
    header = {key: encoder.encode(value, key) for key, value in _STATE.items()}
    buffers = {str(n): tensor.view(torch.uint8) for n, tensor in enumerate(encoder.buffers)}
    return {
        checkpoints.LOG: msgpack_samples(LogSnapshot)[0],
        checkpoints.MODEL: save({"weight": torch.ones(2, 2)}),
        checkpoints.HEADER: json.dumps(header).encode(),
        checkpoints.STATE: save(buffers),
    }


def _state_header(data: bytes) -> object:
    """Decode the header of a state, as in a checkpoint or in a donor's stream to a joiner."""
    header = read_header(data)
    decoder, device = Decoder([b"\0" * 8]), torch.device("cpu")
    return {name: decoder.decode(value, device) for name, value in header.items()}


# ---- shared memory -------------------------------------------------------------------------------


def _record(stack: ExitStack, _folder: Path) -> Reader:
    """Return a reader for the figures of a rank, whose script may have overwritten them."""
    fd = records.allocate_record()
    stack.callback(os.close, fd)
    writer = records.RankRecord.open(os.dup(fd))
    writer.works_on(DealtBatch(1, 2))
    writer.name_figure(0, "loss")
    writer.close()
    memory = mmap.mmap(fd, records.BYTES)
    stack.callback(memory.close)
    whole = memory[:]

    def reader(data: bytes) -> object:
        memory[:] = whole
        for at in range(0, len(data) - 12, 12):
            # Four bytes select the place, the next eight are the new value.
            place = int.from_bytes(data[at : at + 4], "little") % (records.BYTES // 8 - 3)
            memory[8 * (place + 3) : 8 * (place + 4)] = data[at + 4 : at + 12]
        record = records.RecordReader(fd)
        try:
            return record.read(), record.batch(), record.steps(), record.rounds()
        finally:
            record.close()

    return reader


def _slot(place: int, value: bytes) -> bytes:
    return (place - 3).to_bytes(4, "little") + value


TARGETS: Final = (
    Target(
        name="job-json",
        start=_file("job.json", lambda path: (read_job_file(path), read_resolved_job(path))),
        errors=(JobFileError,),
        seeds=_job_file_seeds(),
        form=Form.JSON,
    ),
    Target(
        name="control-json",
        start=_file(index.NOTE, lambda path: index._read(path)),
        errors=(),
        seeds=json_samples(index.RunEntry),
        form=Form.JSON,
    ),
    Target(
        name="status-json",
        start=_last_status,
        errors=(),
        seeds=_status_seeds(),
        form=Form.JSON,
        cpu_ms=50.0,  # it is read twice and rendered
    ),
    Target(
        name="target-json",
        start=_file("targets/0.json", read_target),
        errors=(TargetError,),
        seeds=(msgspec.json.encode([_TARGET]),),
        form=Form.JSON,
    ),
    Target(
        name="runner-answer",
        start=pure(lambda data: control.read_answer(_ENTRY, data, control.View)),
        errors=(control.ControlError,),
        seeds=(msgspec.json.encode(control.View("job", "/run", None, 2, 1.0, None)),),
        form=Form.JSON,
    ),
    Target(
        name="plan-json",
        start=_file("digits.plan.json", plan_file.read),
        errors=(plan_file.PlanFileError,),
        seeds=json_samples(Book),
        form=Form.JSON,
    ),
    Target(
        name="journal",
        start=_file(f"{JOURNALS}/0.0-1.journal", lambda path: read_journals(path.parent.parent)),
        errors=(ReplayError,),
        seeds=(_journal_seed(),),
        words=(b"\0\0\0\1", b"\xff\xff\xff\xff", b"\0\0\0\x10\x91"),
    ),
    Target(
        name="function-pack",
        start=_function,
        errors=(FunctionError,),
        seeds=(
            _DESCRIPTION + b"\ndef train(rate):\n    return rate\n\ntrain(0.5)\n",
            _DESCRIPTION + b"\nimport math\n\nclass Net:\n    depth: int = 3\n",
        ),
        words=(
            b"(" * 200,
            b"-" * 2000,
            b"\0",
            b"\xff",
            b"lambda: ",
            b".a" * 500,
            b"\n" + b" " * 200,
        ),
        bytes_max=8 * 1024,
    ),
    Target(
        name="checkpoint-manifest",
        start=_checkpoint_manifest,
        errors=(CheckpointError,),
        seeds=(msgspec.json.encode(_MANIFEST),),
        form=Form.JSON,
    ),
    Target(
        name="checkpoint-log",
        start=_checkpoint_part(checkpoints.LOG),
        errors=(CheckpointError,),
        seeds=(_checkpoint_files()[checkpoints.LOG],),
        form=Form.MSGPACK,
    ),
    Target(
        name="checkpoint-header",
        start=_checkpoint_part(checkpoints.HEADER),
        errors=(CheckpointError,),
        seeds=(_checkpoint_files()[checkpoints.HEADER],),
        form=Form.JSON,
    ),
    Target(
        name="checkpoint-tensors",
        start=_checkpoint_part(checkpoints.STATE),
        errors=(CheckpointError,),
        seeds=(_checkpoint_files()[checkpoints.STATE],),
        words=(b'"F64"', b"[9999999999]", b'"data_offsets"', b"\xff" * 8),
    ),
    Target(
        name="state-header",
        start=pure(_state_header),
        errors=(StateError,),
        seeds=(_checkpoint_files()[checkpoints.HEADER],),
        form=Form.JSON,
    ),
    Target(
        name="rank-record",
        start=_record,
        errors=(records.RecordError,),
        seeds=(
            b"",
            _slot(records.LEASE_SLOT, b"\0\0\0\0\0\0\xf0\x7f") + bytes(12),
            _slot(records.LAYOUT.names, b"\xff" * 8) + bytes(12),
            _slot(records.LAYOUT.slots, b"\2" + bytes(7)) + bytes(12),
        ),
        words=(
            _slot(records.LEASE_SLOT, b"\0\0\0\0\0\0\xf0\x7f"),
            _slot(records.PART_SLOT, b"\0\0\0\0\0\0\xf0\x7f"),
            _slot(records.LAYOUT.names, b"\xff" * 8),
            b"\xff" * 8,
        ),
        bytes_max=4096,
    ),
)
