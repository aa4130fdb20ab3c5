"""The agent's connections to its ranks: a rank that does not read blocks nothing (R43)."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field

from paceline.agent.rank_lines import QUEUE_MAX, RankLines
from paceline.control import packets
from paceline_api.ids import MemberId

ME = MemberId(0, 0, 1000)
ANEW = b'{"type":"introduce"}'


@dataclass
class Voice:
    heard_of: list[tuple[str, bytes]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    lines: RankLines = field(init=False)

    def open(self, _: MemberId) -> None:
        self._note("open")

    def receive(self, _: MemberId, data: bytes) -> None:
        self._note("heard", data)

    def anew(self, member: MemberId) -> None:
        self._note("anew")
        self.lines.tell(member, ANEW)

    def close(self, _: MemberId) -> None:
        self._note("close")

    def _note(self, what: str, data: bytes = b"") -> None:
        self.heard_of.append((what, data))
        self.news.set()


def opened() -> tuple[Voice, RankLines, socket.socket]:
    voice = Voice()
    lines = voice.lines = RankLines(asyncio.get_running_loop(), voice)
    return voice, lines, lines.open(ME)


async def read(line: socket.socket) -> bytes | None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            return packets.receive(line)
        except BlockingIOError:
            there: asyncio.Future[None] = loop.create_future()
            loop.add_reader(line.fileno(), there.set_result, None)
            await asyncio.wait_for(there, 30)
            loop.remove_reader(line.fileno())


def test_a_rank_that_resumes_reading_gets_all_messages_in_order() -> None:
    async def scenario() -> None:
        _, lines, line = opened()
        words = [b"%d" % n + b"x" * 5000 for n in range(QUEUE_MAX)]
        words[7] = b"7" * 1_000_000
        for word in words:
            lines.tell(ME, word)
        assert [await read(line) for _ in words] == words
        lines.close()
        line.close()

    asyncio.run(scenario())


def test_a_rank_that_does_not_read_for_long_is_reintroduced() -> None:
    async def scenario() -> None:
        voice, lines, line = opened()
        while ("anew", b"") not in voice.heard_of:
            lines.tell(ME, b"x" * 30_000)
        last = b""
        while last != ANEW:
            last = await read(line) or b""
        lines.tell(ME, b"after")
        assert await read(line) == b"after"
        lines.close()
        line.close()

    asyncio.run(scenario())


def test_the_last_messages_of_a_dead_rank_come_before_its_end() -> None:
    async def scenario() -> None:
        voice, lines, line = opened()
        packets.send(line, b"first")
        packets.send(line, b"last" * 100_000)
        line.close()
        lines.end(ME)
        lines.end(ME)
        assert voice.heard_of == [
            ("open", b""),
            ("heard", b"first"),
            ("heard", b"last" * 100_000),
            ("close", b""),
        ]
        lines.tell(ME, b"nobody is there")

    asyncio.run(scenario())


def test_a_rank_that_closes_its_connection_is_gone() -> None:
    async def scenario() -> None:
        voice, lines, line = opened()
        line.close()
        while voice.heard_of[-1][0] != "close":
            voice.news.clear()
            await asyncio.wait_for(voice.news.wait(), 30)
        lines.tell(ME, b"nobody is there")
        lines.close()
        assert [what for what, _ in voice.heard_of] == ["open", "close"]

    asyncio.run(scenario())
