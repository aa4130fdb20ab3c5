"""The order of the NCCL transport's calls to streams, events and process groups.

No GPU is needed: stand-ins for torch.cuda and for NCCL's process group record the calls. They show
the order of the calls, not that a GPU executes them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paceline.core.collectives.select import NATIVE
from paceline.transport.base import Abort, Group, Peer, PeerLost, TransportAborted
from paceline.transport.torch import nccl
from paceline.transport.torch.nccl import UNDER_WAY_MAX, NcclTransport
from paceline.transport.torch.process_groups import BY_ONE_RANK
from torch._C._distributed_c10d import ErrorType

CPU = torch.device("cpu")
WAIT_S = 10.0
"""A timeout, so that a hang fails the test."""


class Machine:
    """A GPU and NCCL, as far as the transport uses them."""

    def __init__(self) -> None:
        self.record: list[str] = []
        self.looks_left = 3
        """How often an event still reports that it has not completed."""
        self.error = ErrorType.SUCCESS
        self.on_look: Callable[[], None] = lambda: None
        self.aborted = threading.Event()
        self.current = "caller"

    def note(self, what: str) -> None:
        self.record.append(what)

    def summed(self) -> None:
        self.note("summed")

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def new_stream(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(name="own", wait_stream=lambda s: self.note(f"own waits {s.name}"))

    def new_event(self) -> Any:
        return SimpleNamespace(record=lambda s: self.note(f"mark {s.name}"), query=self._query)

    def _query(self) -> bool:
        self.on_look()
        self.looks_left -= 1
        return self.looks_left < 0

    def work(self) -> Any:
        return SimpleNamespace(
            block_current_stream=lambda: self.note(f"{self.current} waits nccl"),
            is_completed=lambda: self.looks_left < 0,
            wait=lambda: self.note("wait"),
        )

    def group(self) -> Any:
        def allreduce(_: Any) -> Any:
            self.note(f"allreduce in {self.current}")
            return self.work()

        def other(name: str) -> Callable[..., Any]:
            def begin(*_: Any) -> Any:
                self.note(name)
                return self.work()

            return begin

        def abort() -> None:
            self.note("abort")
            self.aborted.set()

        return SimpleNamespace(
            allreduce=allreduce,
            reduce=other("reduce"),
            broadcast=other("broadcast"),
            abort=abort,
            get_error=lambda: self.error,
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-1")
    )
    monkeypatch.setattr(torch.cuda, "Stream", made.new_stream)
    monkeypatch.setattr(torch.cuda, "Event", made.new_event)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(name="caller"))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(nccl, "only_device", lambda _: CPU)
    monkeypatch.setattr(NcclTransport, "_connect", lambda *_: made.group())
    monkeypatch.setattr(NcclTransport, "_compare", lambda *_: None)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "")
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "")
    return made


@pytest.fixture
def transport(machine: Machine) -> Iterator[NcclTransport]:
    made = NcclTransport(host="127.0.0.1", local=True)
    made.begin([CPU])
    made.open(group(1, made), Abort(), 5.0)
    machine.record.clear()
    yield made
    made.shutdown()


def group(number: int, transport: NcclTransport) -> Group:
    peers = Peer("r0", transport.address), Peer("r1", "127.0.0.1:1/GPU-2")
    return Group(f"g{number}", number, peers, 0)


def test_a_sum_follows_the_callers_stream_and_is_polled(
    machine: Machine, transport: NcclTransport
) -> None:
    transport.allreduce([torch.ones(4)], Abort(), NATIVE)
    assert machine.record == [
        "own waits caller",
        "allreduce in own",
        "own waits nccl",
        "mark own",
        "wait",  # the work is done; this raises its errors
    ]


def test_a_connection_error_ends_the_wait(machine: Machine, transport: NcclTransport) -> None:
    machine.looks_left = 10**9
    machine.error = ErrorType.REMOTE_ERROR
    with pytest.raises(PeerLost, match="error in its connections: REMOTE_ERROR"):
        transport.allreduce([torch.ones(4)], Abort(), NATIVE)
    assert machine.aborted.wait(WAIT_S), "its kernels go on for ever"


def test_an_abort_ends_the_wait(machine: Machine, transport: NcclTransport) -> None:
    abort = Abort()
    machine.looks_left = 10**9
    machine.on_look = abort.raise_
    with pytest.raises(TransportAborted):
        transport.allreduce([torch.ones(4)], abort, NATIVE)
    assert machine.aborted.wait(WAIT_S)
    assert transport.describe()["abandoned"] == "1"


def segments(number: int) -> list[torch.Tensor]:
    return [torch.ones(4) for _ in range(number)]


LAUNCHED = ["own waits caller", "allreduce in own"]
SUMMED = ["own waits nccl", "mark own", "wait", "summed"]


@pytest.mark.parametrize("number", [1, UNDER_WAY_MAX, UNDER_WAY_MAX + 2])
def test_segments_are_queued_in_order_with_a_bounded_number_in_flight(
    machine: Machine, transport: NcclTransport, number: int
) -> None:
    ahead = min(number, UNDER_WAY_MAX)
    transport.allreduce_in_turn(segments(number), Abort(), NATIVE, machine.summed)
    beyond = (SUMMED + LAUNCHED) * (number - ahead)
    assert machine.record == LAUNCHED * ahead + beyond + SUMMED * ahead


def test_an_abort_ends_the_wait_for_one_of_several_segments(
    machine: Machine, transport: NcclTransport
) -> None:
    abort = Abort()

    def summed() -> None:
        machine.summed()
        if machine.record.count("summed") == 2:
            machine.looks_left = 10**9
            machine.on_look = abort.raise_

    with pytest.raises(TransportAborted):
        transport.allreduce_in_turn(segments(20), abort, NATIVE, summed)
    assert machine.aborted.wait(WAIT_S)
    assert machine.record.count("summed") == 2
    assert machine.record.count("allreduce in own") == UNDER_WAY_MAX + 2
    assert transport.describe()["abandoned"] == "1"


def test_a_connection_error_ends_the_wait_for_one_of_several_segments(
    machine: Machine, transport: NcclTransport
) -> None:
    def summed() -> None:
        machine.looks_left = 10**9
        machine.error = ErrorType.REMOTE_ERROR

    with pytest.raises(PeerLost, match="REMOTE_ERROR"):
        transport.allreduce_in_turn(segments(20), Abort(), NATIVE, summed)
    assert machine.aborted.wait(WAIT_S)


def test_a_failed_launch_abandons_the_earlier_ones(
    machine: Machine, transport: NcclTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check promise 3: buffers of earlier launches may still be written to."""
    machine.looks_left = 10**9
    launched = machine.record.append

    def refuse(what: str) -> None:
        launched(what)
        if what == "allreduce in own" and machine.record.count(what) == 3:
            raise RuntimeError("NCCL says no")

    monkeypatch.setattr(machine, "note", refuse)
    with pytest.raises(PeerLost, match="NCCL says no"):
        transport.allreduce_in_turn(segments(4), Abort(), NATIVE, lambda: None)
    assert machine.aborted.wait(WAIT_S)
    assert transport.describe()["abandoned.alive"] == "1"


def test_with_reduce_and_broadcast_segments_are_summed_one_by_one(
    machine: Machine, transport: NcclTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differ(instance: NcclTransport, *_: Any) -> None:
        instance._operations = BY_ONE_RANK

    monkeypatch.setattr(NcclTransport, "_compare", differ)
    transport.open(group(2, transport), Abort(), 5.0)
    machine.record.clear()
    transport.allreduce_in_turn(segments(2), Abort(), NATIVE, machine.summed)
    calls = [what for what in machine.record if what in ("reduce", "broadcast", "summed")]
    assert calls == ["reduce", "broadcast", "summed"] * 2


def test_a_closed_group_is_aborted_when_the_next_one_is_open(
    machine: Machine, transport: NcclTransport
) -> None:
    """Expect an abort of the old group.

    Destroying it would wait for its ranks, and one of them may be the reason for the change.
    """
    transport.close()
    assert "abort" not in machine.record, "a peer may still read what was sent"
    transport.open(group(2, transport), Abort(), 5.0)
    assert machine.aborted.wait(WAIT_S)
    assert machine.record.count("abort") == 1
    assert transport.describe()["abandoned.alive"] == "0"


def test_the_keys_of_a_generation_cannot_be_guessed_without_the_token() -> None:
    """Check the key prefix.

    A store of torch does not authenticate: whoever knows a key can read and change it.
    """
    peers = (Peer("r0", "here"),)
    groups = [
        Group(key, 1, peers, 0, secret) for key in ("1.1@c", "1.2@c") for secret in (b"a", b"b")
    ]
    prefixes = {nccl._prefix(group) for group in groups}
    assert len(prefixes) == len(groups)
    assert not any(group.key in prefix for prefix in prefixes for group in groups)
    assert nccl._prefix(groups[0]) == nccl._prefix(Group("1.1@c", 1, peers, 0, b"a"))
