"""Temporary folders belong to a process; another process removes them once it has died."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from paceline import scratch
from paceline.scratch import LOCK, PREFIX, SUN_PATH_MAX, Scratch, sweep

OWNER = """
import os, pathlib, signal, sys
from paceline.scratch import Scratch
own = Scratch.make()
for folder in {own.temporary, own.sockets}:
    (folder / "rank").mkdir()
    (folder / "rank" / "file").write_text("x")
print(own.temporary, own.sockets, flush=True)
signal.pause()
"""


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set TMPDIR to a folder with a short path, and yield it."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


class Owner:
    """Another process with a temporary folder that contains files."""

    def __init__(self, tmpdir: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER],
            env={**os.environ, "TMPDIR": str(tmpdir)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        self.temporary, self.sockets = map(Path, words)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


def test_an_owner_removes_its_folder_and_close_is_idempotent(base: Path) -> None:
    with Scratch.make() as own:
        assert own.temporary == own.sockets
        assert own.temporary.stat().st_mode & 0o777 == 0o700
        (own.temporary / "left").write_text("x")
        assert f"pid {os.getpid()}" in (own.temporary / LOCK).read_text()
    own.close()
    assert list(base.iterdir()) == []


def test_only_folders_of_killed_owners_are_swept(base: Path) -> None:
    living, killed = Owner(base), Owner(base)
    try:
        killed.kill()
        assert (killed.temporary / "rank" / "file").exists()
        sweep([base])
        assert not killed.temporary.exists()
        assert (living.temporary / "rank" / "file").exists()
        living.process.send_signal(signal.SIGSTOP)  # a stopped process is alive too
        sweep([base])
        assert living.temporary.exists()
    finally:
        living.kill()
    sweep([base])
    assert list(base.iterdir()) == []


def test_the_folder_of_a_killed_run_stays_while_an_agent_lives(base: Path) -> None:
    run = Owner(base)
    agent, dead_agent = Owner(run.temporary), Owner(run.temporary)
    try:
        dead_agent.kill()
        sweep([run.temporary])
        assert not dead_agent.temporary.exists(), "the runner lives and its agent does not"
        run.kill()
        sweep([base])
        assert agent.temporary.exists()
    finally:
        agent.kill()
    sweep([base])
    assert list(base.iterdir()) == []


def test_other_names_and_links_are_not_swept(base: Path) -> None:
    (base / "elsewhere").mkdir()
    (base / "elsewhere" / "mine").write_text("x")
    (base / f"{PREFIX}link").symlink_to(base / "elsewhere")
    (base / "paceline-clusters-0").mkdir()
    (base / f"{PREFIX}file").write_text("x")
    before = sorted(path for path in base.rglob("*"))
    sweep([base, base / "no such folder"])
    assert sorted(path for path in base.rglob("*")) == before


def test_a_folder_swept_before_it_is_locked_is_created_again(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    real = tempfile.mkdtemp

    def mkdtemp(**given: Any) -> str:
        made.append(real(**given))
        if len(made) == 1:
            sweep([base])
        return made[-1]

    monkeypatch.setattr(scratch.tempfile, "mkdtemp", mkdtemp)  # type: ignore[attr-defined]
    with Scratch.make() as own:
        assert [own.temporary] == [Path(made[1])] == list(base.iterdir())
        with (own.temporary / LOCK).open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_folder_that_is_being_swept_before_it_is_locked_is_created_again(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs start at once: the other one has just locked the new folder, to remove it."""
    make = tempfile.mkdtemp
    locks: list[int] = []

    def taken(**how: Any) -> str:
        path: str = make(**how)
        if not locks:
            locks.append(os.open(Path(path, LOCK), os.O_RDWR | os.O_CREAT))
            fcntl.flock(locks[0], fcntl.LOCK_EX)
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", taken)
    with Scratch.make() as own:
        other, mine = sorted(base.iterdir(), key=lambda path: path == own.temporary)
        assert mine == own.temporary
        assert (other / LOCK).read_text() == "", "it is left to the one that sweeps"
    os.close(locks[0])
    sweep([base])
    assert list(base.iterdir()) == []


@pytest.mark.parametrize("length", [4, 20, 33, 34, 90, 200])
def test_socket_paths_fit_below_any_tmpdir(
    base: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = base / ("x" * (length - len(str(base)) - 1)) if length > len(str(base)) + 1 else base
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with Scratch.make() as run:
        assert run.temporary.parent == folder, "TMPDIR is respected, however long it is"
        monkeypatch.setattr(tempfile, "tempdir", str(run.temporary))
        with Scratch.make() as agent:
            assert agent.temporary.parent == run.temporary
            assert len(str(agent.sockets / "9999.99-9999999-99" / "r.f")) <= SUN_PATH_MAX
            sockets = run.sockets, agent.sockets
    assert not any(path.exists() for path in sockets)
    assert list(folder.iterdir()) == []


def test_the_socket_folder_of_a_long_tmpdir_is_swept_too(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 80)
    folder.mkdir()
    killed = Owner(folder)
    killed.kill()
    assert killed.sockets.parent == scratch.SHORT
    sweep([folder, scratch.SHORT])
    assert not killed.temporary.exists()
    assert not killed.sockets.exists()


def test_shared_memory_noted_in_a_folder_is_removed_with_it(base: Path) -> None:
    owned, other = Path(f"/dev/shm/mpich_shm_{os.getpid():x}_0"), Path(f"/dev/shm/t-{os.getpid()}")
    for path in (owned, other):
        path.write_text("x")
    try:
        own = Scratch.make()
        rank = own.sockets / "agent" / "0.0-0"
        (rank / "tmp").mkdir(parents=True)
        scratch.note_shared_memory(rank, owned.name)
        # Names that are not those of MPI's segments are never removed.
        scratch.note_shared_memory(rank, other.name)
        scratch.note_shared_memory(rank, f"../shm/{other.name}")
        own.close()
        assert not owned.exists()
        assert other.exists()
    finally:
        for path in (owned, other):
            path.unlink(missing_ok=True)
    assert list(base.iterdir()) == []


def test_empty_shared_memory_of_torch_is_removed_with_its_process() -> None:
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    left, used, other = (
        scratch.SHM / f"torch_{ended.pid}_1_0",
        scratch.SHM / f"torch_{ended.pid}_2_0",
        scratch.SHM / f"torch_{ended.pid}0_1_0",
    )
    try:
        for path in (left, other):
            path.touch()
        used.write_text("x")
        scratch.remove_torch_memory(ended.pid)
        assert [path.exists() for path in (left, used, other)] == [False, True, True]
    finally:
        ended.wait()
        for path in (left, used, other):
            path.unlink(missing_ok=True)


def test_a_tmpdir_that_does_not_exist_is_reported_with_a_hint(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(base / "gone"))
    with pytest.raises(Exception, match=r"gone.*no such file") as error:
        Scratch.make()
    assert "TMPDIR" in error.value.hint  # type: ignore[attr-defined]


@pytest.mark.exhaustive
def test_concurrent_removals_of_one_folder_do_not_fail(
    tmp_path: Path,
) -> None:
    """An agent and its runner may sweep one folder at the same time."""
    for turn in range(20):
        folder = tmp_path / f"{scratch.PREFIX}{turn}"
        for rank in range(50):
            (folder / f"agent-{rank}" / "rank" / "tmp").mkdir(parents=True)
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(scratch.remove, [folder]) for _ in range(4)]:
                done.result()
        assert not folder.exists()


def test_temporary_folders_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Scratch.make() as made:
        for folder in (made.temporary, made.sockets):
            assert folder.stat().st_mode & 0o777 == 0o700
