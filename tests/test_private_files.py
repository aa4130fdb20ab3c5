"""Files and folders of one user: created private, and refused if others can change them."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

import pytest
from paceline.private_files import (
    ForeignFolderError,
    append,
    check_folder,
    create,
    is_private,
    make_folder,
    private_umask,
    write,
)

OTHER_UID = 54_321


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all existing files appear to belong to another user."""
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_UID)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_new_files_and_folders_are_private_under_any_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_folder(tmp_path / "a/b", "folder")
        write(tmp_path / "a/b/whole", b"secret")
        os.close(create(tmp_path / "a/b/new"))
        os.close(append(tmp_path / "a/b/log"))
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "a/b") == 0o700
    for name in ("whole", "new", "log"):
        assert mode_of(tmp_path / "a/b" / name) == 0o600
    assert sorted(path.name for path in (tmp_path / "a/b").iterdir()) == ["log", "new", "whole"]


def test_an_existing_folder_keeps_its_mode(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    make_folder(shared, "folder")
    assert mode_of(shared) == 0o755


def give_groups(monkeypatch: pytest.MonkeyPatch, name: str, members: list[str]) -> None:
    """Make every file appear to belong to a group with this name and these further members."""
    group = grp.struct_group((name, "x", 77, members))
    monkeypatch.setattr(grp, "getgrgid", lambda _: group)


@pytest.mark.parametrize("mode", [0o770, 0o775, 0o777, 0o720, 0o702, 0o1777, 0o2775])
def test_a_folder_writable_by_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    give_groups(monkeypatch, "staff", [])
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(mode)
    for use in (check_folder, make_folder):
        with pytest.raises(
            ForeignFolderError, match=f"run folder {folder} .*mode {mode:04o}"
        ) as no:
            use(folder, "run folder")
        assert f"chmod go-w {folder}" in no.value.hint
    assert not is_private(folder)


def test_a_folder_writable_only_by_the_private_group_of_its_user_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On systems where each user has a private group, the usual umask is 002."""
    me = pwd.getpwuid(os.geteuid()).pw_name
    tmp_path.chmod(0o775)
    for members in ([], [me]):
        give_groups(monkeypatch, me, members)
        check_folder(tmp_path, "run folder")
    give_groups(monkeypatch, me, [me, "guest"])
    with pytest.raises(ForeignFolderError, match=f"the group {me} "):
        check_folder(tmp_path, "run folder")


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755, 0o500])
def test_a_folder_readable_by_others_is_accepted(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(mode)
    check_folder(folder, "run folder")
    assert is_private(folder)


@pytest.mark.usefixtures("stranger")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ForeignFolderError, match=f"belongs to .*user {OTHER_UID}") as no:
        check_folder(tmp_path, "run folder")
    assert "yours" in no.value.hint
    assert not is_private(tmp_path)


def test_a_link_of_the_user_to_an_own_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(0o700)
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    check_folder(tmp_path / "runs", "folder of runs")
    (tmp_path / "disk").chmod(0o777)
    with pytest.raises(ForeignFolderError):
        check_folder(tmp_path / "runs", "folder of runs")


@pytest.mark.usefixtures("stranger")
def test_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path)
    with pytest.raises(ForeignFolderError, match="is a symbolic link of"):
        check_folder(tmp_path / "runs", "folder of runs")


@pytest.mark.parametrize("target", ["there", "nowhere"])
def test_symbolic_links_are_not_followed_when_writing(tmp_path: Path, target: str) -> None:
    (tmp_path / "there").write_text("precious")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / target)
    for use in (create, append):
        with pytest.raises(OSError, match=r"exists|symbolic links"):
            use(link)
    write(link, b"new")
    assert not link.is_symlink()
    assert link.read_bytes() == b"new"
    assert (tmp_path / "there").read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "file", b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_private_umask_ends_with_its_block(tmp_path: Path) -> None:
    outer = os.umask(0o027)
    try:
        with private_umask() as before:
            (tmp_path / "inside").touch()
        (tmp_path / "outside").touch()
    finally:
        os.umask(outer)
    assert before == 0o027
    assert mode_of(tmp_path / "inside") == 0o600
    assert mode_of(tmp_path / "outside") == 0o640
