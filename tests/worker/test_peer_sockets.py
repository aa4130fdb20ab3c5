"""Messages between ranks, over real sockets on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from core.makers import GEN_1, member
from paceline.core.messages import AskState
from paceline.worker.peer_sockets import PeerSockets


@pytest.mark.parametrize("folder", ["plain", "my project", "semi;colon, 100% \N{SNOWMAN}"])
def test_whatever_the_folder_is_called(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    one, two = (
        PeerSockets(directory=tmp_path / folder, name=name, host="", token="") for name in "ab"
    )
    try:
        one.know(member(1), two.address)
        note = AskState(GEN_1, member(0), at_least=3)
        one.send(member(1), note)
        one.send_bulk(member(1), note, [b"state"])
        payloads = []
        while len(payloads) < 2:
            two.wait(10_000)
            while (mail := two.read()) is not None:
                assert mail.message == note
                payloads.append(mail.payload)
        assert sorted(payloads) == [(), (b"state",)]
    finally:
        one.close()
        two.close()
