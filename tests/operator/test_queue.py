"""The work queue: each job once, earliest due first, one decision at a time, none forgotten."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest
from paceline_operator.cluster.store import Key
from paceline_operator.metrics import CONTROLLER, OperatorMetrics
from paceline_operator.queue import BROKEN_S, WORKERS, DecisionQueue

from testing.fake_cluster.virtual import VirtualLoop

A, B, C = ("default", "a"), ("default", "b"), ("default", "c")


class Line:
    """A queue and a record of its decisions, each of which takes `takes_s`."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.metrics = OperatorMetrics()
        self.queue = DecisionQueue(self._decide, self.metrics, self.loop.time)
        self.takes_s = 0.0
        self.again_s: dict[Key, list[float | None]] = {}
        """The return values of the next decisions on a job."""
        self.broken: set[Key] = set()
        self.begun: list[tuple[float, Key]] = []
        self.busy: set[Key] = set()
        self.most = 0
        self._zero_s = self.loop.time()
        self._task = self.loop.create_task(self.queue.run())
        self.queue.open()

    @property
    def now_s(self) -> float:
        return round(self.loop.time() - self._zero_s, 3)

    @property
    def order(self) -> list[str]:
        return [key[1] for _, key in self.begun]

    @property
    def times(self) -> list[float]:
        return [at_s for at_s, _ in self.begun]

    def close(self) -> None:
        self._task.cancel()
        self.loop.spend(0.01)
        assert self._task.cancelled()
        self.loop.close()

    async def _decide(self, key: Key) -> float | None:
        assert key not in self.busy, "two decisions on one job at a time"
        self.begun.append((self.now_s, key))
        self.busy.add(key)
        self.most = max(self.most, len(self.busy))
        try:
            await asyncio.sleep(self.takes_s)
            if key in self.broken:
                raise ValueError("a mistake of ours")
        finally:
            self.busy.discard(key)
        answers = self.again_s.get(key)
        return answers.pop(0) if answers else None


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.close()


def test_a_waiting_job_is_queued_once(line: Line) -> None:
    for _ in range(5):
        line.queue.add(A)
    line.loop.spend(1)
    assert line.order == ["a"]


def test_the_earliest_due_time_counts(line: Line) -> None:
    line.queue.add(A, 9.0)
    line.queue.add(A, 3.0)
    line.queue.add(A, 6.0)
    line.loop.spend(20)
    assert line.times == [3.0]


def test_jobs_are_processed_in_order_of_their_due_time(line: Line) -> None:
    line.queue.add(A, 3.0)
    line.queue.add(B, 1.0)
    line.queue.add(C, 2.0)
    line.loop.spend(5)
    assert line.order == ["b", "c", "a"]


def test_events_during_a_decision_cause_one_more(line: Line) -> None:
    line.takes_s = 1.0
    line.queue.add(A)
    line.loop.spend(0.5)
    for _ in range(3):
        line.queue.add(A)
    line.loop.spend(5)
    assert line.times == [0.0, 1.0]


def test_a_job_that_becomes_due_during_its_decision_is_not_lost(line: Line) -> None:
    """The job is queued for later during a decision, and is due before that ends."""
    line.takes_s = 2.0
    line.queue.add(A)
    line.loop.spend(0.5)
    line.queue.add(A, 0.5)
    line.loop.spend(5)
    assert line.times == [0.0, 2.0]


def test_the_newest_decision_sets_the_next_due_time(line: Line) -> None:
    """A decision sees everything, so the time that an earlier one asked for no longer counts."""
    line.again_s[A] = [10.0, 10.0]
    line.queue.add(A)
    line.loop.spend(4)
    line.queue.add(A)
    line.loop.spend(25)
    assert line.times == [0.0, 4.0, 14.0]


def test_concurrent_decisions_are_limited_and_all_jobs_are_processed(line: Line) -> None:
    line.takes_s = 1.0
    for number in range(3 * WORKERS):
        line.queue.add(("default", f"job-{number}"))
    line.loop.spend(0.5)
    assert line.most == WORKERS
    line.loop.spend(3)
    assert line.most == WORKERS
    assert sorted(line.order) == sorted(f"job-{n}" for n in range(3 * WORKERS))


def test_busy_jobs_do_not_starve_others(line: Line) -> None:
    """There are more busy jobs than workers, and an idle job behind them."""
    line.takes_s = 0.1
    noisy = [("default", f"noisy-{number}") for number in range(2 * WORKERS)]
    for key in noisy:
        line.again_s[key] = [0.0] * 1000
        line.queue.add(key)
    line.loop.spend(5)
    line.queue.add(A)
    at_s = line.now_s
    line.loop.spend(2)
    began_s = next(begun_s for begun_s, key in line.begun if key == A)
    assert began_s - at_s <= 3 * line.takes_s, "it waits for one turn of the others at most"


def test_an_event_of_one_job_wakes_one_worker(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 workers that all looked would cost more than the decision itself."""
    looks = 0
    look = line.queue._next

    def counted() -> Key | None:
        nonlocal looks
        looks += 1
        return look()

    monkeypatch.setattr(line.queue, "_next", counted)
    for _ in range(10):
        line.queue.add(A)
        line.loop.spend(1)
    assert len(line.begun) == 10
    assert looks <= 3 * 10


def test_an_immediate_requeue_does_not_block_the_loop(line: Line) -> None:
    line.again_s[A] = [0.0] * 10_000
    line.queue.add(A)
    line.loop.spend(1)
    assert len(line.begun) <= 1001, "the loop must get its turn"


def test_an_exception_is_logged_counted_and_retried(
    line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    line.broken.add(A)
    line.queue.add(A)
    line.queue.add(B)
    with caplog.at_level(logging.ERROR):
        line.loop.spend(1)
    assert "a decision failed" in caplog.text
    assert "a mistake of ours" in caplog.text
    assert line.order == ["a", "b"], "others go on"
    line.broken.clear()
    line.loop.spend(BROKEN_S)
    assert line.order == ["a", "b", "a"]
    assert line.times[-1] == BROKEN_S
    count = line.metrics.registry.get_sample_value
    labels = {"controller": CONTROLLER}
    name = "controller_runtime_reconcile_total"
    assert count(name, labels | {"result": "error"}) == 1
    assert count(name, labels | {"result": "success"}) == 2


def test_an_event_after_an_exception_is_processed_at_once(line: Line) -> None:
    line.broken.add(A)
    line.queue.add(A)
    line.loop.spend(1)
    line.queue.add(A)
    line.loop.spend(0.5)
    assert line.times == [0.0, 1.0]


def test_a_closed_queue_makes_no_decisions(line: Line) -> None:
    line.queue.close()
    line.queue.add(A)
    line.loop.spend(5)
    assert line.begun == []
    line.queue.open()
    line.loop.spend(1)
    assert line.order == ["a"]
