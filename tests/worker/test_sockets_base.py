"""Sockets have short paths, so a folder for them is made elsewhere when TMPDIR is a long one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from paceline.environment import SOCKET_NAME_MAX, SUN_PATH_MAX, sockets_base


@pytest.mark.parametrize("length", [10, 50, 53, 90, 200])
def test_a_socket_fits_below_any_tmpdir(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * (length - 1))
    folder = Path(sockets_base()) / "paceline-12345678"
    assert len(str(folder)) + SOCKET_NAME_MAX <= SUN_PATH_MAX
    assert (sockets_base() == tempfile.tempdir) is (length <= 52)
