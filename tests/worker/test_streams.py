"""The order of work on a device with queues, shown without such a device (D5).

A stand-in for torch's streams records what is entered, marked and awaited, together with every
operation on a tensor. A race on a GPU would be a wrong order in that record.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paceline.core.protocol.pending import BufferName, Scale, Zero
from paceline.core.protocol.progress import Progress
from paceline.core.protocol.records import AnnounceKind, DataPlan, GivenUp, Go, Trigger
from paceline.core.rank import events as ev
from paceline.core.rank import rounds
from paceline.telemetry.records import RankRecord
from paceline.transport.solo import NoTransport
from paceline.worker import comm_thread, engine
from paceline.worker.comm_thread import CommThread, Interrupts
from paceline.worker.reduction import Reducer
from paceline.worker.state import bit_sums, committed, flat
from paceline.worker.state.committed import Committed
from paceline.worker.state.flags import Flags
from paceline.worker.state.flat import Segment
from paceline.worker.state.gradients import Gradients
from paceline.worker.state.streams import DeviceStreams
from paceline_api.ids import GenerationId, MemberId
from paceline_api.rounds import RoundSettings
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
GEN = GenerationId(1, "c", 1)
MAIN, OWN = "main", "own"
COMING = ev.Coming(leases=(7,), samples=4, unit=4)
WAIT_S = 60.0
"""A timeout, so that a hang fails the test."""


class Record:
    """Records (thread, operation, stream) in order."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str, str]] = []
        self._here = threading.local()

    @property
    def stack(self) -> list[str]:
        if not hasattr(self._here, "stack"):
            self._here.stack = [MAIN]
        stack: list[str] = self._here.stack
        return stack

    def note(self, what: str, on: str = "") -> None:
        thread = threading.current_thread().name
        self.entries.append((thread, what, on or self.stack[-1]))

    def operations(self) -> list[tuple[str, str]]:
        """Return the operations on tensors, with the stream that they were queued in."""
        return [(what, on) for _, what, on in self.entries if what.startswith("aten.")]

    def before(self, what: str) -> str:
        """Return the last entry before `what` first occurred."""
        names = [entry[1] for entry in self.entries]
        return names[names.index(what) - 1]


class RecordedStream:
    def __init__(self, record: Record, name: str) -> None:
        self.record, self.name = record, name

    def wait_event(self, event: RecordedEvent) -> None:
        self.record.note(f"wait for {event.marks}", self.name)

    def synchronize(self) -> None:
        self.record.note("synchronize", self.name)


class RecordedEvent:
    def __init__(self, record: Record) -> None:
        self.record_, self.marks = record, ""
        self.looks = 0

    def record(self, stream: RecordedStream) -> None:
        self.marks = stream.name
        self.record_.note("mark", stream.name)

    def query(self) -> bool:
        self.looks += 1
        self.record_.note(f"look {self.marks}", self.marks)
        return self.looks > 1


class RecordedQueues:
    """Pretends that the CPU works through queues."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def has(self, _: torch.device) -> bool:
        return True

    def stream(self, _: torch.device) -> RecordedStream:
        return RecordedStream(self.record, OWN)

    def event(self, _: torch.device) -> RecordedEvent:
        return RecordedEvent(self.record)

    def current(self, _: torch.device) -> RecordedStream:
        return RecordedStream(self.record, self.record.stack[-1])

    @contextmanager
    def _use(self, stream: RecordedStream) -> Iterator[None]:
        self.record.stack.append(stream.name)
        yield
        self.record.stack.pop()

    def use(self, stream: RecordedStream) -> AbstractContextManager[None]:
        return self._use(stream)


class Watch(TorchDispatchMode):
    """Records each operation of this thread on tensors."""

    def __init__(self, record: Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.record.note(str(func))
        return func(*args, **(kwargs or {}))


class Deaf:
    """Accepts every call, also on its attributes."""

    def __getattr__(self, name: str) -> Deaf:
        return self

    def __call__(self, *_: object, **__: object) -> None:
        return None


class Rank:
    """A rank whose communication thread's work the test's own thread does."""

    def __init__(self, record: Record) -> None:
        self.record = record
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.gradients = Gradients(model.named_parameters())
        self.gradients.streams = DeviceStreams([CPU], RecordedQueues(record))  # type: ignore[arg-type]
        optimizer = torch.optim.Adam(model.parameters())
        self.committed = Committed(model, optimizer, self.gradients)
        callbacks = SimpleNamespace(resumed=lambda _: record.note("go on"), exited=lambda _: None)
        machine: Any = SimpleNamespace(
            state=SimpleNamespace(
                log=SimpleNamespace(version=1, settings=RoundSettings(), waits_for_everybody=False),
                gen_id=GEN,
            )
        )
        deaf: Any = Deaf()
        main: Any = callbacks
        self.driver = CommThread(machine, deaf, NoTransport(), main, Interrupts(), deaf)
        channel: Any = SimpleNamespace(sum=lambda *_: record.note("sum"), carrier=lambda _: None)
        self.driver._channel = channel
        self.driver.take(self.gradients, self.committed, None)

    def do(self, effect: Any) -> None:
        with Watch(self.record):
            if isinstance(effect, ev.Reduce):
                self.driver._block(effect)
            else:
                self.driver._do(effect)


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    made = Record()

    def noted(of: Callable[[torch.Tensor], memoryview]) -> Callable[[torch.Tensor], memoryview]:
        def bytes_of(tensor: torch.Tensor) -> memoryview:
            made.note("bytes leave")
            return of(tensor)

        return bytes_of

    for reader in (committed, bit_sums):
        monkeypatch.setattr(reader, "bytes_of", noted(flat.bytes_of))
    return made


GO: Any = SimpleNamespace(round=1, sync=True, contributing=1, streamed=False)
WEIGHING: Any = SimpleNamespace(
    first=True, divisor=2.0, step=True, scheduler_steps=0, residual_unit=1
)
TO: Any = MemberId(0, 1, 0)
ANY: Any = None
STATE: Any = SimpleNamespace(generation=GEN, log=SimpleNamespace(version=1))
READING = {
    "the hash": ev.Apply(GO, WEIGHING, hash=True),
    "the sum for a rank that is behind": ev.SendPart(TO, ANY, with_result=True),
    "the state for a joiner": ev.SendState(TO, STATE),
}
CHECK = "aten.linalg_vector_norm.out"
"""The operation that checks a segment on a device for non-finite values."""
WRITING = {
    "contribute": ev.Reduce(GO, BufferName.GRAD, 0.5),
    "contribute nothing": ev.Reduce(GO, None, 1.0),
    "apply": ev.Apply(GO, WEIGHING, hash=False),
    "keep": ev.Queue(GO),
    "scale": ev.ChangeBuffers(Scale(BufferName.GRAD, 0.5)),
    "zero": ev.ChangeBuffers(Zero(BufferName.GRAD)),
    "let go on": ev.Resume(1, True, False, Progress()),
}


@pytest.mark.parametrize("name", READING | WRITING)
def test_the_communication_thread_works_on_its_own_stream(record: Record, name: str) -> None:
    """Check every operation.

    On another stream, a sum could be read too early, or a weight while it is written.
    """
    rank = Rank(record)
    rank.do((READING | WRITING)[name])
    assert record.operations()
    assert {on for _, on in record.operations()} == {OWN}, record.entries


@pytest.mark.parametrize("name", READING)
def test_bytes_leave_the_device_after_all_updates_have_finished(record: Record, name: str) -> None:
    """Check that a synchronization precedes the read.

    Otherwise two ranks with equal weights could report two hashes, and a joiner could get a torn
    state.
    """
    rank = Rank(record)
    rank.do(READING[name])
    names = [what for _, what, _ in record.entries]
    read = names.index("bytes leave")
    settled = max(i for i in range(read) if names[i] == "synchronize")
    assert not [what for what in names[settled:read] if "_." in what.replace("_to_copy", "")]


def test_the_parts_of_a_state_are_installed_on_the_ranks_own_stream(record: Record) -> None:
    donor, joiner = Rank(Record()), Rank(record)
    header, buffers = donor.committed.snapshot()
    joiner.driver._staged[GEN] = (json.dumps(header).encode(), *buffers)
    joiner.do(ev.Queue(GO))
    joiner.do(ev.InstallState(((GO, WEIGHING),)))
    joiner.driver._part = tuple(bytes(part) for part in donor.committed.last_result())
    joiner.do(ev.InstallPart(GO, WEIGHING))
    assert {on for _, on in record.operations()} == {OWN}


def test_hashes_and_copies_of_the_state_synchronize_first(record: Record) -> None:
    for read in (Committed.strong_hash, Committed.copy, Committed.state_dict, Committed.hash):
        rank = Rank(record)
        rank.do(ev.Apply(GO, WEIGHING, hash=False))
        record.entries.clear()
        with Watch(record):
            read(rank.committed)
        assert record.entries[0][1:] == ("synchronize", OWN), read
        assert {on for _, on in record.operations()} <= {OWN}, read


def test_a_transport_is_called_in_the_stream_that_fills_the_buffers(record: Record) -> None:
    """Check that it uses the buffers in stream order, so the host waits for nothing in between."""
    rank = Rank(record)
    rank.do(ev.Reduce(GO, BufferName.GRAD, 1.0))
    (sums,) = {on for _, what, on in record.entries if what == "sum"}
    assert sums == OWN
    assert "synchronize" not in [what for _, what, _ in record.entries]


def test_the_main_thread_resumes_after_an_event_marks_all_work(record: Record) -> None:
    rank = Rank(record)
    record.entries.clear()
    rank.do(ev.Resume(1, True, False, Progress()))
    assert record.before("go on") == "mark"
    rank.gradients.streams.adopt_commit()
    assert record.entries[-1][1:] == (f"wait for {OWN}", MAIN)


def host_waits(record: Record) -> list[tuple[str, str, str]]:
    """Return the operations that block a thread until a device has finished, or read from it."""
    waits = ("synchronize", "aten._local_scalar_dense", "aten.item", "aten.is_nonzero")
    return [entry for entry in record.entries if entry[1].startswith(waits)]


class Queued:
    """Ranks whose only device works through queues."""

    def __init__(self, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
        queues: Any = RecordedQueues(record)
        monkeypatch.setattr(
            "paceline.worker.state.gradients.DeviceStreams",
            lambda devices: DeviceStreams(devices, queues),
        )
        for driver, method in ((CommThread, "_take"), (Reducer, "_work"), (Reducer, "judge")):
            monkeypatch.setattr(driver, method, self._watched(record, getattr(driver, method)))

    @staticmethod
    def _watched(record: Record, method: Any) -> Any:
        def watched(*arguments: Any) -> Any:
            with Watch(record):
                return method(*arguments)

        return watched


def test_no_step_waits_for_its_device_before_it_is_announced(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a whole job of one rank.

    The device keeps the order: the check of the gradients is queued behind the operations that make
    them, and whoever needs its result polls for it.
    """
    Queued(record, monkeypatch)
    say = rounds._say

    def says(rank: Any, kind: Any, share: Any) -> None:
        if kind is AnnounceKind.ARRIVE:
            record.note("announce")
        say(rank, kind, share)

    monkeypatch.setattr(rounds, "_say", says)
    session = engine.Engine(None)
    try:
        model = nn.Linear(2, 1)
        gradients = Gradients(model.named_parameters())
        whole = Committed(model, torch.optim.SGD(model.parameters(), lr=0.1), gradients)
        session.begin(gradients, whole, DataPlan(samples=6, batch=2, epochs=1, seed=1), 2)
        steps = 0
        while session.wait_lease():
            while (lease := session.pull()) is not None:
                model(torch.ones(2, 2)).sum().backward()
                record.entries.clear()
                session.step(leases=(lease,), samples=2, unit=1, metrics=())
                index = [what for _, what, _ in record.entries].index("announce")
                before = Record()
                before.entries = record.entries[:index]
                assert not host_waits(before), before.entries
                checked = [on for what, on in before.operations() if what == CHECK]
                assert checked == [OWN]
                steps += 1
        session.finish()
    finally:
        session.close()
    assert steps == 3


def test_a_segment_is_announced_and_sent_while_its_kernels_are_queued(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check COMING, the fill and the sum of a streamed round.

    Each follows the hook's event on the rank's own stream, in that order.
    """
    Queued(record, monkeypatch)
    summed: queue.Queue[torch.Tensor] = queue.Queue()

    def sums(buffers: list[torch.Tensor], _: Any) -> None:
        record.note("sum")
        summed.put(buffers[0].clone())

    rank = Streamed(SimpleNamespace(sum=sums))
    rank.reducer.begin(COMING)
    rank.write(0, 3.0)
    assert rank.posted.get(timeout=WAIT_S) == COMING
    assert host_waits(record) == []
    go = Go(GEN, 0, Trigger.ALL, streamed=True)
    assert rank.reducer.reduce(ev.Reduce(go, BufferName.GRAD, 1.0, in_hand=True)) is None
    assert summed.get(timeout=WAIT_S)[-1] == 0
    entries = [(what, on) for _, what, on in record.entries]
    follow, check = entries.index((f"wait for {MAIN}", OWN)), entries.index((CHECK, OWN))
    assert follow < check < entries.index(("sum", OWN))
    assert "synchronize" not in [what for what, _ in entries]
    rank.end()


def test_a_non_finite_value_found_on_a_device_aborts_the_round(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put an Inf into the first segment.

    Nobody has checked it before COMING, so its flag aborts the round on all ranks, and the Step
    reports it.
    """
    Queued(record, monkeypatch)
    summed: queue.Queue[torch.Tensor] = queue.Queue()
    rank = Streamed(SimpleNamespace(sum=lambda buffers, _: summed.put(buffers[0].clone())))
    rank.reducer.begin(COMING)
    rank.write(0, float("inf"))
    assert rank.posted.get(timeout=WAIT_S) == COMING
    go = Go(GEN, 0, Trigger.ALL, streamed=True)
    rank.reducer.reduce(ev.Reduce(go, BufferName.GRAD, 1.0, in_hand=True))
    assert summed.get(timeout=WAIT_S)[-1] == 1
    assert rank.posted.get(timeout=WAIT_S) is None
    assert rank.reducer.outcome() == ev.Voided(GivenUp.NONFINITE)
    rank.write(1, 1.0)
    rank.reducer.close()
    for event in rank.reducer.judge():
        assert not event.query()
    assert not rank.reducer.finish(ev.Step((7,), 4, 4)).finite
    rank.reducer.complete()
    rank.end()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_device_check_finds_the_same_non_finite_values_as_the_host(
    dtype: torch.dtype, bad: float
) -> None:
    places = (CPU, torch.device("meta"), CPU)
    flags = Flags([Segment(dtype, place, 100) for place in places], [CPU])
    assert 0 in flags
    assert 1 not in flags
    huge = torch.full((100,), torch.finfo(dtype).max, dtype=dtype)
    spoiled = huge.clone()
    spoiled[41] = bad
    for first, last in ((huge, spoiled), (spoiled, -huge)):
        flags.find(0, first)
        flags.find(2, last)
        flags.queue_copy()
        assert flags.are_finite([0]) is (first is huge)
        assert flags.are_finite([2]) is (first is not huge)
        assert not flags.are_finite([0, 1, 2])
        assert flags.are_finite([1]), "it lies on the host"


class Streamed:
    """A rank's gradients in two segments, and its `Reducer`; the test plays the other threads."""

    def __init__(self, channel: Any) -> None:
        self.parameters = [nn.Parameter(torch.zeros(16)) for _ in range(2)]
        named = [(f"p{i}", p) for i, p in enumerate(self.parameters)]
        self.gradients = Gradients(named, segment_bytes=64)
        self.posted: queue.Queue[ev.Coming | None] = queue.Queue()
        model = nn.ParameterList(self.parameters)
        whole = Committed(model, torch.optim.SGD(self.parameters, 1.0), self.gradients)
        self.reducer = Reducer(
            channel,
            self.gradients,
            whole,
            lambda _: torch.zeros(0),
            self.posted.put,
            RankRecord.create().rounds,
        )

    def write(self, segment: int, value: float) -> None:
        (self.parameters[-1 - segment] * value).sum().backward()

    def end(self) -> None:
        self.reducer.close(dropped=True)
        self.reducer.shutdown()


def test_the_main_thread_parks_after_its_kernels_and_adopts_the_new_state(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a whole job of one rank.

    Weights are overwritten while the main thread is parked, whatever it waits for, and the end of
    the job is a change like any other.
    """
    queues: Any = RecordedQueues(record)
    monkeypatch.setattr(
        "paceline.worker.state.gradients.DeviceStreams",
        lambda devices: DeviceStreams(devices, queues),
    )
    take = CommThread._take

    def watched(driver: CommThread, event: Any) -> None:
        with Watch(record):
            take(driver, event)

    monkeypatch.setattr(comm_thread.CommThread, "_take", watched)
    session = engine.Engine(None)
    try:
        call = session._call

        def parks(event: Any) -> ev.Resume:
            record.note(f"park: {type(event).__name__}")
            resumed = call(event)
            record.note("goes on")
            return resumed

        monkeypatch.setattr(session, "_call", parks)
        model = nn.Linear(2, 1)
        gradients = Gradients(model.named_parameters())
        whole = Committed(model, torch.optim.SGD(model.parameters(), lr=0.1), gradients)
        copy_to_model = whole.copy_to_model

        def copies(*, lend: bool = False) -> None:
            record.note("copy to model")
            copy_to_model()  # nothing is lent on a device

        monkeypatch.setattr(whole, "copy_to_model", copies)
        session.begin(gradients, whole, DataPlan(samples=4, batch=2, epochs=1, seed=1), 2)
        for _ in range(2):
            session.rest()
            session.resume()
            while (lease := session.pull()) is None:
                assert session.wait_lease()
            model(torch.ones(2, 2)).sum().backward()
            session.step(leases=(lease,), samples=2, unit=1, metrics=())
        while session.wait_lease():
            assert session.pull() is None
        session.finish()
    finally:
        session.close()
    mine = threading.current_thread().name
    entries = [(what, on) for thread, what, on in record.entries if thread == mine]
    parked = [i for i, (what, _) in enumerate(entries) if what.startswith("park")]
    assert {entries[i][0] for i in parked} == {
        "park: Begin",
        "park: Step",
        "park: Want",
        "park: Unrest",
    }
    for i in parked:
        computed = (f"look {OWN}", OWN) if entries[i][0] == "park: Step" else (f"look {MAIN}", MAIN)
        assert entries[i - 1] == computed, entries[i - 2 : i + 1]
        assert entries[i + 1] == (f"wait for {OWN}", MAIN), entries[i : i + 3]
    assert entries[-2:] == [(f"wait for {OWN}", MAIN), ("copy to model", MAIN)]
    theirs = [(t, what, on) for t, what, on in record.entries if t != mine]
    assert {on for _, what, on in theirs if what.startswith("aten.")} == {OWN}
    assert any(what == "aten.sub_.Tensor" or "foreach" in what for _, what, _ in theirs)
