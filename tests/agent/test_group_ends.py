"""The end of a group of ranks is reported as the end of the rank that ended first (R50)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from signal import SIGKILL
from typing import Any

import pytest
from paceline.agent.group import GroupProcess
from paceline.agent.system import Reaper
from paceline.core.agent import supervise
from paceline.core.agent.exits import RankOutcome
from paceline.core.messages import ScriptError
from paceline_api.ids import MemberId

LOST = ScriptError("RuntimeError", "Connection closed by peer", "train.py", 12)
MISTAKE = ScriptError("KeyError", "'label'", "train.py", 7)


class UnlaunchedGroup:
    """A group of two ranks that were never launched, and the events that it has reported."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.events: list[supervise.Event] = []
        unused: Any = None
        self.group = GroupProcess(
            MemberId(0, 0, 0),
            2,
            loop=self.loop,
            reaper=Reaper(),
            output=unused,
            lines=unused,
            record_fd=-1,
            post=lambda _, event: self.events.append(event),
        )

    def failed(self, shard: int, error: ScriptError) -> None:
        self._of(shard, supervise.ReportedOutcome(RankOutcome.FAILED, str(error), None, error))

    def exited(self, shard: int, code: int) -> None:
        self._of(shard, supervise.Exited(code, ""))

    def _of(self, shard: int, event: supervise.Event) -> None:
        self.group._on_event(self.group._ranks[shard], event)

    @property
    def errors(self) -> list[ScriptError]:
        reported = (e.error for e in self.events if isinstance(e, supervise.ReportedOutcome))
        return [error for error in reported if error is not None]


@pytest.fixture
def group() -> Iterator[UnlaunchedGroup]:
    one = UnlaunchedGroup()
    yield one
    for rank in one.group._ranks:
        for line in rank._group:
            line.close()
    one.group.close()
    one.loop.close()


@pytest.mark.parametrize("killed", [0, 1])
def test_an_error_caused_by_a_killed_peer_is_not_reported_as_a_script_error(
    group: UnlaunchedGroup, killed: int
) -> None:
    """Let the peer of a killed rank fail, as it does at the same line in each group.

    Jobs used to end as ScriptFailed because of this.
    """
    group.failed(1 - killed, LOST)
    group.exited(killed, -SIGKILL)
    group.exited(1 - killed, 1)
    assert group.errors == []
    assert group.events[-1] == supervise.Exited(-SIGKILL, "")


@pytest.mark.parametrize("shard", [0, 1])
def test_an_exception_is_reported_with_the_exit_of_its_own_process(
    group: UnlaunchedGroup, shard: int
) -> None:
    group.failed(shard, MISTAKE)
    group.failed(1 - shard, LOST)
    group.exited(shard, 1)
    group.exited(1 - shard, -SIGKILL)
    assert group.errors == [MISTAKE]
    assert group.events[-1] == supervise.Exited(1, "")
