"""Bounded reads: untrusted bytes are read up to a limit, and only from regular files."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from paceline_api.bounded import TooLargeError, read_at_most, read_file


class Counting(io.BytesIO):
    """A stream that counts how many bytes were requested from it."""

    asked = 0

    def read(self, size: int | None = -1, /) -> bytes:
        assert size is not None
        assert size >= 0, "all of it"
        self.asked += size
        return super().read(size)


def test_read_at_most_reads_no_more_than_one_byte_past_the_limit() -> None:
    stream = Counting(bytes(1000))
    with pytest.raises(TooLargeError, match="it is larger than 10 bytes"):
        read_at_most(stream, 10)
    assert stream.asked == 11
    assert read_at_most(Counting(bytes(10)), 10) == bytes(10)


def test_read_file_follows_links_and_rejects_files_over_the_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert read_file(tmp_path / "link", 5) == b"12345"
    with pytest.raises(TooLargeError):
        read_file(tmp_path / "link", 4)


def test_a_huge_sparse_file_is_rejected_without_reading_it_whole(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(TooLargeError, match="larger than 1,000,000 bytes"):
        read_file(tmp_path / "file", 1_000_000)


def test_pipes_devices_and_folders_are_rejected_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
            read_file(path, 10)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none", 10)
