"""Resolving a job name to a local run; verbs that change a run name its folder."""

from __future__ import annotations

import io
import itertools
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from paceline.cli import choice
from paceline.cli.choice import Where, choose_one
from paceline.jobs.errors import AmbiguousJobError, NoSuchJobError
from paceline.jobs.local import LocalJobs
from paceline.local import index
from paceline.local.rundir import LOCK


class Runs:
    """Run folders in several working folders. Running ones have a listener that never answers."""

    def __init__(self, root: Path) -> None:
        self.root, self.env = root, {"XDG_RUNTIME_DIR": str(root / "user")}
        self._open, self._pids = ExitStack(), itertools.count(1)

    def add(self, folder: str, *, runs: bool) -> Path:
        run_dir = self.root / folder
        run_dir.mkdir(parents=True)
        (run_dir / LOCK).touch()
        if runs:
            listener = self._open.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(run_dir / "s"))
            listener.listen()
            pid = next(self._pids)
            index.publish(index.RunEntry("job", str(run_dir), str(run_dir / "s"), pid), self.env)
        return run_dir

    def seen_from(self, folder: str) -> LocalJobs:
        return LocalJobs(self.env, self.root / folder)

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "user"))
    for name in ("XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    made = Runs(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("here_runs", [True, False])
def test_a_name_means_the_run_in_this_folder_before_one_elsewhere(
    runs: Runs, *, here_runs: bool
) -> None:
    """`scale`, `delete` and `suspend` once changed the run of another folder (regression test)."""
    here = runs.add("a/runs/job-3", runs=here_runs)
    other = runs.add("b/runs/job-1", runs=True)
    assert runs.seen_from("a").folder("job") == str(here)
    assert runs.seen_from("b").folder("job") == str(other)
    if not here_runs:
        assert runs.seen_from("c").folder("job") == str(other), "the only one"


def test_scaling_a_run_that_ended_here_does_not_change_one_elsewhere(runs: Runs) -> None:
    here = runs.add("a/runs/job-1", runs=False)
    other = runs.add("b/runs/job-1", runs=True)
    with pytest.raises(NoSuchJobError) as refused:
        runs.seen_from("a").scale("job", 3)
    assert str(here) in refused.value.message
    assert str(other) in refused.value.hint


@pytest.mark.parametrize("seen_from", ["a", "c"])
def test_an_ambiguous_name_lists_all_running_candidates(runs: Runs, seen_from: str) -> None:
    """The candidates are the running ones of this folder, or of all folders if it has none."""
    one, two = (runs.add(f"a/runs/job-{n}", runs=True) for n in (1, 2))
    three = runs.add("b/runs/job-1", runs=True)
    with pytest.raises(AmbiguousJobError) as refused:
        runs.seen_from(seen_from).folder("job")
    wanted = [one, two] if seen_from == "a" else [one, two, three]
    assert refused.value.folders == tuple(map(str, wanted))
    assert all(str(folder) in refused.value.message for folder in wanted)
    assert "name the run folder" in refused.value.hint
    assert runs.seen_from(seen_from).folder(str(two)) == str(two)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_ambiguous_name_is_an_error_without_a_terminal(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.add("a/runs/job-1", runs=True)
    runs.add("b/runs/job-1", runs=True)
    monkeypatch.chdir(runs.root)
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\n"))
    with pytest.raises(AmbiguousJobError):
        choose_one("job", Where())


@pytest.mark.parametrize(("answer", "chosen"), [("2\n", 1), ("", None), ("3\n", None), ("x", None)])
def test_the_user_chooses_among_candidates_on_a_terminal(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, answer: str, chosen: int | None
) -> None:
    folders = [runs.add(f"{name}/runs/job-1", runs=True) for name in "ab"]
    monkeypatch.chdir(runs.root)
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", asked := Terminal())
    if chosen is None:
        with pytest.raises(AmbiguousJobError):
            choose_one("job", Where())
    else:
        meant = choose_one("job", Where())
        assert meant.name == str(folders[chosen])
        assert meant.place == f"this machine in {folders[chosen]}"
    assert all(str(folder) in asked.getvalue() for folder in folders)


def test_a_run_in_another_folder_is_shown_with_that_folder(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = runs.add("b/runs/job-1", runs=True)
    monkeypatch.chdir(runs.root)
    assert choose_one("job", Where()).place == f"this machine in {elsewhere}"
    assert choice.choose("job", Where()).where == "this machine"
