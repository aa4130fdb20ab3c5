"""Buckets of a script's backward pass are summed while it runs, and only a whole pass counts."""

from __future__ import annotations

import queue
from typing import Any

import pytest
import torch
from paceline.core.protocol.records import BACKWARD, GivenUp, Go, Operation, Trigger
from paceline.core.rank import events as ev
from paceline.worker.bucket_sums import BucketSums, fill
from paceline_api.ids import GenerationId

PATIENCE_S = 60.0
QUIET_S = 0.05
SIZES = (3, 4, 2)
PARTS = tuple(("float32", size) for size in SIZES)
OPERATION = Operation(BACKWARD, 1, 5, True, PARTS)
COMING = ev.Coming((), 8, 1, OPERATION, "train.py:1")
STEP = ev.Step((), 8, 1, operation=OPERATION, where="train.py:1")
CALL = ev.Step((), 0, 1, operation=Operation("barrier", 1, 5), where="train.py:1")
GO = Go(GenerationId(1, "a", 1), 0, Trigger.ALL, streamed=True, operation=OPERATION)


class Channel:
    """Replaces a `DataChannel`: a sum lasts until the test completes it."""

    def __init__(self) -> None:
        self.begun: queue.Queue[list[float]] = queue.Queue()
        self.ends: queue.Queue[ev.ChannelFailed | Exception | float] = queue.Queue()

    def sum(self, buffers: list[torch.Tensor]) -> ev.ChannelFailed | None:
        [buffer] = buffers
        self.begun.put(buffer.tolist())
        end = self.ends.get(timeout=PATIENCE_S)
        if isinstance(end, Exception):
            raise end
        if isinstance(end, ev.ChannelFailed):
            return end
        buffer[:-1] += end
        return None


class OneRank:
    """A rank whose threads the test plays."""

    def __init__(self) -> None:
        self.channel, self.woken = Channel(), queue.Queue[None]()
        self.sums = BucketSums(self.channel, lambda: self.woken.put(None))  # type: ignore[arg-type]
        self.scratch = [torch.full((size + 1,), 9.0) for size in SIZES]
        self.buckets = [torch.full((size,), 2.0 + n) for n, size in enumerate(SIZES)]

    def reduce(self, buckets: Any = None, **how: Any) -> None:
        self.sums.reduce(ev.Reduce(GO, None, 1.0, **how), self.scratch, buckets, 0.5)

    def contributes(self) -> list[float]:
        return self.channel.begun.get(timeout=PATIENCE_S)

    def is_quiet(self) -> bool:
        try:
            self.channel.begun.get(timeout=QUIET_S)
        except queue.Empty:
            return True
        return False

    def outcome(self) -> Any:
        while (outcome := self.sums.outcome()) is None:
            self.woken.get(timeout=PATIENCE_S)
        return outcome

    def finish(self) -> Any:
        for _ in SIZES:
            self.channel.ends.put(0.0)
        return self.outcome()


@pytest.fixture
def rank() -> Any:
    one = OneRank()
    yield one
    one.channel.ends.put(ev.ChannelFailed("the test is over", aborted=True))
    one.sums.shutdown()


def test_buckets_are_summed_in_order_while_backward_computes_the_next(rank: OneRank) -> None:
    assert rank.sums.begin(COMING, "model")
    rank.sums.hand_over(rank.buckets[0])
    rank.reduce(in_hand=True)
    assert rank.contributes() == [1.0, 1.0, 1.0, 0.0]
    rank.channel.ends.put(0.5)
    assert rank.is_quiet()
    rank.sums.hand_over(rank.buckets[1])
    assert rank.contributes() == [1.5] * 4 + [0.0]
    assert rank.scratch[0].tolist() == [1.5] * 3 + [0.0]


def test_the_last_bucket_waits_until_the_operation_is_announced(rank: OneRank) -> None:
    rank.sums.begin(COMING, "model")
    rank.reduce(in_hand=True)
    for bucket in rank.buckets:
        rank.sums.hand_over(bucket)
    rank.channel.ends.put(0.0)
    rank.channel.ends.put(0.0)
    rank.contributes()
    rank.contributes()
    assert rank.is_quiet()
    rank.sums.close(STEP)
    assert rank.is_quiet()
    rank.sums.complete()
    assert rank.contributes() == [2.0, 2.0, 0.0]
    rank.channel.ends.put(0.0)
    assert isinstance(rank.outcome(), ev.Reduced)
    assert rank.sums.hidden_ns > 0


def test_buckets_of_an_announced_operation_are_all_contributed(rank: OneRank) -> None:
    rank.reduce(rank.buckets)
    assert isinstance(rank.finish(), ev.Reduced)
    assert [each[0].item() for each in rank.scratch] == [1.0, 1.5, 2.0]
    assert rank.sums.hidden_ns == 0


def test_a_rank_without_the_state_contributes_zeros(rank: OneRank) -> None:
    rank.reduce()
    assert isinstance(rank.finish(), ev.Reduced)
    assert not any(each.any() for each in rank.scratch)


@pytest.mark.parametrize("how", ["again", "call", "order"])
def test_a_pass_that_does_not_end_flags_the_round(rank: OneRank, how: str) -> None:
    rank.sums.begin(COMING, "model")
    rank.sums.hand_over(rank.buckets[0])
    rank.reduce(in_hand=True)
    rank.contributes()
    rank.channel.ends.put(0.0)
    assert rank.is_quiet()
    match how:
        case "again":
            assert rank.sums.begin(COMING, "model")
        case "call":
            rank.sums.close(CALL)
            rank.sums.complete()
        case "order":
            rank.sums.give_up(GivenUp.LATE)
    assert rank.contributes() == [0.0] * 4 + [1.0]
    rank.channel.ends.put(0.0)
    outcome = rank.outcome()
    assert outcome == ev.Voided(GivenUp.LATE if how == "order" else GivenUp.DROPPED)


def test_the_flag_of_another_rank_ends_the_round(rank: OneRank) -> None:
    rank.reduce(rank.buckets)
    rank.contributes()
    rank.scratch[0][-1] = 1
    rank.channel.ends.put(0.0)
    assert rank.outcome() == ev.Voided(None)


def test_an_order_ends_the_wait_and_the_pass_is_summed_again_from_its_first_bucket(
    rank: OneRank,
) -> None:
    rank.sums.begin(COMING, "model")
    rank.sums.hand_over(rank.buckets[0])
    rank.reduce(in_hand=True)
    rank.contributes()
    rank.channel.ends.put(0.0)
    assert rank.is_quiet()
    rank.sums.stop()
    assert isinstance(rank.outcome(), ev.ChannelFailed)
    rank.reduce(in_hand=True)
    assert rank.contributes() == [1.0, 1.0, 1.0, 0.0]


def test_a_go_that_names_a_pass_which_is_gone_makes_the_round_void(rank: OneRank) -> None:
    rank.reduce(in_hand=True)
    assert rank.contributes() == [0.0] * 3 + [1.0]
    rank.channel.ends.put(0.0)
    assert rank.outcome() == ev.Voided(GivenUp.DROPPED)


def test_two_models_in_one_backward_pass_do_not_disturb_each_other(rank: OneRank) -> None:
    assert rank.sums.begin(COMING, "one model")
    assert not rank.sums.begin(COMING, "another model")
    rank.sums.hand_over(rank.buckets[0])
    rank.sums.close(STEP)
    assert rank.sums.begin(COMING, "another model")


def test_an_error_of_the_thread_is_raised_where_the_outcome_is_taken(rank: OneRank) -> None:
    rank.reduce(rank.buckets)
    rank.channel.ends.put(RuntimeError("a library failed"))
    rank.woken.get(timeout=PATIENCE_S)
    with pytest.raises(RuntimeError, match="a library failed"):
        rank.sums.outcome()


def test_half_precision_is_weighted_in_the_type_of_the_sum() -> None:
    bucket = torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    scratch = torch.full((3,), 7.0)
    fill(scratch, bucket, 1 / 3)
    assert scratch.tolist() == torch.tensor([1 / 3, 1.0, 0.0]).tolist()
