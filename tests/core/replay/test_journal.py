"""The binary format of a journal, and the log that several journals contain together."""

from __future__ import annotations

import pytest
from paceline.core.protocol.log import chain
from paceline.core.protocol.pending import BufferName
from paceline.core.protocol.records import DataPlan, Gen, Go, Record, Share, Trigger
from paceline.core.replay.journal import (
    Ended,
    Entry,
    Gave,
    Let,
    Logged,
    Opened,
    Skipped,
    Stepped,
    pack,
    unpack,
)
from paceline.core.replay.sequence import (
    Compute,
    Give,
    Round,
    SequenceError,
    compose,
    true_log,
)
from paceline_api.ids import GenerationId, MemberId
from paceline_api.rounds import RoundSettings

A, B = MemberId(0, 0, 0), MemberId(1, 0, 0)
ONE, TWO = GenerationId(1, "c", 1), GenerationId(1, "c", 2)
PLAN = DataPlan(samples=4, batch=1, epochs=1)
FIRST = Gen(
    ONE, (A, B), (A, B), (A, B), 0, lookahead=((A, 2), (B, 2)), plan=PLAN, settings=RoundSettings()
)
SECOND = Gen(TWO, (A,), (A,), (A,), 1, lookahead=((A, 2),))


def go(generation: GenerationId, round_: int, *shares: tuple[MemberId, int]) -> Go:
    named = tuple(
        Share(m, upto=1, count=1, oldest=round_, fresh=True, samples=1, unit=1, leases=(lease,))
        for m, lease in shares
    )
    return Go(generation, round_, Trigger.ALL, named)


def logged(*records: Record) -> list[Logged]:
    entries, digest = [], ""
    for index, record in enumerate(records, 1):
        digest = chain(digest, record)
        entries.append(Logged(index, digest, record))
    return entries


def ended(log: list[Logged]) -> Ended:
    return Ended(log[-1].index, log[-1].digest, 1, "state")


def gave(round_: int, generation: GenerationId = ONE) -> Gave:
    return Gave(generation, round_, BufferName.GRAD, 1.0, ("mpi:ring",))


def step(lease: int) -> Stepped:
    return Stepped((lease,), 1, 1, True)


def test_a_truncated_entry_at_the_end_is_ignored() -> None:
    entries: list[Entry] = [Opened(1, A), Let(0), step(3), gave(0)]
    data = b"".join(map(pack, entries))
    assert list(unpack(data)) == entries
    for cut in range(1, len(pack(entries[-1])) + 1):
        assert list(unpack(data[:-cut])) == entries[:-1]


def test_the_log_of_a_rank_that_was_left_out_is_not_used() -> None:
    """Rank B commits round 1 of the first generation; A makes another round 1 in the second."""
    common = (FIRST, go(ONE, 0, (A, 0), (B, 1)))
    left = logged(*common, go(ONE, 1, (A, 2), (B, 3)))
    kept = logged(*common, SECOND, go(TWO, 1, (A, 2)))
    end, records, digests = true_log({A: [*kept, ended(kept)], B: [*left]})
    assert records == [e.record for e in kept]
    assert digests == [e.digest for e in kept]
    assert end.index == 4


def test_an_aborted_attempt_contributes_nothing() -> None:
    log = logged(FIRST, go(ONE, 0, (A, 0), (B, 1)), SECOND, go(TWO, 1, (A, 2)))
    a: list[Entry] = [
        *(log[0], Let(0), step(0), gave(0), log[1], Let(1), step(2)),
        *(gave(1), log[2], gave(1, TWO), log[3], ended(log)),
    ]
    b: list[Entry] = [log[0], Let(0), step(1), gave(0)]  # B is killed during round 0.
    played = compose({A: a, B: b}).actions
    names = [(type(x).__name__, getattr(x, "member", None)) for x in played]
    assert names == [
        ("Compute", A),
        ("Give", A),
        ("Compute", B),
        ("Give", B),
        ("Round", None),
        ("Compute", A),
        ("Give", A),
        ("Round", None),
    ]
    assert [x.members for x in played if isinstance(x, Round)] == [(A, B), (A,)]
    assert [x.step.leases for x in played if isinstance(x, Compute)] == [(0,), (1,), (2,)]
    assert sum(isinstance(x, Give) for x in played) == 3


def test_the_error_says_why_a_run_cannot_be_replayed() -> None:
    log = logged(FIRST, go(ONE, 0, (A, 0), (B, 1)))
    whole: list[Entry] = [log[0], Let(0), step(0), gave(0), log[1], ended(log)]
    with pytest.raises(SequenceError, match=r"the journal of rank 1\.0#0 lacks"):
        compose({A: whole, B: [log[0]]})
    with pytest.raises(SequenceError, match="record 1 of 2 is in no journal"):
        compose({A: whole[1:]})
    with pytest.raises(SequenceError, match="made no step of it"):
        compose({A: whole, B: [log[0], Let(0), Skipped(1)]})
    more = logged(FIRST, go(ONE, 0, (A, 0), (B, 1)), go(ONE, 1, (A, 2), (B, 3)))
    both: list[Entry] = [*whole[:-1], Let(1), step(2), gave(1), more[2], ended(more)]
    once: list[Entry] = [more[0], Let(0), step(1), gave(0), more[1], Let(1), step(3)]
    with pytest.raises(SequenceError, match=r"rank 1\.0#0 lacks what it gave to round 1"):
        compose({A: both, B: once})
    other = Ended(2, log[-1].digest, 1, "another state")
    with pytest.raises(SequenceError, match="ended with different"):
        compose({A: whole, B: [other]})
