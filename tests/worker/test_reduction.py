"""The reductions of one rank: when it contributes a segment and what aborts a round (R27-R31).

The rank here has three segments with one parameter each, and a channel whose transfers the test
observes and completes. Tests with several ranks use the data channel of the simulation and show
that the sums agree.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from paceline.core.protocol.pending import BufferName
from paceline.core.protocol.records import GivenUp, Go, Trigger
from paceline.core.rank import events as ev
from paceline.errors import RuntimeBrokenError
from paceline.telemetry.records import RankRecord
from paceline.transport.base import Abort, Group, Peer, TransportAborted
from paceline.worker import streamed_rounds
from paceline.worker.reduction import Reducer
from paceline.worker.state.committed import Committed
from paceline.worker.state.gradients import Gradients
from paceline_api.ids import GenerationId

from testing.memory_transport import Hub, SimTransport

PATIENCE_S = 60.0
QUIET_S = 0.05
"""How long nothing must happen for the channel to count as idle."""
SEGMENTS = 3
NUMEL = 16
"""The elements of a cache line, so that each parameter is a segment."""
LAST = SEGMENTS - 1
GEN = GenerationId(1, "a", 1)
COMING = ev.Coming(leases=(7,), samples=4, unit=4)
STEP = ev.Step(leases=(7,), samples=4, unit=4)
NAN = float("nan")

Answer = ev.ChannelFailed | Exception | None


def order(
    *, streamed: bool = True, source: BufferName | None = BufferName.GRAD, **facts: Any
) -> Any:
    sync = facts.pop("sync", False)
    go = Go(GEN, 0, Trigger.ALL, streamed=streamed, sync=sync)
    return ev.Reduce(go, source, facts.pop("factor", 1.0), **facts)


class ToldChannel:
    """Replaces a `DataChannel`: a transfer lasts until the test completes it."""

    def __init__(self) -> None:
        self._begun: queue.Queue[torch.Tensor] = queue.Queue()
        self._answers: queue.Queue[tuple[Answer, float, bool]] = queue.Queue()

    def sum(
        self, buffers: list[torch.Tensor], residuals: Sequence[torch.Tensor | None] = ()
    ) -> ev.ChannelFailed | None:
        assert not residuals
        for buffer in buffers:
            self._begun.put(buffer.clone())
            answer, others, flag = self._answers.get(timeout=PATIENCE_S)
            if isinstance(answer, Exception):
                raise answer
            if answer is not None:
                return answer
            buffer[:NUMEL] += others
            if flag:
                buffer[-1] += 1
        return None

    def end(self, answer: Answer = None, *, others: float = 0.0, flag: bool = False) -> None:
        """Complete the transfer in flight, or the next one."""
        self._answers.put((answer, others, flag))

    def abort(self) -> None:
        self.end(ev.ChannelFailed("the test is over", aborted=True))

    def begun(self) -> tuple[float, bool]:
        """Return this rank's contribution to the next transfer, and its flag."""
        buffer = self._begun.get(timeout=PATIENCE_S)
        assert buffer[0] == buffer[NUMEL - 1]
        assert not buffer[NUMEL:-1].any()
        return float(buffer[0]), bool(buffer[-1])

    def is_quiet(self) -> bool:
        try:
            self._begun.get(timeout=QUIET_S)
        except queue.Empty:
            return True
        return False


class OneRank:
    """A rank's gradients and `Reducer`; the test plays its threads."""

    def __init__(self, channel: Any, segments: int = SEGMENTS) -> None:
        self.channel = channel
        self.parameters = [torch.nn.Parameter(torch.zeros(NUMEL)) for _ in range(segments)]
        named = [(f"p{i}", p) for i, p in enumerate(self.parameters)]
        self.gradients = Gradients(named, segment_bytes=NUMEL * 4)
        assert len(self.gradients.layout.segments) == segments
        self.buffers = torch.full((NUMEL,), 5.0)
        self.posted: queue.Queue[ev.Coming | None] = queue.Queue()
        model = torch.nn.ParameterList(self.parameters)
        committed = Committed(model, torch.optim.SGD(self.parameters, 1.0), self.gradients)
        self.reducer = Reducer(
            channel,
            self.gradients,
            committed,
            lambda _: self.buffers,
            self.posted.put,
            RankRecord.create().rounds,
        )

    # ---- the main thread

    def write(self, segment: int, value: float) -> None:
        """Let backward() make the gradient of this segment, with `value` everywhere."""
        (self.parameters[-1 - segment] * value).sum().backward()

    def compute(self, *values: float) -> None:
        self.reducer.begin(COMING)
        for segment, value in enumerate(values):
            self.write(segment, value)

    # ---- the communication thread

    def step(self, step: ev.Step = STEP) -> ev.Step:
        self.reducer.close()
        finished = self.reducer.finish(step)
        self.reducer.complete()
        return finished

    def next_coming(self) -> ev.Coming | None:
        return self.posted.get(timeout=PATIENCE_S)

    def outcome(self) -> ev.Reduced | ev.Voided | ev.ChannelFailed | None:
        """Return the outcome of the streamed round, skipping earlier announcements."""
        while self.next_coming() is not None:
            pass
        return self.reducer.outcome()

    def result(self) -> list[float]:
        return [float(flat[0]) for flat in self.gradients.result]


@pytest.fixture
def make() -> Iterator[Callable[..., OneRank]]:
    """Yield a function that makes ranks; check that none of their threads outlives the test."""
    before, made = set(threading.enumerate()), ExitStack()

    def make(channel: Any = None, segments: int = SEGMENTS) -> OneRank:
        rank = OneRank(channel or ToldChannel(), segments)
        made.callback(rank.channel.abort)
        made.callback(rank.reducer.shutdown)
        return rank

    with made:
        yield make
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), f"{thread.name} was left behind"


@pytest.fixture
def rank(make: Callable[..., OneRank]) -> OneRank:
    return make()


# ---- when a segment is contributed ---------------------------------------------------------------


def test_a_batch_is_announced_once_its_first_segment_is_ready(rank: OneRank) -> None:
    rank.reducer.begin(COMING)
    rank.write(2, 3.0)
    rank.write(1, 2.0)
    with pytest.raises(queue.Empty):
        rank.posted.get(timeout=QUIET_S)
    rank.write(0, 1.0)
    assert rank.next_coming() == COMING


def test_segments_are_sent_when_ready_and_the_last_one_after_the_step(
    rank: OneRank,
) -> None:
    rank.compute(1.0)
    assert rank.next_coming() == COMING
    rank.reducer.reduce(order(in_hand=True, factor=2.0))
    assert rank.channel.begun() == (2.0, False)
    assert rank.reducer.busy_since_ns
    rank.channel.end(others=10.0)
    assert rank.channel.is_quiet()
    assert not rank.reducer.busy_since_ns, "nobody is to blame for a batch that takes its time"
    rank.write(1, 2.0)
    assert rank.channel.begun() == (4.0, False)
    rank.channel.end(others=20.0)
    rank.write(2, 3.0)
    assert rank.channel.is_quiet(), "the last one, before the step is known"
    assert rank.reducer.outcome() is None
    assert rank.step() == STEP
    assert rank.channel.begun() == (6.0, False)
    rank.channel.end(others=30.0)
    assert isinstance(rank.outcome(), ev.Reduced)
    assert rank.result() == [12.0, 24.0, 36.0]
    assert rank.reducer.hidden_ns > 0
    assert [float(p.grad[0]) for p in rank.parameters if p.grad is not None] == [3.0, 2.0, 1.0]


@pytest.mark.parametrize("gives_up", [False, True])
def test_the_next_segment_is_prepared_during_a_transfer(rank: OneRank, gives_up: bool) -> None:
    rank.compute(1.0)
    rank.reducer.reduce(order(in_hand=True))
    assert rank.channel.begun() == (1.0, False)
    rank.write(1, 2.0)
    until = time.monotonic() + PATIENCE_S
    while rank.gradients.result[1][0] != 2.0:
        assert time.monotonic() < until, "it waits for the transfer before it"
        time.sleep(0.001)
    assert rank.channel.is_quiet()
    if gives_up:  # the segment that is ready is flagged all the same
        rank.reducer.give_up(GivenUp.LATE)
    rank.channel.end()
    assert rank.channel.begun() == (2.0, gives_up)


def test_segments_are_sent_in_order_whichever_is_ready_first(rank: OneRank) -> None:
    rank.compute(1.0)
    rank.reducer.reduce(order(in_hand=True))
    rank.write(2, 3.0)
    assert rank.channel.begun() == (1.0, False)
    rank.channel.end()
    assert rank.channel.is_quiet()
    rank.write(1, 2.0)
    assert rank.channel.begun() == (2.0, False)


@pytest.mark.parametrize("source", [BufferName.LATE, None])
def test_a_rank_with_no_batch_in_hand_sends_all_segments_at_once(
    rank: OneRank, source: BufferName | None
) -> None:
    """Let the rank compute meanwhile: that batch belongs to a later round."""
    rank.compute(1.0, 2.0, 3.0)
    rank.gradients.swap()
    rank.reducer.begin(COMING)
    rank.reducer.reduce(order(source=source))
    for value in (1.0, 2.0, 3.0):
        assert rank.channel.begun() == (value if source else 0.0, False)
        rank.channel.end()
    assert isinstance(rank.outcome(), ev.Reduced)


def test_a_step_that_was_taken_before_the_round_is_sent_whole(rank: OneRank) -> None:
    rank.compute(1.0, 2.0, 3.0)
    rank.step()
    rank.reducer.reduce(order())
    for value in (1.0, 2.0, 3.0):
        assert rank.channel.begun() == (value, False)
        rank.channel.end()
    assert isinstance(rank.outcome(), ev.Reduced)


def test_a_segment_with_a_missing_gradient_waits_for_the_step(
    rank: OneRank,
) -> None:
    rank.compute(1.0)
    rank.write(2, 3.0)
    rank.reducer.reduce(order(in_hand=True))
    rank.channel.begun()
    rank.channel.end()
    assert rank.channel.is_quiet()
    rank.step()
    for value in (0.0, 3.0):
        assert rank.channel.begun() == (value, False)
        rank.channel.end()
    assert isinstance(rank.outcome(), ev.Reduced)


def test_gradients_of_earlier_batches_of_a_lease_are_sent_with_the_last(
    rank: OneRank,
) -> None:
    for segment in range(SEGMENTS):
        rank.write(segment, 1.0)
    rank.reducer.close()
    rank.compute(10.0, 20.0, 30.0)
    rank.step()
    rank.reducer.reduce(order())
    for value in (11.0, 21.0, 31.0):
        assert rank.channel.begun() == (value, False)
        rank.channel.end()
    rank.outcome()


def test_gradients_that_the_script_set_to_none_are_copied_in(rank: OneRank) -> None:
    """Call `model.zero_grad()` before backward()."""
    rank.reducer.begin(COMING)
    for parameter in rank.parameters:
        parameter.grad = None
    rank.write(0, 1.0)
    rank.write(1, 2.0)
    rank.reducer.reduce(order(in_hand=True))
    for value in (1.0, 2.0):
        assert rank.channel.begun() == (value, False)
        rank.channel.end()
    rank.write(2, 3.0)
    rank.gradients.attach()
    rank.step()
    assert rank.channel.begun() == (3.0, False)
    rank.channel.end()
    assert isinstance(rank.outcome(), ev.Reduced)
    assert rank.gradients.copied_in == SEGMENTS


def assign_twice(rank: OneRank, parameter: torch.nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 2


def scale_in_place(rank: OneRank, parameter: torch.nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def assign_moved(rank: OneRank, parameter: torch.nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.data = parameter.grad * 2


def take_away(rank: OneRank, parameter: torch.nn.Parameter) -> None:
    parameter.grad = None


def erase_and_compute_again(rank: OneRank, parameter: torch.nn.Parameter) -> None:
    rank.gradients.erase()
    for segment, value in enumerate((2.0, 4.0, 6.0)):
        rank.write(segment, value)


@pytest.mark.parametrize(
    ("change", "want"),
    [
        (assign_twice, [2.0, 2.0, 3.0]),
        (scale_in_place, [2.0, 2.0, 3.0]),
        (assign_moved, [2.0, 2.0, 3.0]),
        (take_away, [0.0, 2.0, 3.0]),
        (erase_and_compute_again, [2.0, 4.0, 6.0]),
    ],
)
def test_a_gradient_assigned_after_it_was_contributed_aborts_the_round(
    rank: OneRank, change: Callable[[OneRank, torch.nn.Parameter], None], want: list[float]
) -> None:
    """Expect the gradient in the next round, with what an earlier step of the contribution left."""
    for segment in range(SEGMENTS):
        rank.write(segment, 8.0)
    rank.gradients.lay_by()
    rank.compute(1.0, 2.0, 3.0)
    rank.reducer.reduce(order(in_hand=True))
    for value in (9.0, 10.0):
        assert rank.channel.begun() == (value, False)
        rank.channel.end()
    change(rank, rank.parameters[-1])
    rank.gradients.attach()
    rank.step()
    assert end_of(rank, LAST) == ev.Voided(GivenUp.REWRITTEN)
    rank.reducer.reduce(order())
    for value in want:
        assert rank.channel.begun() == (value + 8.0, False)
        rank.channel.end()
    assert isinstance(rank.outcome(), ev.Reduced)


def test_a_model_of_one_segment_is_never_announced_early(make: Callable[..., OneRank]) -> None:
    before = set(threading.enumerate())
    rank = make(segments=1)
    rank.compute(1.0)
    assert rank.step() == STEP
    assert rank.posted.empty()
    assert set(threading.enumerate()) == before
    rank.channel.end()
    assert isinstance(rank.reducer.reduce(order(streamed=False)), ev.Reduced)
    assert rank.channel.begun() == (1.0, False)


def test_a_parameter_that_is_used_twice_is_counted_once(rank: OneRank) -> None:
    shared = rank.parameters[-1]
    rank.reducer.begin(COMING)
    ((shared * 2.0).sum() + (shared * 3.0).sum()).backward()
    rank.reducer.reduce(order(in_hand=True))
    assert rank.channel.begun() == (5.0, False)


def test_buffers_are_averaged_after_the_last_segment(rank: OneRank) -> None:
    rank.compute(1.0, 2.0, 3.0)
    rank.step()
    go = Go(GEN, 0, Trigger.ALL, streamed=True, sync=True)
    rank.reducer.reduce(ev.Reduce(go, BufferName.GRAD, 1.0))
    for value in (1.0, 2.0, 3.0):
        assert rank.channel.begun() == (value, False)
        rank.channel.end()
    assert rank.channel.begun()[0] == 5.0
    rank.channel.end()
    assert isinstance(rank.outcome(), ev.Reduced)


# ---- aborted rounds ------------------------------------------------------------------------------


def end_of(rank: OneRank, first: int) -> ev.Reduced | ev.Voided | ev.ChannelFailed | None:
    """Check that this rank contributes zeros and its flag to segment `first`, the last one sent."""
    assert rank.channel.begun() == (0.0, True), f"segment {first}"
    rank.channel.end(others=1.0)
    assert rank.channel.is_quiet()
    return rank.outcome()


def stream_until(rank: OneRank, segment: int) -> None:
    """Make and reduce the segments before this one."""
    rank.reducer.begin(COMING)
    rank.reducer.reduce(order(in_hand=True))
    for ready in range(segment):
        rank.write(ready, 1.0 + ready)
        assert rank.channel.begun() == (1.0 + ready, False)
        rank.channel.end()


@pytest.mark.parametrize("segment", range(SEGMENTS))
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_a_gradient_that_is_not_finite_aborts_the_round(
    rank: OneRank, segment: int, bad: float
) -> None:
    stream_until(rank, segment)
    rank.write(segment, bad)
    if segment == LAST:
        assert rank.channel.is_quiet()
        assert not rank.step().finite
    assert end_of(rank, segment) == ev.Voided(GivenUp.NONFINITE)
    if segment != LAST:
        assert not rank.step().finite


def test_a_batch_with_a_nan_in_its_first_segment_is_not_announced_early(rank: OneRank) -> None:
    rank.compute(NAN, 1.0, 1.0)
    with pytest.raises(queue.Empty):
        rank.posted.get(timeout=QUIET_S)
    assert not rank.step().finite


@pytest.mark.parametrize("segment", range(LAST))
def test_a_segment_written_after_it_was_sent_aborts_the_round(rank: OneRank, segment: int) -> None:
    """Cover two backward() passes and a script that scales p.grad."""
    stream_until(rank, LAST)
    rank.write(LAST, 3.0)
    rank.write(segment, 1.0)
    rank.step()
    assert end_of(rank, LAST) == ev.Voided(GivenUp.REWRITTEN)


def test_a_segment_rewritten_with_a_nan_aborts_the_round(rank: OneRank) -> None:
    stream_until(rank, LAST)
    rank.write(LAST, 3.0)
    rank.write(0, NAN)
    assert not rank.step().finite, "what was looked at before counts no more"
    assert end_of(rank, LAST) == ev.Voided(GivenUp.REWRITTEN)


def test_a_write_in_inference_mode_aborts_the_round(rank: OneRank) -> None:
    stream_until(rank, LAST)
    rank.write(LAST, 3.0)
    grad = rank.parameters[-1].grad
    assert grad is not None
    with torch.inference_mode():
        grad.mul_(0.5)
    rank.step()
    assert end_of(rank, LAST) == ev.Voided(GivenUp.REWRITTEN)


def test_a_write_to_grad_data_is_not_detected(rank: OneRank) -> None:
    """Write to `p.grad.data`, as described in docs/limits.md.

    The segment is sent as backward() left it.
    """
    stream_until(rank, LAST)
    rank.write(LAST, 3.0)
    grad = rank.parameters[-1].grad
    assert grad is not None
    before = rank.gradients.written(0)
    grad.data.mul_(0.5)
    assert rank.gradients.written(0) == before
    rank.step()
    assert rank.channel.begun() == (3.0, False), "nobody gives the round up"
    rank.channel.end()
    assert isinstance(rank.outcome(), ev.Reduced)
    assert rank.result()[0] == 1.0


@pytest.mark.parametrize(
    "step",
    [
        ev.Step(leases=(7,), samples=3, unit=4),
        ev.Step(leases=(7,), samples=4, unit=3),
        ev.Step(leases=(8,), samples=4, unit=4),
    ],
    ids=["samples", "unit", "leases"],
)
def test_a_step_that_differs_from_its_announcement_aborts_the_round(
    rank: OneRank, step: ev.Step
) -> None:
    stream_until(rank, LAST)
    rank.write(LAST, 3.0)
    assert rank.step(step) == step
    assert end_of(rank, LAST) == ev.Voided(GivenUp.REWRITTEN)


@pytest.mark.parametrize("segment", range(SEGMENTS))
@pytest.mark.parametrize("begins_another", [False, True])
def test_a_batch_that_the_script_drops_aborts_the_round(
    rank: OneRank, segment: int, begins_another: bool
) -> None:
    stream_until(rank, segment)
    rank.reducer.close(dropped=True)
    if begins_another:
        rank.compute(9.0, 9.0, 9.0)
    assert end_of(rank, segment) == ev.Voided(GivenUp.DROPPED)


def test_a_round_whose_batch_was_dropped_before_it_began_is_aborted(rank: OneRank) -> None:
    rank.compute(1.0)
    rank.reducer.close(dropped=True)
    rank.reducer.reduce(order(in_hand=True))
    assert end_of(rank, 0) == ev.Voided(GivenUp.DROPPED)
    rank.reducer.reduce(order(source=None, gives_up=True))
    assert end_of(rank, 0) == ev.Voided(GivenUp.DROPPED)


def test_the_batch_after_a_dropped_one_does_not_join_its_round(rank: OneRank) -> None:
    """Let GO arrive before the report that the batch was dropped, with the next batch in hand.

    That report is handled before any step of the next batch.
    """
    rank.compute(1.0)
    rank.reducer.close(dropped=True)
    rank.gradients.zero(BufferName.GRAD)
    rank.compute(5.0, 6.0, 7.0)
    rank.reducer.reduce(order(in_hand=True))
    for _ in range(LAST):
        rank.channel.begun()
        rank.channel.end()
    assert rank.channel.is_quiet()
    rank.reducer.give_up(GivenUp.DROPPED)
    rank.step()
    assert end_of(rank, LAST) == ev.Voided(GivenUp.DROPPED)


@pytest.mark.parametrize("segment", range(SEGMENTS))
def test_a_rank_that_times_out_aborts_the_round(rank: OneRank, segment: int) -> None:
    stream_until(rank, segment)
    rank.reducer.give_up(GivenUp.LATE)
    rank.reducer.give_up(GivenUp.DROPPED)
    assert end_of(rank, segment) == ev.Voided(GivenUp.LATE)
    rank.write(segment, 4.0)
    assert rank.step() == STEP, "the gradient is as good as ever"


@pytest.mark.parametrize("segment", range(LAST))
def test_a_rank_that_gives_up_inside_a_transfer_flags_the_next_one(
    rank: OneRank, segment: int
) -> None:
    stream_until(rank, segment)
    rank.write(segment, 1.0)
    assert rank.channel.begun() == (1.0, False)
    rank.reducer.give_up(GivenUp.LATE)
    rank.channel.end()
    assert end_of(rank, segment + 1) == ev.Voided(GivenUp.LATE)


@pytest.mark.parametrize("segment", range(SEGMENTS))
def test_the_flag_of_another_rank_aborts_the_round(rank: OneRank, segment: int) -> None:
    rank.compute(1.0, 2.0, 3.0)
    rank.step()
    rank.reducer.reduce(order(sync=True))
    for before in range(segment):
        assert rank.channel.begun() == (1.0 + before, False)
        rank.channel.end()
    rank.channel.begun()
    rank.channel.end(flag=True)
    assert rank.channel.is_quiet(), "nor are buffers averaged"
    assert rank.outcome() == ev.Voided(None)
    assert rank.reducer.synced is None


def test_giving_up_between_two_rounds_has_no_effect(rank: OneRank) -> None:
    rank.reducer.give_up(GivenUp.LATE)
    rank.compute(1.0, 2.0, 3.0)
    rank.step()
    rank.reducer.reduce(order())
    assert rank.channel.begun() == (1.0, False)


def test_an_aborted_round_leaves_the_gradient_intact_for_the_next_one(rank: OneRank) -> None:
    stream_until(rank, 1)
    rank.reducer.give_up(GivenUp.LATE)
    end_of(rank, 1)
    rank.write(1, 2.0)
    rank.write(2, 3.0)
    rank.step()
    for _ in range(SEGMENTS):
        rank.channel.end(others=1.0)
    assert isinstance(rank.reducer.reduce(order(streamed=False)), ev.Reduced)
    assert rank.result() == [2.0, 3.0, 4.0]
    assert not any(flat[-1] for flat in rank.gradients.result)


def test_a_step_does_not_complete_the_batch_that_began_after_it(rank: OneRank) -> None:
    """Let the main thread start the next batch early.

    Some steps let it continue at once, so it can be at the next batch when the communication thread
    has completed the step.
    """
    rank.compute(1.0, 2.0, 3.0)
    assert rank.next_coming() == COMING
    rank.reducer.close()
    rank.reducer.finish(STEP)
    rank.gradients.swap()
    rank.compute(4.0, 5.0, 6.0)
    rank.reducer.complete()
    assert rank.next_coming() == COMING
    rank.reducer.reduce(order(in_hand=True))
    for value in (4.0, 5.0):
        assert rank.channel.begun() == (value, False)
        rank.channel.end()
    assert rank.channel.is_quiet(), "the last one, before its step is known"
    rank.step()
    assert rank.channel.begun() == (6.0, False)
    rank.channel.end()
    assert isinstance(rank.outcome(), ev.Reduced)


# ---- a new generation ----------------------------------------------------------------------------


def stop(rank: OneRank) -> threading.Thread:
    stops = threading.Thread(target=rank.reducer.stop)
    stops.start()
    return stops


def stop_in_transfer(rank: OneRank, segment: int) -> threading.Thread:
    """Stop the round while this segment is in flight and the whole batch is announced."""
    rank.compute(1.0, 2.0, 3.0)
    rank.step()
    rank.reducer.reduce(order())
    for _ in range(segment):
        rank.channel.begun()
        rank.channel.end()
    rank.channel.begun()
    return stop(rank)


def ended(thread: threading.Thread) -> bool:
    thread.join(PATIENCE_S)
    return not thread.is_alive()


@pytest.mark.parametrize("segment", range(SEGMENTS))
def test_a_new_generation_ends_the_wait_for_a_segment(rank: OneRank, segment: int) -> None:
    stream_until(rank, segment)
    scratch = rank.gradients.result
    rank.reducer.stop()
    outcome = rank.reducer.outcome()
    assert isinstance(outcome, ev.ChannelFailed)
    assert outcome.aborted
    assert rank.gradients.result is not scratch
    assert rank.reducer.outcome() is None
    assert rank.channel.is_quiet()


@pytest.mark.parametrize("segment", range(SEGMENTS))
def test_a_new_generation_ends_a_transfer(rank: OneRank, segment: int) -> None:
    """End the transfer by the channel's abort flag; the segments behind it are not started."""
    stops = stop_in_transfer(rank, segment)
    time.sleep(QUIET_S)
    assert stops.is_alive(), "the transfer may still write"
    failed = ev.ChannelFailed("aborted", aborted=True)
    rank.channel.end(failed)
    assert ended(stops)
    assert rank.reducer.outcome() == failed
    assert rank.channel.is_quiet()


@pytest.mark.parametrize("segment", range(SEGMENTS))
def test_a_transfer_that_no_abort_ends_breaks_the_rank(
    rank: OneRank, monkeypatch: pytest.MonkeyPatch, segment: int
) -> None:
    """Simulate a driver that hangs: the communication thread used to wait for it forever."""
    monkeypatch.setattr(streamed_rounds, "PATIENCE_S", QUIET_S)
    stops = ThreadPoolExecutor(1).submit(rank.reducer.stop)
    stops.result(PATIENCE_S)  # nothing is in flight
    rank.compute(1.0, 2.0, 3.0)
    rank.step()
    rank.reducer.reduce(order())
    for _ in range(segment):
        rank.channel.begun()
        rank.channel.end()
    rank.channel.begun()

    def stop_and_ask() -> None:
        rank.reducer.stop()
        rank.reducer.outcome()  # raises if the summing thread has timed out first

    stops = ThreadPoolExecutor(1).submit(stop_and_ask)
    try:
        with pytest.raises(RuntimeBrokenError, match="has not ended within"):
            stops.result(PATIENCE_S / 2)
    finally:
        rank.channel.abort()


def test_a_hanging_pass_over_the_gradients_breaks_the_rank(
    rank: OneRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed_rounds, "PATIENCE_S", QUIET_S)
    rank.compute(1.0)  # starts the thread for it
    hangs = threading.Event()

    def hang() -> None:
        hangs.wait(PATIENCE_S)

    rank.reducer.beside(hang)
    joined = ThreadPoolExecutor(1).submit(rank.reducer.joined)
    try:
        with pytest.raises(RuntimeBrokenError, match="the pass over the gradients"):
            joined.result(PATIENCE_S / 2)
    finally:
        hangs.set()


@pytest.mark.parametrize("segment", range(LAST))
def test_a_transfer_that_completes_during_a_stop_is_the_last_one(
    rank: OneRank, segment: int
) -> None:
    stops = stop_in_transfer(rank, segment)
    while not rank.reducer._stopping:
        time.sleep(0.001)
    rank.channel.end()
    assert ended(stops)
    assert isinstance(rank.reducer.outcome(), ev.ChannelFailed)
    assert rank.channel.is_quiet()


@pytest.mark.parametrize("flag", [False, True])
def test_a_round_that_was_complete_before_a_stop_counts(rank: OneRank, flag: bool) -> None:
    stops = stop_in_transfer(rank, LAST)
    while not rank.reducer._stopping:
        time.sleep(0.001)
    rank.channel.end(flag=flag)
    assert ended(stops)
    assert isinstance(rank.reducer.outcome(), ev.Voided if flag else ev.Reduced)


def test_a_round_after_a_stop_completes(rank: OneRank) -> None:
    stream_until(rank, 1)
    rank.reducer.stop()
    rank.reducer.stop()
    assert isinstance(rank.reducer.outcome(), ev.ChannelFailed)
    rank.write(1, 2.0)
    rank.write(2, 3.0)
    rank.step()
    rank.posted = queue.Queue()
    rank.reducer._wake = partial(rank.posted.put, None)
    rank.reducer.reduce(order())
    for value in (1.0, 2.0, 3.0):
        assert rank.channel.begun() == (value, False)
        rank.channel.end()
    assert isinstance(rank.outcome(), ev.Reduced)


def test_a_lost_peer_fails_the_round(rank: OneRank) -> None:
    stream_until(rank, 1)
    rank.write(1, 1.0)
    rank.channel.begun()
    failed = ev.ChannelFailed("gone")
    rank.channel.end(failed)
    assert rank.outcome() == failed
    assert rank.channel.is_quiet()


# ---- errors --------------------------------------------------------------------------------------


class BrokenError(Exception):
    pass


def test_an_error_of_the_data_thread_is_raised_in_the_communication_thread(rank: OneRank) -> None:
    rank.compute(1.0)
    rank.reducer.reduce(order(in_hand=True))
    rank.channel.begun()
    rank.channel.end(BrokenError("in the transport"))
    with pytest.raises(BrokenError):
        rank.outcome()
    rank.reducer.stop()  # must return


def test_a_batch_dropped_after_a_hook_raised_aborts_the_round(rank: OneRank) -> None:
    """Let the script catch the error and drop the batch, whose gradient is incomplete."""

    def fail(_: torch.Tensor) -> None:
        raise BrokenError("in a hook")

    stream_until(rank, 1)
    hook = rank.parameters[1].register_hook(fail)
    with pytest.raises(BrokenError):
        rank.write(1, 2.0)
    hook.remove()
    rank.reducer.close(dropped=True)
    assert end_of(rank, 1) == ev.Voided(GivenUp.DROPPED)
    rank.gradients.zero(BufferName.GRAD)
    rank.compute(1.0, 2.0, 3.0)
    rank.step()
    rank.reducer.reduce(order())
    assert rank.channel.begun() == (1.0, False)


# ---- ranks together ------------------------------------------------------------------------------


class SimChannel:
    """A `DataChannel` over the transport of the simulation."""

    def __init__(self, hub: Hub, me: int, ranks: int) -> None:
        self._transport, self._abort = SimTransport(hub, str(me)), Abort()
        peers = tuple(Peer(str(i), f"sim/{i}") for i in range(ranks))
        self._group = Group("g", 1, peers, me)

    def open(self) -> None:
        self._transport.open(self._group, self._abort, PATIENCE_S)

    def abort(self) -> None:
        self._abort.raise_()

    def sum(
        self, buffers: list[torch.Tensor], residuals: Sequence[torch.Tensor | None] = ()
    ) -> ev.ChannelFailed | None:
        assert not residuals
        try:
            for buffer in buffers:
                self._transport.allreduce([buffer], self._abort, "")
        except TransportAborted:
            return ev.ChannelFailed("aborted", aborted=True)
        return None


def play(rank: OneRank, values: list[torch.Tensor], draw: random.Random, trouble: str) -> Any:
    """Play one round of one rank, whose backward() pauses now and then."""
    rank.channel.open()
    at, reducer = draw.randrange(SEGMENTS), rank.reducer
    reducer.begin(COMING)
    if trouble != "unstreamed":
        reducer.reduce(order(in_hand=True, factor=0.5))
    for segment, value in enumerate(values):
        time.sleep(draw.random() / 300)
        (rank.parameters[-1 - segment] * value).sum().backward()
        if segment == at and trouble == "nan":
            rank.write(segment, NAN)
        if segment == at and trouble == "late":
            reducer.give_up(GivenUp.LATE)
        if segment == at and trouble == "dropped":
            reducer.close(dropped=True)
            return rank.outcome()
        if segment == at and trouble == "new generation":
            rank.channel.abort()
            reducer.stop()
            return rank.outcome()
    if trouble == "written twice":
        rank.write(0, 1.0)
    rank.step()
    if trouble == "unstreamed":
        return reducer.reduce(order(streamed=False, factor=0.5))
    return rank.outcome()


def play_together(
    make: Callable[..., OneRank], seed: int, *troubles: str
) -> tuple[list[Any], list[OneRank]]:
    """Play one round on several ranks; return the outcome on each, and the ranks."""
    draw, hub = random.Random(seed), Hub()
    ranks = [make(SimChannel(hub, me, len(troubles))) for me in range(len(troubles))]
    numbers = torch.Generator().manual_seed(seed)
    values = [[torch.randn(NUMEL, generator=numbers) for _ in range(SEGMENTS)] for _ in ranks]
    draws = [random.Random(draw.random()) for _ in ranks]
    with ThreadPoolExecutor(len(ranks)) as pool:
        outcomes = list(pool.map(play, ranks, values, draws, troubles))
    return outcomes, ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_streamed_and_unstreamed_rounds_give_the_same_bits(
    make: Callable[..., OneRank], ranks: int
) -> None:
    for seed in range(5):
        results = []
        for trouble in ("", "unstreamed"):
            outcomes, played = play_together(make, seed, *[trouble] * ranks)
            assert all(isinstance(outcome, ev.Reduced) for outcome in outcomes)
            results += [rank.gradients.result for rank in played]
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.long
@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        ("nan", (GivenUp.NONFINITE, GivenUp.REWRITTEN)),
        ("late", (GivenUp.LATE,)),
        ("dropped", (GivenUp.DROPPED,)),
        ("written twice", (GivenUp.REWRITTEN,)),
    ],
)
def test_a_round_that_one_rank_gives_up_is_aborted_on_all(
    make: Callable[..., OneRank], trouble: str, why: tuple[GivenUp, ...]
) -> None:
    for seed in range(10):
        [own, *others], _ = play_together(make, seed, trouble, "", "")
        assert isinstance(own, ev.Voided)
        assert own.own in why
        assert others == [ev.Voided(None)] * 2


def test_two_ranks_can_give_up_the_same_round(make: Callable[..., OneRank]) -> None:
    for seed in range(10):
        outcomes, _ = play_together(make, seed, "late", "dropped", "")
        assert all(isinstance(outcome, ev.Voided) for outcome in outcomes)
        assert any(outcome.own for outcome in outcomes)
        assert outcomes[2].own is None


def test_a_new_generation_ends_the_round_on_every_rank(
    make: Callable[..., OneRank],
) -> None:
    for seed in range(10):
        outcomes, _ = play_together(make, seed, *["new generation"] * 3)
        assert all(isinstance(outcome, ev.ChannelFailed) for outcome in outcomes)
        assert all(outcome.aborted for outcome in outcomes)
