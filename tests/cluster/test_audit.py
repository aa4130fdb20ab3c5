"""The audit log is read while the API server writes it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.cluster.audit import read_on

WHOLE, BEGINNING, REST = b'{"n": 1}\n', b'{"n"', b": 2}\n"


class Growing(io.BytesIO):
    """A file whose last line is completed between two reads of one loop."""

    def __iter__(self) -> Iterator[bytes]:
        yield from (WHOLE, BEGINNING, REST)


def test_a_partially_written_line_is_left_for_the_next_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "audit.log"
    log.write_bytes(WHOLE + BEGINNING + REST)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *_: Growing())
        [(offset, entry)] = read_on(log, 0)
    assert entry == {"n": 1}
    assert [entry for _, entry in read_on(log, offset)] == [{"n": 2}]
