"""Other users can read nothing of a run, and no verb works on a folder that they may change."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from paceline.cli.replay import replay
from paceline.core.forecast.book import Book
from paceline.jobs.local import LocalJobs
from paceline.local import checkpoint_folder, control, index, plan_file
from paceline.local.rundir import LOCK, make_run_dir
from paceline.peer_credentials import Credentials
from paceline.private_files import ForeignFolderError
from paceline.transport import native

from testing.processes.runs import ForkedRun, Run

SCRIPT = """\
import os, pathlib
import paceline as pl
import torch

torch.set_num_threads(1)
pl.init()
print("a secret")
pathlib.Path(f"own-{os.getpid()}").write_text("the user's")
model = torch.nn.Linear(4, 1)
optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
for step in pl.steps(6):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
CHECKPOINTS = ("--set", "spec.checkpoint.path=kept", "--set", "spec.checkpoint.everyRounds=3")


def readable_by_others(folder: Path) -> list[str]:
    """Return the paths that others could access if their parent folders allowed it."""
    paths = (folder, *folder.rglob("*"))
    return [str(p) for p in paths if not p.is_symlink() and stat.S_IMODE(p.stat().st_mode) & 0o077]


@pytest.fixture
def usual_umask() -> object:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.processes
@pytest.mark.usefixtures("usual_umask")
def test_only_its_user_can_read_the_files_of_a_run(tmp_path: Path) -> None:
    """Check the files of a run; those that the script itself makes keep their mode."""
    (tmp_path / "train.py").write_text(SCRIPT)
    code, output = ForkedRun(
        tmp_path, "[python, train.py]", "--record", "--quiet", *CHECKPOINTS
    ).wait()
    assert code == 0, output
    run = tmp_path / "runs/job-1"
    names = {path.name for path in run.iterdir()}
    assert {"job.json", "status.json", "printed.log", "logs", "steps", "record"} <= names
    assert list((tmp_path / "kept").rglob("*.safetensors"))
    assert readable_by_others(tmp_path / "runs") == []
    assert readable_by_others(tmp_path / "kept") == []
    own = list(tmp_path.glob("own-*"))
    assert own
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o644 for path in own)


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.usefixtures("usual_umask")
def test_a_script_keeps_the_umask_of_its_user(tmp_path: Path) -> None:
    code, output = Run(tmp_path, "[sh, -c, 'umask > own-umask; umask']").wait()
    assert code == 1, "it took no part"
    assert "] 0022" in output
    assert stat.S_IMODE((tmp_path / "own-umask").stat().st_mode) == 0o644
    assert readable_by_others(tmp_path / "runs") == []


@pytest.mark.processes
@pytest.mark.usefixtures("usual_umask")
def test_a_shared_checkpoint_folder_stays_shared(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept").chmod(0o755)
    code, output = ForkedRun(tmp_path, "[python, train.py]", "--quiet", *CHECKPOINTS).wait()
    assert code == 0, output
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o755
    weights = list((tmp_path / "kept").rglob("*.safetensors"))
    assert weights
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o644 for path in weights)
    assert all(stat.S_IMODE(path.parent.stat().st_mode) == 0o755 for path in weights)


# ---- folders of other users ----------------------------------------------------------------

Verb = Callable[[LocalJobs, str], object]
VERBS: dict[str, Verb] = {
    "has": lambda jobs, name: jobs.has(name),
    "status": lambda jobs, name: jobs.status(name),
    "watch": lambda jobs, name: list(jobs.watch(name)),
    "wait": lambda jobs, name: jobs.wait(name),
    "logs": lambda jobs, name: list(jobs.logs(name)),
    "scale": lambda jobs, name: jobs.scale(name, 2),
    "suspend": lambda jobs, name: jobs.suspend(name),
    "resume": lambda jobs, name: jobs.resume(name),
    "delete": lambda jobs, name: jobs.delete(name),
    "events": lambda jobs, name: jobs.events(name),
    "explain": lambda jobs, name: jobs.explain(name),
    "report": lambda jobs, name: jobs.samples(name),
    "replay": lambda _, name: replay(Path(name)),
}


def left_run(folder: Path) -> Path:
    folder.mkdir(parents=True, mode=0o700)
    (folder / LOCK).write_text("1\n")
    return folder


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("mode", [0o777, 0o772])
def test_every_verb_refuses_a_run_that_others_may_change(
    tmp_path: Path, verb: str, mode: int
) -> None:
    run = left_run(tmp_path / "job-1")
    run.chmod(mode)
    with pytest.raises(ForeignFolderError, match=f"{run} may be written to by .* mode {mode:04o}"):
        VERBS[verb](LocalJobs({}, tmp_path), str(run))
    assert (run / LOCK).exists()


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "replay"])
def test_every_verb_refuses_a_folder_of_runs_that_others_may_change(
    tmp_path: Path, verb: str
) -> None:
    run = left_run(tmp_path / "runs/job-1")
    (tmp_path / "runs").chmod(0o777)
    with pytest.raises(ForeignFolderError, match="folder of runs"):
        VERBS[verb](LocalJobs({}, tmp_path), "job")
    assert (run / LOCK).exists()


@pytest.mark.parametrize("wanted", [True, False])
def test_no_run_starts_in_a_folder_that_others_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, wanted: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ("given" if wanted else "runs")
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ForeignFolderError, match="everybody"):
        make_run_dir("job", folder if wanted else None)
    assert list(folder.iterdir()) == []


def test_an_existing_run_folder_becomes_private(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given").chmod(0o755)
    run = make_run_dir("job", tmp_path / "given")
    assert readable_by_others(run) == []


def test_a_checkpoint_folder_that_others_may_change_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept").chmod(0o777)
    with (
        pytest.raises(ForeignFolderError, match="checkpoint folder"),
        checkpoint_folder.locked(tmp_path / "kept"),
    ):
        pass
    with checkpoint_folder.locked(tmp_path / "new/one"):
        assert readable_by_others(tmp_path / "new/one") == []


def test_the_checkpoint_lock_does_not_follow_a_link(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir(mode=0o700)
    (tmp_path / "kept" / checkpoint_folder.LOCK).symlink_to(tmp_path / "elsewhere")
    with checkpoint_folder.locked(tmp_path / "kept"):
        assert not (tmp_path / "elsewhere").exists()


def test_measurements_that_others_may_change_are_refused(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "job.plan-1.json").write_bytes(msgspec.json.encode(Book()))
    runs.chmod(0o777)
    with pytest.raises(ForeignFolderError):
        plan_file.read(runs / "job.plan-1.json")
    with pytest.raises(ForeignFolderError):
        plan_file.write(runs / "job.plan-1.json", Book())


def test_index_entries_that_others_may_change_are_ignored(tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path / "user")}
    run = left_run(tmp_path / "job-1")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        index.publish(index.RunEntry("job", str(run), str(tmp_path / "s"), 1), env)
        assert readable_by_others(tmp_path / "user/paceline") == []
        assert [entry.job for entry in index.running(env)] == ["job"]
        (tmp_path / "user/paceline").chmod(0o777)
        assert index.running(env) == []
        with pytest.raises(OSError, match="may be written to by"):
            index.publish(index.RunEntry("job", str(run), str(tmp_path / "s"), 1), env)


def test_a_process_of_another_user_is_not_accepted_as_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = index.RunEntry("job", str(tmp_path), str(tmp_path / "s"), 1)
    received: list[bytes] = []

    def refused() -> None:
        with pytest.raises(control.EndedError):
            control.scale(entry, 2)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(entry.socket)
        listener.listen()
        assert index.listens(entry)
        somebody = Credentials(1, os.geteuid() + 1)
        for module in (index, control):
            monkeypatch.setattr(module, "credentials_of", lambda _: somebody)
        assert not index.listens(entry)
        while received == []:
            line, _ = listener.accept()
            with line:
                received.append(line.recv(100))
        asked = threading.Thread(target=refused)
        asked.start()
        line, _ = listener.accept()
        with line:
            received.append(line.recv(100))
        asked.join()
    assert not any(received), "nothing was asked for"


def test_an_endless_answer_is_cut_off_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "LINE_MAX", 1000)
    entry = index.RunEntry("job", str(tmp_path), str(tmp_path / "s"), 1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(entry.socket)
        listener.listen()

        def talk() -> None:
            line, _ = listener.accept()
            with line:
                line.recv(100)
                line.sendall(b"x" * 2000)

        threading.Thread(target=talk, daemon=True).start()
        with pytest.raises(control.ControlError, match="does not answer"):
            control.look(entry)


def test_a_native_library_that_others_may_change_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "file_name", lambda _: "made.so")
    monkeypatch.setattr(native, "build", lambda _, target: (target / "made.so").touch())
    loaded: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda path, _mode: loaded.append(path))
    cache = tmp_path / "paceline"
    cache.mkdir(mode=0o700)
    native.load(native.REDUCE)
    assert loaded == [str(cache / "made.so")]
    (cache / "made.so").chmod(0o666)
    with pytest.raises(native.UnavailableError, match="may have been changed"):
        native.load(native.REDUCE)
    (cache / "made.so").chmod(0o600)
    cache.chmod(0o777)
    with pytest.raises(native.UnavailableError, match="everybody"):
        native.load(native.REDUCE)
    assert len(loaded) == 1
