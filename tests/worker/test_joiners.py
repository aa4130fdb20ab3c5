"""The costs of a start and a join for the rank that is the donor of the state (D15)."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paceline.core.messages import StateTransfer
from paceline.core.rank import events as ev
from paceline.telemetry.records import RankRecord
from paceline.transport.solo import NoTransport
from paceline.worker.comm_thread import STAGED_MAX, CommThread, Interrupts
from paceline.worker.operations import Operations, ScriptThread
from paceline.worker.peer_sockets import ReceivedMessage
from paceline.worker.state.committed import Committed
from paceline.worker.state.gradients import Gradients
from paceline_api.ids import GenerationId, MemberId
from torch import nn

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
        machine: Any = SimpleNamespace(state=SimpleNamespace(log=log, operation=None))
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
    said: list[object] = []
    comm: Any = joiner.comm
    comm.machine = SimpleNamespace(state=SimpleNamespace(gen_id=GEN, me=JOINERS[0]))
    comm._main = SimpleNamespace(exited=ends.append, broken=said.append)
    comm._peers.close = lambda: None
    monkeypatch.setattr(comm, "_say", said.append)
    monkeypatch.setattr(comm, "_turn", lambda: comm._do(ev.InstallState(())))
    comm._run()
    [end] = ends
    assert not end.finished
    assert f"rank {JOINERS[0]} cannot take the state of the job" in end.why
    assert "made_in_forward: shape (3,) in the model of the job, none on this rank" in end.why
    assert said == []


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
