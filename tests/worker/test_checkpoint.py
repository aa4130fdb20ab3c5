"""Checkpoints on a real disk: exact bits, damage, other jobs, retention, killed writers (R19)."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue

import pytest
import torch
from msgspec.structs import replace
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import DataPlan, Gen
from paceline.core.protocol.snapshot import Kept, LogSnapshot
from paceline.core.rank.events import Published, Written
from paceline.errors import CheckpointError
from paceline.worker.checkpoint import format as disk
from paceline.worker.checkpoint import writer as writing
from paceline.worker.checkpoint.writer import WRITING, Answer, CheckpointWriter
from paceline.worker.state.committed import Committed
from paceline.worker.state.gradients import Gradients
from paceline_api.ids import GenerationId, MemberId
from paceline_api.rounds import RoundSettings
from safetensors.torch import load_file
from torch import nn

from testing.processes.forked_call import ForkedCall
from testing.small_disk import small_disk

ME = MemberId(0, 0, 0)
PLAN = DataPlan(samples=40, batch=4, epochs=1, seed=1)
ANSWER_S = 60.0


def snapshot(version: int) -> LogSnapshot:
    log = Log()
    gen = GenerationId(1, "c", 1)
    log.append(
        Gen(
            gen,
            (ME,),
            (ME,),
            (ME,),
            version,
            lookahead=((ME, 2),),
            plan=PLAN,
            settings=RoundSettings(),
        )
    )
    return log.snapshot()


class Rank:
    def __init__(self, seed: int = 0, width: int = 7) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
        self.model[2].bias.requires_grad_(False)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.gradients = Gradients(
            (n, p) for n, p in self.model.named_parameters() if p.requires_grad
        )
        self.committed = Committed(
            self.model,
            optimizer,
            self.gradients,
            scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
        )
        self.identity = disk.Identity("job", self.gradients.layout.model_fingerprint(), PLAN)

    def train(self, rounds: int) -> None:
        for _ in range(rounds):
            for flat in self.gradients.result:
                flat.normal_()
            self.committed.accumulate(self.gradients.result, first=True)
            self.committed.apply(1.0, step=True, scheduler_steps=1)


class Saver:
    """A writer whose answers the test waits for."""

    def __init__(self, path: Path, rank: Rank, keep: int = 2) -> None:
        self.answers: Queue[Answer] = Queue()
        self.rank = rank
        self.writer = CheckpointWriter(
            path, rank.identity, keep=keep, post=self.answers.put, pid=os.getpid()
        )

    def write(self, version: int, *, finished: bool = False) -> Answer:
        self.writer.save(self.rank.committed.copy(), snapshot(version), finished=finished)
        return self.answers.get(timeout=ANSWER_S)

    def publish(self, version: int) -> Answer:
        self.writer.publish(version)
        return self.answers.get(timeout=ANSWER_S)

    def save(self, version: int, *, finished: bool = False) -> None:
        assert self.write(version, finished=finished) == Written(version)
        assert self.publish(version) == Published(version)


@pytest.fixture
def rank() -> Rank:
    made = Rank()
    made.train(3)
    return made


@pytest.fixture
def saver(tmp_path: Path, rank: Rank) -> Iterator[Saver]:
    made = Saver(tmp_path / "saved", rank)
    yield made
    made.writer.close(ANSWER_S)


@pytest.mark.long
def test_the_shards_of_a_group_form_one_checkpoint(tmp_path: Path) -> None:
    """Let each rank write its own part into one folder, which the first rank publishes (R53)."""
    path, ranks = tmp_path / "saved", [Rank(), Rank()]
    for shard, rank in enumerate(ranks):
        rank.train(1 + shard)
        rank.identity = dataclasses.replace(rank.identity, shard=shard, shards=2)
    savers = [Saver(path, rank) for rank in ranks]
    for saver in savers:
        assert saver.write(3) == Written(3)
    savers[1].writer.publish(3)
    savers[1].writer.close(ANSWER_S)
    assert not disk.versions(path), "that is for the first one"
    assert savers[0].publish(3) == Published(3)
    savers[0].writer.close(ANSWER_S)
    for rank in ranks:
        kept = disk.find(path, rank.identity)
        assert kept is not None
        other = Rank(seed=9)
        loaded = disk.load(path, kept, rank.identity)
        other.committed.load_copy(loaded.header, loaded.model, loaded.buffers)
        assert other.committed.strong_hash() == rank.committed.strong_hash()
    alone = dataclasses.replace(ranks[0].identity, shards=1)
    with pytest.raises(CheckpointError, match="groups of 2 ranks") as caught:
        disk.find(path, alone)
    assert "spec.parallelism.model to 2" in caught.value.hint
    shutil.rmtree(disk.folder_of(path, 3) / "shard-1")
    with pytest.raises(CheckpointError, match="it has 1 of 2 shards"):
        disk.find(path, ranks[0].identity)


@pytest.mark.long
def test_a_checkpoint_that_lacks_a_shard_is_not_published(tmp_path: Path) -> None:
    path, rank = tmp_path / "saved", Rank()
    rank.identity = dataclasses.replace(rank.identity, shard=0, shards=2)
    saver = Saver(path, rank)
    assert saver.write(3) == Written(3)
    assert saver.publish(3) == Published(3, "a shard of it was thrown away")
    saver.writer.close(ANSWER_S)
    assert not list(path.iterdir())


def test_a_restored_state_has_the_same_bits_and_trains_on_identically(
    saver: Saver, tmp_path: Path
) -> None:
    saver.save(3)
    path = tmp_path / "saved"
    other = Rank(seed=9)
    kept = disk.find(path, other.identity)
    assert kept == Kept(GenerationId(1, "c", 1), 3, snapshot(3).digest, 0, finished=False)
    loaded = disk.load(path, kept, other.identity)
    assert loaded.log == snapshot(3)
    other.committed.load_copy(loaded.header, loaded.model, loaded.buffers)
    other.committed.copy_to_model()
    saver.rank.committed.copy_to_model()
    for mine, theirs in zip(
        saver.rank.model.state_dict().values(), other.model.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs)
    for each in (saver.rank, other):
        torch.manual_seed(5)
        each.train(4)
    assert saver.rank.committed.strong_hash() == other.committed.strong_hash()
    manifest = disk.read_manifest(path / "v3")
    assert manifest.weights_hash == disk_hash(loaded, other)


def disk_hash(loaded: disk.Loaded, rank: Rank) -> int:
    """Return the hash of the weights as loaded, before training continued."""
    again = Rank(seed=4)
    again.committed.load_copy(loaded.header, loaded.model, loaded.buffers)
    return again.committed.hash()


def test_a_plain_safetensors_reader_gets_the_model_by_name(saver: Saver, tmp_path: Path) -> None:
    """Load the model as docs/checkpoints.md shows."""
    saver.save(3)
    saver.rank.committed.copy_to_model()
    model = Rank(seed=7).model
    model.load_state_dict(load_file(tmp_path / "saved" / "v3" / "model.safetensors"))
    for name, tensor in saver.rank.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_are_stored_and_restored(tmp_path: Path, dtype: torch.dtype) -> None:
    """Check that complex64 keeps its type and that complex128 is stored as pairs of reals."""

    def make(seed: int) -> Rank:
        rank = Rank(seed)
        rank.model[0].weight = nn.Parameter(rank.model[0].weight.to(dtype))  # type: ignore[arg-type]
        rank.model.register_buffer("phase", torch.randn(3, dtype=dtype))
        named = [(n, p) for n, p in rank.model.named_parameters() if p.requires_grad]
        rank.gradients = Gradients(named)
        optimizer = torch.optim.AdamW([p for _, p in named], lr=0.01)
        rank.committed = Committed(rank.model, optimizer, rank.gradients)
        layout = rank.gradients.layout.model_fingerprint()
        rank.identity = disk.Identity("job", layout, PLAN)
        return rank

    one, other = make(0), make(1)
    one.train(2)
    saver = Saver(tmp_path / "saved", one)
    saver.save(3)
    saver.writer.close(ANSWER_S)
    loaded = read_newest(tmp_path / "saved", other.identity)
    other.committed.load_copy(loaded.header, loaded.model, loaded.buffers)
    assert one.committed.strong_hash() == other.committed.strong_hash()
    for rank in (one, other):
        rank.committed.copy_to_model()
    for mine, theirs in zip(
        one.model.state_dict().values(), other.model.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs)
    stored = load_file(tmp_path / "saved" / "v3" / "model.safetensors")["phase"]
    want = one.model.phase if dtype is torch.complex64 else torch.view_as_real(one.model.phase)  # type: ignore[arg-type]
    assert torch.equal(stored, want)  # type: ignore[arg-type]


def test_a_checkpoint_is_invisible_until_it_is_published(saver: Saver, tmp_path: Path) -> None:
    saver.write(3)
    assert disk.find(tmp_path / "saved", saver.rank.identity) is None
    saver.publish(3)
    assert disk.find(tmp_path / "saved", saver.rank.identity) is not None


def test_the_newest_checkpoints_are_kept_and_leftovers_removed(
    saver: Saver, tmp_path: Path
) -> None:
    path = tmp_path / "saved"
    left = path / f"{WRITING}2-elsewhere-1"
    left.mkdir(parents=True)
    for version in (9, 10, 11):
        saver.save(version)
    saver.write(12)
    saver.writer.close(ANSWER_S)
    assert sorted(p.name for p in path.iterdir()) == ["v10", "v11"]


def lose(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def read_newest(path: Path, identity: disk.Identity) -> disk.Loaded:
    kept = disk.find(path, identity)
    assert kept is not None
    return disk.load(path, kept, identity)


FILES = ("model.safetensors", "state.safetensors", disk.LOG, disk.HEADER, disk.MANIFEST)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [lose, cut, flip])
def test_a_torn_checkpoint_is_an_error_and_never_a_start_from_zero(
    saver: Saver, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    saver.save(3)
    saver.save(4)
    path, identity = tmp_path / "saved", saver.rank.identity
    damage(path / "v4" / name)
    with pytest.raises(CheckpointError) as caught:
        read_newest(path, identity)
    assert "v4" in str(caught.value)
    assert caught.value.hint
    shutil.rmtree(path / "v4")
    assert read_newest(path, identity).log.version == 3


def test_the_files_have_the_permissions_of_their_folder(saver: Saver, tmp_path: Path) -> None:
    saver.save(3)
    modes = {p.stat().st_mode & 0o777 for p in (tmp_path / "saved" / "v3").iterdir()}
    assert modes == {(tmp_path / "saved" / "v3").stat().st_mode & 0o666}


class Program:
    """An object that a pickle can hold; unpickling it creates a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.target,)


MALICIOUS = {
    "model.safetensors": "model.safetensors is not a safetensors file",
    "state.safetensors": "state.safetensors is not a safetensors file",
    "state.json": "it cannot be loaded",
    "log.msgpack": "it cannot be loaded",
    ".metadata": "lists .metadata, which no checkpoint has",
}


@pytest.mark.parametrize("name", MALICIOUS)
def test_a_pickle_in_a_checkpoint_is_refused_and_never_run(
    saver: Saver, tmp_path: Path, name: str
) -> None:
    """Replace a file of the checkpoint by a pickle with correct sizes and checksums.

    It is refused by name and never run, torch's `.metadata` included.
    """
    saver.save(3)
    folder, ran = tmp_path / "saved" / "v3", tmp_path / "it-ran"
    (folder / name).write_bytes(pickle.dumps(Program(ran)))
    manifest = json.loads((folder / disk.MANIFEST).read_text())
    files = {file["name"]: file for file in manifest["files"]}
    forged = disk.file_of(folder / name)
    files[name] = {"name": name, "size": forged.size, "crc32": forged.crc32}
    text = json.dumps(manifest | {"files": list(files.values())})
    (folder / disk.MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=MALICIOUS[name]) as caught:
        read_newest(tmp_path / "saved", saver.rank.identity)
    assert f"remove {folder}" in caught.value.hint
    assert not ran.exists()


def test_a_manifest_that_lacks_files_is_refused(saver: Saver, tmp_path: Path) -> None:
    saver.save(3)
    path = tmp_path / "saved" / "v3" / disk.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": []}))
    with pytest.raises(CheckpointError, match=r"does not list log.msgpack, model.safetensors"):
        disk.find(tmp_path / "saved", saver.rank.identity)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "x" * 5000, "", "a\0b", "\x1b[2J"])
def test_a_manifest_that_names_another_file_is_refused(
    saver: Saver, tmp_path: Path, name: str
) -> None:
    """Try names that lead out of the folder, are invalid, or contain terminal escapes."""
    saver.save(3)
    path = tmp_path / "saved" / "v3" / disk.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["files"].append({"name": name, "size": 1, "crc32": 0})
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="which no checkpoint has") as caught:
        disk.find(tmp_path / "saved", saver.rank.identity)
    assert len(caught.value.message) < 400
    assert caught.value.message.isprintable()


def test_a_manifest_above_its_size_limit_is_refused(saver: Saver, tmp_path: Path) -> None:
    saver.save(3)
    path = tmp_path / "saved" / "v3" / disk.MANIFEST
    path.write_text(path.read_text() + " " * disk.MANIFEST_BYTES_MAX)
    with pytest.raises(CheckpointError, match="is larger than 1,000,000 bytes"):
        disk.find(tmp_path / "saved", saver.rank.identity)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("torch.quint8"), "KeyError: 'torch.quint8'"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_an_unexpected_error_is_reported_and_the_writer_continues(
    saver: Saver, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    """Raise in the writer thread.

    The thread used to end, and every later save was skipped silently.
    """

    def fails(*_: object) -> tuple[disk.File, ...]:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(writing, "_write_files", fails)
        assert saver.write(3) == Written(3, words)
    saver.save(4)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "_clean", fails)
        saver.write(5)
        assert saver.publish(5) == Published(5, words)
    saver.save(6)


def test_the_error_names_what_differs_in_a_checkpoint_of_another_job(
    saver: Saver, tmp_path: Path
) -> None:
    saver.save(3)
    path, mine = tmp_path / "saved", saver.rank.identity
    foreign = {
        "of job job, not of other": disk.Identity("other", mine.layout, mine.plan),
        "other parameters": Rank(width=8).identity,
        f"samples: {PLAN.samples} -> 41, seed: {PLAN.seed} -> 9\n": disk.Identity(
            "job", mine.layout, replace(PLAN, samples=41, seed=9)
        ),
        f"epochs: {PLAN.epochs} -> {PLAN.epochs - 1}\n": disk.Identity(
            "job", mine.layout, replace(PLAN, epochs=PLAN.epochs - 1)
        ),
    }
    for words, identity in foreign.items():
        with pytest.raises(CheckpointError, match=words):
            disk.find(path, identity)
    manifest = json.loads((path / "v3" / disk.MANIFEST).read_text())
    (path / "v3" / disk.MANIFEST).write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        disk.find(path, mine)


def test_a_finished_job_resumes_if_it_is_given_more_epochs(saver: Saver, tmp_path: Path) -> None:
    saver.save(3, finished=True)
    path, mine = tmp_path / "saved", saver.rank.identity
    longer = disk.Identity("job", mine.layout, replace(PLAN, epochs=PLAN.epochs + 1))
    same, more = disk.find(path, mine), disk.find(path, longer)
    assert same is not None
    assert more is not None
    assert (same.finished, more.finished) == (True, False)
    assert disk.load(path, more, longer).log.version == 3


def test_a_folder_that_cannot_be_used_is_reported(tmp_path: Path, rank: Rank) -> None:
    (tmp_path / "file").write_text("")
    saver = Saver(tmp_path / "file" / "saved", rank)
    assert saver.write(3) == Written(3, "Not a directory")
    saver.writer.close(ANSWER_S)
    with pytest.raises(CheckpointError, match="cannot be listed"):
        disk.find(tmp_path / "file", rank.identity)


@pytest.fixture
def disk_at(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system with room for one checkpoint of the small model but not for two."""
    with small_disk(tmp_path / "disk", "4m") as folder:
        yield folder


def test_a_full_disk_keeps_the_previous_checkpoint(disk_at: Path, rank: Rank) -> None:
    saver = Saver(disk_at / "saved", rank)
    saver.save(3)
    (disk_at / "ballast").write_bytes(b"x" * (3 << 20))
    answer = saver.write(4)
    assert "are free" in answer.problem
    assert sorted(p.name for p in (disk_at / "saved").iterdir()) == ["v3"]
    (disk_at / "ballast").unlink()
    saver.save(5)
    saver.writer.close(ANSWER_S)
    kept = disk.find(disk_at / "saved", rank.identity)
    assert kept is not None
    assert kept.version == 5


WRITES = """\
import sys
from pathlib import Path
from tests.worker.test_checkpoint import Rank, Saver
rank = Rank()
rank.train(3)
saver = Saver(Path(sys.argv[1]), rank, keep=2)
version = int(sys.argv[2])
while True:
    saver.save(version)
    version += 1
"""


@pytest.mark.processes
def test_a_killed_writer_leaves_the_previous_checkpoint_intact(tmp_path: Path, rank: Rank) -> None:
    """Kill the writer at random moments, each time on top of what the last one left."""
    path, rng, version = tmp_path / "saved", random.Random(7), 1
    (tmp_path / "writes.py").write_text(WRITES)
    for _ in range(2):
        words = ["writes.py", str(path), str(version)]
        process = ForkedCall(words, tmp_path, os.environ, program="python")
        until = time.monotonic() + ANSWER_S
        while max(disk.versions(path), default=0) < version and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.3))
        process.kill()
        process.close()
        read = read_newest(path, rank.identity).log.version
        assert read >= version
        version = read + 1
    assert len(list(path.glob(f"{WRITING}*"))) <= 2
