"""How the operator reads a coordinator's answer: bytes from a program that a tenant chooses."""

from __future__ import annotations

import json
import tracemalloc
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.core.status import Fact
from paceline_api.ids import GenerationId, MemberId
from paceline_api.reasons import Reason
from paceline_api.status import (
    HISTORY_MAX,
    HistoryEntry,
    LogStatus,
    MembershipChange,
    Outcome,
    RankPhase,
    RankStatus,
    Status,
)
from paceline_api.types.enums import Network
from paceline_operator.core.coordinator_status import (
    ANSWER_BYTES_MAX,
    DEAD_RANKS,
    AnswerError,
    RefusedAnswer,
    StatusLimits,
    read_coordinator_status,
)

from testing.fake_cluster.observations import read

ONE_POD = StatusLimits.of(1, 1)
DEPTH = 50_000


def filled(start: bytes, item: bytes, end: bytes, limits: StatusLimits) -> bytes:
    """Return as many of `item`, separated by commas, as the limit of bytes allows."""
    count = (limits.bytes - len(start) - len(end)) // (len(item) + 1)
    return start + b",".join([item] * count) + end


def nested(start: bytes) -> bytes:
    return b'{"seq":1,' + start + b"[" * DEPTH + b"]" * DEPTH + b"}"


RANKS = b'{"seq":1,"ranks":['
HOSTILE: dict[str, tuple[bytes, RefusedAnswer]] = {
    "empty lists as ranks": (filled(RANKS, b"[]", b"]}", ONE_POD), RefusedAnswer.COUNT),
    "empty objects as ranks": (filled(RANKS, b"{}", b"]}", ONE_POD), RefusedAnswer.COUNT),
    "a few empty objects as ranks": (RANKS + b"{},{}]}", RefusedAnswer.FORM),
    "smallest ranks": (filled(RANKS, b'{"member":[0,0,0]}', b"]}", ONE_POD), RefusedAnswer.COUNT),
    "one rank too many": (
        msgspec.json.encode({"ranks": [{"member": [n, 0, 1]} for n in range(ONE_POD.ranks + 1)]}),
        RefusedAnswer.COUNT,
    ),
    "one share too many": (
        msgspec.json.encode({"log": {"shares": {f"{n}": 1 for n in range(ONE_POD.ranks + 1)}}}),
        RefusedAnswer.COUNT,
    ),
    "happenings": (filled(b'{"happenings":[', b"{}", b"]}", ONE_POD), RefusedAnswer.COUNT),
    "conditions": (filled(b'{"conditions":[', b"{}", b"]}", ONE_POD), RefusedAnswer.COUNT),
    "a field that nobody knows": (filled(b'{"x":[', b"0", b"]}", ONE_POD), RefusedAnswer.COUNT),
    "deep ranks": (nested(b'"ranks":'), RefusedAnswer.FORM),
    "deep settings": (b'{"settings":{"a":' + b"[" * 9000 + b"]" * 9000 + b"}}", RefusedAnswer.FORM),
    "deep in a field that nobody knows": (
        b'{"x":' + b"[" * 9000 + b"]" * 9000 + b"}",
        RefusedAnswer.FORM,
    ),
    "a tree in settings": (b'{"settings":{"a":{"b":1}}}', RefusedAnswer.FORM),
    "a long name": (msgspec.json.encode({"coordinator": "x" * 10_000}), RefusedAnswer.FORM),
    "a text for a number": (b'{"seq":"1"}', RefusedAnswer.FORM),
    "a number that JSON readers round": (b'{"seq":9007199254740993}', RefusedAnswer.FORM),
    "a large number of rounds": (
        b'{"log":{"rounds":{"full":9223372036854775808}}}',
        RefusedAnswer.FORM,
    ),
    "a large slot": (b'{"ranks":[{"member":[9223372036854775808,0,1]}]}', RefusedAnswer.FORM),
    "a negative slot": (b'{"ranks":[{"member":[-1,0,1]}]}', RefusedAnswer.FORM),
    "a number for a text": (b'{"transport":1}', RefusedAnswer.FORM),
    "null for a list": (b'{"ranks":null}', RefusedAnswer.FORM),
    "a number with too many digits": (b'{"seq":' + b"9" * 10_000 + b"}", RefusedAnswer.FORM),
    "a float out of range": (b'{"log":{"round_s":1e400}}', RefusedAnswer.FORM),
    "NaN": (b'{"log":{"round_s":NaN}}', RefusedAnswer.FORM),
    "half of it": (b'{"seq":1,"ranks":[', RefusedAnswer.FORM),
    "no text": (b'{"transport":"\xff\xfe"}', RefusedAnswer.FORM),
    "half a character": (b'{"transport":"\\ud800"}', RefusedAnswer.FORM),
    "nothing": (b"", RefusedAnswer.FORM),
    "another value": (b"[]", RefusedAnswer.FORM),
    "two values": (b"{}{}", RefusedAnswer.FORM),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_is_refused_with_little_memory(name: str) -> None:
    raw, refused = HOSTILE[name]
    assert len(raw) <= ONE_POD.bytes, "the driver would not have read it"
    tracemalloc.start()
    try:
        with pytest.raises(AnswerError) as error:
            read_coordinator_status(raw, ONE_POD)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert error.value.refused is refused, error.value
    assert most < 8 * len(raw) + 2**20


@pytest.mark.long
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists))
def test_any_value_of_a_field_is_read_or_refused(value: Any) -> None:
    for field in ("seq", "ranks", "log", "settings", "happenings", "outcome", "generation", "new"):
        with suppress(AnswerError):
            read_coordinator_status(json.dumps({field: value}).encode(), ONE_POD)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    with suppress(AnswerError):
        read_coordinator_status(raw, ONE_POD)


@pytest.mark.parametrize("pods", [0, 1, 3, 10_000])
@pytest.mark.parametrize("procs", [1, 8, 256])
def test_the_limits_grow_with_existing_pods_up_to_a_few_mib(pods: int, procs: int) -> None:
    limits = StatusLimits.of(pods, procs)
    assert limits.ranks == pods * procs + DEAD_RANKS
    assert limits.bytes <= ANSWER_BYTES_MAX <= 8 * 2**20
    assert limits.values <= limits.bytes // 8


def honest(ranks: int) -> Status:
    """Return a status with everything: a full history, long texts, figures of each rank."""
    facts = {str(Fact.STEP_S): 0.012345, str(Fact.LAG_S): 0.00012345}
    facts |= {f"a_figure_of_a_rank.{n}": 1234.56789 for n in range(16)}
    members = [MemberId(slot, 0, 1000) for slot in range(ranks)]
    generation = GenerationId(3, "0b1a33ca-63c6-4d1c-9b3a-2c5b3a0d9f11", 12)
    message = "rank 1.0#1000 has left the generation 1.2, its pod was drained; 63 ranks go on" * 2
    return Status(
        "digits",
        "0b1a33ca-63c6-4d1c-9b3a-2c5b3a0d9f11",
        seq=7,
        generation=generation,
        changes=tuple(
            MembershipChange(generation, "Joined", message, 9, 9, 1.5, 0.1) for _ in range(64)
        ),
        history=tuple(HistoryEntry(n, 1e9 + n, "Joined", message) for n in range(HISTORY_MAX)),
        ranks=tuple(
            RankStatus(
                member,
                RankPhase.ACTIVE,
                rank=index,
                pid=4_000_000,
                host="a-node-with-a-long-name-0123456789.example.com",
                version=123_456,
                facts=facts,
                carrier=Network.TCP,
                why="silent since 3.2 s, its agent says that the process runs",
            )
            for index, member in enumerate(members)
        ),
        log=LogStatus(shares={str(member): 0.98765 for member in members}, round_s=float("inf")),
        outcome=Outcome(False, "ScriptFailed", "Traceback: [1, 2, {'a': 3}]\n" * 300, "look"),
    )


@pytest.mark.parametrize("ranks", [1, 8, 1024, 4096])
def test_a_complete_honest_answer_is_accepted(ranks: int) -> None:
    limits = StatusLimits.of(ranks, 1)
    raw = msgspec.json.encode(honest(ranks))
    assert len(raw) <= limits.bytes
    status = read_coordinator_status(raw, limits)
    assert len(status.ranks) == ranks
    assert status.membership == "3.12"
    assert status.log.shares[str(status.ranks[-1].member)] == 0.98765
    assert status.outcome is not None
    assert status.outcome.message.startswith("Traceback")
    assert status.log.round_s is None, "infinite"


def test_large_figures_are_clamped() -> None:
    facts = {"step_seconds": 1e308, "lag_seconds": -1e308}
    log = {"progress": 1e308, "left_s": -1e308, "round_s": 1e308, "avoided_s": 1e308}
    status = read({"log": log, "ranks": [{"member": [1, 0, 1000], "facts": facts}]})
    (rank,) = status.ranks
    numbers = [status.log.progress, status.log.left_s, status.log.round_s, status.log.avoided_s]
    numbers += [rank.step_s, rank.lag_s]
    assert all(number is not None and abs(number) == 2**53 for number in numbers)


def test_figures_that_no_decision_reads_are_dropped() -> None:
    facts = {"gradient_square": 1e300, "step_seconds": 0.5, "carried.mpi": 3.0}
    log = {"metrics": {"loss": 1e300}, "samples_applied": 5}
    status = read({"log": log, "ranks": [{"member": [1, 0, 1000], "facts": facts, "host": "n"}]})
    assert status.ranks == (RankStatus(MemberId(1, 0, 1000), facts={"step_seconds": 0.5}),)
    assert status.log == LogStatus()


@pytest.mark.parametrize("state", ["warming-up", "x" * 10**5])
def test_a_phase_of_a_newer_release_counts_as_joining(state: str) -> None:
    status = read({"ranks": [{"member": [1, 0, 1000], "state": state, "carrier": state}]})
    assert (status.ranks[0].state, status.ranks[0].carrier) == (RankPhase.JOINING, Network.UNKNOWN)


@pytest.mark.long
def test_history_and_texts_are_truncated() -> None:
    reason = "ResumedFromCheckpoint"
    happened = [{"seq": n, "reason": reason, "message": "m" * 10**5} for n in range(1000)]
    conditions = [{"type": f"t{n}", "message": "m" * 10**5} for n in range(1000)]
    ranks = [{"member": [0, 0, 1000], "why": "w" * 10**5}]
    status = read({"happenings": happened, "conditions": conditions, "ranks": ranks})
    assert [h.seq for h in status.history] == list(range(1000 - 256, 1000)), "the latest"
    assert len(status.conditions) == 16
    texts = [h.message for h in status.history] + [rank.why for rank in status.ranks]
    texts += [one.reason + one.message for one in status.conditions]
    assert max(map(len, texts)) < 4_000


def test_only_reported_kinds_of_happenings_are_kept() -> None:
    """The whole history of a long job would be larger than all other data of the operator."""
    reasons = ["Draining", "ResumedFromCheckpoint", "RankDied", "BatchSkipped"]
    happened = [{"seq": n, "reason": each, "message": "m"} for n, each in enumerate(reasons)]
    status = read({"happenings": happened})
    resumed, skipped = Reason.RESUMED_FROM_CHECKPOINT, Reason.BATCH_SKIPPED
    assert status.history == (
        HistoryEntry(1, reason=resumed, message="m"),
        HistoryEntry(3, reason=skipped, message="m"),
    )


def test_missing_and_unknown_fields_of_other_releases_are_accepted() -> None:
    assert read({}).has_targets
    assert read({}).carrier is None
    status = read(
        {"seq": 4, "new": {"deep": [[1], {"a": [2]}]}, "ranks": [{"member": [1, 0, 2000]}]}
    )
    assert (status.seq, status.ranks[0].pod) == (4, (1, 2))
