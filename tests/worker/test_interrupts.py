"""State that the threads of a rank share: each item has an owner, a lock, or a bound."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from paceline.core.messages import Dismiss
from paceline.transport.solo import NoTransport
from paceline.worker import group
from paceline.worker.comm_thread import CommThread, Interrupts

WAIT_S = 30.0


class Lead(CommThread):
    """The communication thread of a group's lead that cannot reach the other ranks."""

    def _interrupt(self) -> None:
        super()._interrupt()
        raise OSError("the line is closed")


def comm(kind: type[CommThread] = CommThread, **machine: Any) -> CommThread:
    peers: Any = SimpleNamespace(wake=lambda: None)
    nobody: Any = SimpleNamespace(**machine)
    return kind(nobody, peers, NoTransport(), nobody, Interrupts(), nobody)


def test_an_order_is_queued_even_if_its_interrupt_fails() -> None:
    """Let the interrupt of the other ranks fail.

    The link thread swallows the error and asks for the order again. The abort flag used to stay
    raised, and each later reduction was abandoned.
    """
    thread = comm(Lead)
    with pytest.raises(OSError, match="closed"):
        thread.order(Dismiss("over"))
    assert thread._interrupts.abort.is_raised()
    assert list(thread._posted) == [Dismiss("over")]
    thread._interrupts.taken()  # as `_take` does with it
    assert not thread._interrupts.abort.is_raised()


def test_an_order_without_an_interrupt_leaves_the_count_unchanged() -> None:
    interrupts = Interrupts()
    interrupts.taken()
    interrupts.arrived()
    assert interrupts.abort.is_raised()
    interrupts.taken()
    assert not interrupts.abort.is_raised()


@pytest.mark.parametrize("read", ["registration", "heartbeat", "figures"])
def test_the_link_thread_reads_the_state_between_two_events(read: str) -> None:
    """Read the state while an event is handled.

    The link thread used to read it while an event changed it, and swallowed the errors that this
    caused.
    """
    begun, goes_on = threading.Event(), threading.Event()
    state: Any = SimpleNamespace(version=1, reducing=None)
    state.registration = lambda: state.version

    def handle(*_: Any) -> list[Any]:
        begun.set()
        goes_on.wait(WAIT_S)
        state.version = 2
        return []

    facts = SimpleNamespace(
        heartbeat=lambda state, *_: state.version, figures=lambda state: state.version
    )
    thread = comm(handle=handle, state=state, facts=facts, handled=lambda *_: None)
    with ThreadPoolExecutor(2) as pool:
        handling = pool.submit(thread._handle, Dismiss("over"), 0)
        assert begun.wait(WAIT_S)
        reading = pool.submit(getattr(thread, read))
        with pytest.raises(TimeoutError):
            reading.result(0.1)
        goes_on.set()
        assert reading.result(WAIT_S) == 2
        handling.result(WAIT_S)


class EndedError(Exception):
    pass


def end(_: int) -> None:
    raise EndedError


def test_the_wait_for_a_rank_of_a_group_times_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(group, "ANSWER_S", 0.05)
    monkeypatch.setattr(os, "_exit", end)
    answers: SimpleQueue[int | None] = SimpleQueue()
    with pytest.raises(EndedError):
        group._next(answers, int, "rank 3")
    assert "rank 3 of this group has not answered for 0.05 s" in caplog.text
    answers.put(5)
    assert group._next(answers, int, "rank 3") == 5
