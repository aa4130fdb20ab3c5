"""The costs of a start and a join for the rank that is the donor of the state (D15)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import torch
from paceline.core import wire
from paceline.core.messages import StateTransfer
from paceline.core.protocol.places import BEFORE, Spot
from paceline.core.rank import events as ev
from paceline.telemetry.records import RankRecord
from paceline.transport.solo import NoTransport
from paceline.worker import operations
from paceline.worker.comm_thread import STAGED_MAX, CommThread, Interrupts
from paceline.worker.operations import Operations, ScriptThread
from paceline.worker.peer_sockets import KEY_BYTES, PeerSockets, ReceivedMessage
from paceline.worker.state.codec import Decoder, Encoder, as_is, as_tensor
from paceline.worker.state.committed import Committed
from paceline.worker.state.flat import bytes_of
from paceline.worker.state.gradients import Gradients
from paceline_api.ids import GenerationId, MemberId
from torch import nn

from testing.makers import make_log

GEN = GenerationId(1, "c", 1)
JOINERS = [MemberId(0, place, 0) for place in range(1, 8)]
WEIGHING: Any = SimpleNamespace(
    first=True, divisor=1.0, step=True, scheduler_steps=0, residual_unit=1
)


class Donor:
    """A donor whose communication thread's work the test does; nobody reads its mail."""

    def __init__(self) -> None:
        model = nn.Linear(64, 64)
        gradients = Gradients(model.named_parameters())
        self.committed = Committed(model, torch.optim.Adam(model.parameters()), gradients)
        self.sent: dict[MemberId, list[Any]] = {}
        peers: Any = SimpleNamespace(
            send_bulk=lambda to, _, payload: self.sent.update({to: list(payload)})
        )
        ring = RankRecord.create().rounds
        nobody: Any = SimpleNamespace(applied=lambda *_: None, state=None, ring=ring)
        self.comm = CommThread(nobody, peers, NoTransport(), nobody, Interrupts(), nobody)
        self.comm.take(gradients, self.committed, None)

    def update(self) -> None:
        go: Any = None
        self.comm._do(ev.Apply(go, WEIGHING, hash=False))

    def serve(self, joiner: MemberId, version: int) -> None:
        state: Any = SimpleNamespace(generation=GEN, log=SimpleNamespace(version=version))
        self.comm._do(ev.SendState(joiner, state))

    def hear(self, state: Any, payload: tuple[bytes, ...]) -> None:
        """Stage `state` as a joiner that has received it."""
        self.comm._staged[state.generation] = payload

    def bytes_kept(self) -> int:
        """Return the bytes that wait to be sent, counting memory that is shared once."""
        parts = [memoryview(part) for sent in self.sent.values() for part in sent[1:]]
        return sum({id(part.obj): part.nbytes for part in parts}.values())


def test_all_joiners_of_a_version_are_sent_the_same_memory() -> None:
    """Serve seven joiners.

    The state used to be copied for each: seven joiners of 4 GB kept 28 GB on one rank.
    """
    donor = Donor()
    donor.update()
    donor.serve(JOINERS[0], 1)
    one = donor.bytes_kept()
    assert one == sum(len(part) for part in donor.sent[JOINERS[0]][1:])
    for joiner in JOINERS[1:]:
        donor.serve(joiner, 1)
    assert donor.bytes_kept() == one
    assert all(parts[0] == donor.sent[JOINERS[0]][0] for parts in donor.sent.values())


def test_a_joiner_forwards_the_state_without_a_copy() -> None:
    donor, joiner = Donor(), Donor()
    donor.update()
    donor.serve(JOINERS[0], 1)
    state: Any = SimpleNamespace(generation=GEN, log=SimpleNamespace(version=1))
    payload = tuple(donor.sent[JOINERS[0]])
    joiner.hear(state, payload)
    joiner.comm._do(ev.PassState(JOINERS[1], state))
    assert all(sent is came for sent, came in zip(joiner.sent[JOINERS[1]], payload, strict=True))


def test_a_joiner_of_a_later_version_gets_that_version() -> None:
    donor = Donor()
    donor.update()
    donor.serve(JOINERS[0], 1)
    first = [bytes(part) for part in donor.sent[JOINERS[0]]]
    donor.comm._gradients.result[0].fill_(1.0)
    donor.update()
    assert donor.comm._shared is None, "kept although nobody needs it"
    assert [bytes(part) for part in donor.sent[JOINERS[0]]] == first, "changed under way"
    donor.serve(JOINERS[1], 2)
    other = Donor()
    other.committed.load(donor.committed.snapshot()[0], donor.sent[JOINERS[1]][1:])
    assert other.committed.strong_hash() == donor.committed.strong_hash()


class ScriptDonor:
    """A donor whose script waits in an operation; the test does its communication thread's work."""

    def __init__(self, active: Sequence[MemberId]) -> None:
        self.weights = torch.ones(1 << 20)
        self.sent: list[memoryview] = []
        peers: Any = SimpleNamespace(
            send_bulk=lambda _, __, payload: self.sent.extend(payload[1:]), wake=lambda: None
        )
        log = SimpleNamespace(active=tuple(active))
        machine: Any = SimpleNamespace(state=SimpleNamespace(log=log, operation=None, gen_id=GEN))
        nobody: Any = None
        self.comm = ScriptThread(machine, peers, NoTransport(), nobody, Interrupts(), nobody)
        operations = Operations(read_state=lambda: ({}, [self.weights]))
        self.comm.begin_with(operations, NoTransport())

    def serve(self, joiner: MemberId, *onward: MemberId) -> memoryview:
        log: Any = None
        self.comm._do(ev.SendState(joiner, StateTransfer(GEN, log, onward)))
        [sent] = self.sent
        return sent

    def sends_a_copy(self, sent: memoryview) -> bool:
        self.weights.fill_(2.0)  # the script makes its step
        return sent.cast("B").cast("f")[0] == 1.0


def test_a_script_that_cannot_go_on_without_the_joiner_sends_its_tensors_as_they_are() -> None:
    """Serve ranks that are active: the donor used to copy all of its state while others waited."""
    donor = ScriptDonor(active=JOINERS[:2])
    assert not donor.sends_a_copy(donor.serve(JOINERS[0], JOINERS[1]))


def test_a_script_that_goes_on_meanwhile_sends_a_copy() -> None:
    """Serve a rank that only follows, and one that forwards the state to such a rank."""
    assert (donor := ScriptDonor(active=())).sends_a_copy(donor.serve(JOINERS[0]))
    donor = ScriptDonor(active=JOINERS[:1])
    assert donor.sends_a_copy(donor.serve(JOINERS[0], JOINERS[1]))


def test_an_operation_goes_on_while_the_state_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold up the copy of a first state: the sums of the others used to wait for it."""
    donor, may_copy, story = ScriptDonor(active=()), threading.Event(), []
    donor.comm.machine.state.operation = SimpleNamespace(place=1, number=0)  # type: ignore[assignment]

    def late_copy(tensor: torch.Tensor) -> torch.Tensor:
        may_copy.wait(10)
        return as_tensor(tensor)

    monkeypatch.setattr(operations, "as_tensor", late_copy)
    nothing: Any = None
    donor.comm._do(ev.SendState(JOINERS[0], StateTransfer(GEN, nothing)))
    donor.comm._take_outcome()
    assert donor.sent == []
    may_copy.set()
    resumed = SimpleNamespace(resumed=lambda _: story.append(len(donor.sent)))
    donor.comm._main = resumed
    donor.comm._do(ev.Resume(version=1, fresh=True, stopped=False, progress=nothing))
    assert story == [1], "the script went on before its state was copied"
    assert donor.sends_a_copy(donor.sent[0])


class ScriptJoiner:
    """A rank whose script asks for the state where the donor waits; the test reads its mail."""

    def __init__(self, folder: Path) -> None:
        self.weights = torch.zeros(1 << 20)
        log = SimpleNamespace(digest="d", wanted_slots=2)
        self.rank: Any = SimpleNamespace(
            follows=True, is_active=True, frozen=False, gen_id=GEN, promise=GEN, log=log
        )
        machine: Any = SimpleNamespace(state=self.rank)
        self.peers = PeerSockets(directory=folder, name="joiner", host="", token="")
        nobody: Any = None
        self.comm = ScriptThread(machine, self.peers, NoTransport(), nobody, Interrupts(), nobody)
        self.operations = Operations(places=lambda _: {0: self.weights}, loads=BEFORE.__eq__)
        self.comm.begin_with(self.operations, NoTransport())

    def read(self) -> ReceivedMessage | None:
        assert self.peers.wait(10_000), "nothing came"
        return self.peers.read()

    def install(self, mail: ReceivedMessage) -> None:
        self.comm._stage(mail)
        self.rank.follows = False
        self.comm._do(ev.InstallState(()))


@pytest.fixture
def joiner(tmp_path: Path) -> Iterator[ScriptJoiner]:
    joiner = ScriptJoiner(tmp_path)
    yield joiner
    joiner.peers.close()


@pytest.fixture
def donor(tmp_path: Path, joiner: ScriptJoiner) -> Iterator[PeerSockets]:
    donor = PeerSockets(directory=tmp_path, name="donor", host="", token="")
    donor.know(JOINERS[0], joiner.peers.address)
    yield donor
    donor.close()


LAST: Final = StateTransfer(GEN, make_log(1).snapshot())
WEIGHTS: Final = torch.arange(1 << 20, dtype=torch.float32)


SPOTS: Final = {"spot": list(BEFORE), "ended": False, "done": list(BEFORE)}
HEADER: Final = json.dumps({**SPOTS, "kept": [], "first": 0, "script": {}}).encode()


def send(donor: PeerSockets, state: StateTransfer = LAST) -> None:
    donor.send_bulk(JOINERS[0], state, [HEADER, bytes_of(WEIGHTS)])


def receive(joiner: ScriptJoiner) -> ReceivedMessage:
    while (mail := joiner.read()) is None:
        pass
    return mail


def test_the_state_for_a_waiting_script_arrives_in_its_tensors(
    donor: PeerSockets, joiner: ScriptJoiner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count copies: the others used to wait for two more of the whole state (S3)."""
    joiner.rank.log.digest = LAST.log.digest
    send(donor)
    joiner.install(receive(joiner))
    assert torch.equal(joiner.weights, WEIGHTS)
    received = joiner.operations.received
    assert received is not None
    copied: list[object] = []
    monkeypatch.setattr(np, "copyto", lambda *_: copied.append(_))
    encoded = Encoder(as_is).encode({"w": WEIGHTS}, "a model")
    assert Decoder.places(encoded, {"w": joiner.weights}) == {0: joiner.weights}
    Decoder(received.buffers).fill(encoded, {"w": joiner.weights})
    assert copied == []


CHANGES: Final[dict[str, Callable[[ScriptJoiner], object]]] = {
    "a script that runs": lambda joiner: setattr(joiner.operations, "loads", None),
    "a script that waits elsewhere": lambda joiner: setattr(
        joiner.operations, "loads", Spot(3, 0).__eq__
    ),
    "a rank that is no member yet": lambda joiner: setattr(joiner.rank, "is_active", False),
    "a rank that has promised another generation": lambda joiner: setattr(
        joiner.rank, "frozen", True
    ),
    "a state of another version": lambda joiner: setattr(joiner.rank.log, "digest", "other"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_that_may_not_be_loaded_arrives_in_new_memory(
    donor: PeerSockets, joiner: ScriptJoiner, change: str
) -> None:
    joiner.rank.log.digest = LAST.log.digest
    CHANGES[change](joiner)
    send(donor)
    assert bytes(receive(joiner).payload[1]) == bytes(bytes_of(WEIGHTS))
    assert not joiner.weights.any()


def test_a_state_that_is_forwarded_arrives_in_new_memory(
    donor: PeerSockets, joiner: ScriptJoiner
) -> None:
    """Forward the state: the receiver's script may change its tensors before all of it is sent."""
    joiner.rank.log.digest = LAST.log.digest
    send(donor, StateTransfer(GEN, LAST.log, (JOINERS[1],)))
    receive(joiner)
    assert not joiner.weights.any()


def test_nothing_is_written_to_a_script_that_goes_on(
    donor: PeerSockets, joiner: ScriptJoiner, tmp_path: Path
) -> None:
    """Install a state while another one has come in part, and send the rest of that."""
    joiner.rank.log.digest = LAST.log.digest
    slow = PeerSockets(directory=tmp_path, name="slow", host="", token="")
    slow.know(JOINERS[0], joiner.peers.address)
    try:
        line, key, packed = slow._socket(JOINERS[0], 1), bytes(KEY_BYTES), wire.pack_peer(LAST)
        sizes = msgspec.msgpack.encode([len(packed), len(HEADER), WEIGHTS.nbytes])
        line.send_multipart([key, sizes, packed])
        line.send_multipart([key, HEADER])
        while not any(each.is_placed for each in joiner.peers._arriving.values()):
            assert joiner.read() is None
        send(donor)
        joiner.install(receive(joiner))
        joiner.weights.zero_()  # the script makes a step
        line.send_multipart([key, b"x" * 1000])
        slow.send_bulk(JOINERS[0], LAST, [])
        assert receive(joiner).payload == ()
    finally:
        slow.close()
    assert not joiner.weights.any()


def test_a_passive_rank_sums_in_the_same_memory_each_time(joiner: ScriptJoiner) -> None:
    """Queue sums: a rank that joins used to write to new memory in each round of the others."""
    sums = joiner.comm._scratch = joiner.comm._take_buffers(None)
    joiner.comm._do(ev.Queue(SimpleNamespace(operation=None)))  # type: ignore[arg-type]
    assert joiner.comm._take_buffers(None) is sums


def test_a_joiner_that_cannot_take_the_state_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model of the joiner lack a buffer.

    The joiner used to send Fatal(RuntimeBroken), which ended the job of all ranks.
    """
    donor, joiner = Donor(), Donor()
    donor.committed._model.register_buffer("made_in_forward", torch.ones(3))
    donor.update()
    donor.serve(JOINERS[0], 1)
    joiner.hear(SimpleNamespace(generation=GEN), tuple(donor.sent[JOINERS[0]]))
    ends: list[ev.Exit] = []
    messages: list[object] = []
    comm: Any = joiner.comm
    comm.machine = SimpleNamespace(state=SimpleNamespace(gen_id=GEN, me=JOINERS[0]))
    comm._main = SimpleNamespace(exited=ends.append, broken=messages.append)
    comm._peers.close = lambda: None
    monkeypatch.setattr(comm, "_say", messages.append)
    monkeypatch.setattr(comm, "_turn", lambda: comm._do(ev.InstallState(())))
    comm._run()
    [end] = ends
    assert not end.finished
    assert f"rank {JOINERS[0]} cannot take the state of the job" in end.why
    assert "made_in_forward: shape (3,) in the model of the job, none on this rank" in end.why
    assert messages == []


def test_staged_states_of_unknown_generations_are_bounded() -> None:
    """Send many states, each of which may be as large as the model."""
    joiner = Donor()
    rank: Any = SimpleNamespace(gen_id=GEN, promise=GEN._replace(counter=GEN.counter + 1))
    joiner.comm.machine = SimpleNamespace(state=rank)  # type: ignore[assignment]
    log: Any = None
    for counter in range(100):
        for generation in (GEN._replace(counter=counter), GEN._replace(incarnation=counter)):
            joiner.comm._stage(ReceivedMessage(StateTransfer(generation, log), (b"state",)))
        joiner.comm._stage(ReceivedMessage(StateTransfer(rank.promise, log), (b"state",)))
        joiner.comm._stage(ReceivedMessage(StateTransfer(rank.gen_id, log), (b"state",)))
    assert {rank.gen_id, rank.promise} <= joiner.comm._staged.keys()
    assert len(joiner.comm._staged) <= 2 + STAGED_MAX
