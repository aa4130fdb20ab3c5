"""The source of a script says which numbers it carries from one batch to the next."""

from __future__ import annotations

from pathlib import Path

import pytest
from paceline.train.script.counting import Counting, counting_in

SOURCE = """
steps = 0
for epoch in range(3):
    for i in trange(10):
        steps += 1
        self.updates = self.updates + 1
        state["seen"] -= 1
    for mine in range(rank, 10, size):
        total += loss
        size = size * 2
        other = steps + 1
        rate = next(rates)
seed = args.seed + args.rank
seed += 1
self.place = local_rank * 10
self.place += 1
"""


def counting(tmp_path: Path, text: str) -> Counting:
    script = tmp_path / "train.py"
    script.write_text(text)
    return counting_in(str(script))


def test_a_count_is_what_the_source_makes_from_itself(tmp_path: Path) -> None:
    counts = counting(tmp_path, SOURCE)
    assert counts.names == {"steps", "total", "size"}
    assert (counts.attributes, counts.keys) == ({"updates"}, {"seen"})
    assert (counts.sums, counts.iterators) == ({"total"}, {"rates"})
    assert counts.loops == [("epoch", 4, 12), ("i", 5, 7)]


@pytest.mark.parametrize(
    "text",
    [
        "x += 1",
        "x -= 0.5",
        "x *= 0.9",
        "x = x + 1",
        "x = min(1.0, x + 0.1)",
        "x = max(x * math.exp(-0.1), 0.5)",
        "x, y = x // 2, 0",
        "while (x := x + 1) < 10: pass",
    ],
)
def test_a_number_made_of_itself_and_constants_is_no_sum(tmp_path: Path, text: str) -> None:
    counts = counting(tmp_path, text)
    assert (counts.names, counts.sums) == ({"x"}, set())


@pytest.mark.parametrize(
    "text",
    [
        "x += loss.item()",
        "x = 0.9 * x + 0.1 * loss",
        "x = x + len(batch)",
        "x *= args.decay",
        "x += 1\nx += loss",
        "x = max(x * decay, 0.5)",
    ],
)
def test_a_number_into_which_others_go_is_a_sum(tmp_path: Path, text: str) -> None:
    counts = counting(tmp_path, text)
    assert (counts.names, counts.sums) == ({"x"}, {"x"})


@pytest.mark.parametrize(
    "text",
    [
        "at = rank * size\nat += size",
        "first = rank * size\nself.at = first\nself.at += size",
        "Shard(at=local_rank)\nself.at += size",
        "took = time.monotonic() - begun\nat = took\nat += 1",
    ],
)
def test_a_number_that_follows_from_the_rank_is_not_carried(tmp_path: Path, text: str) -> None:
    counts = counting(tmp_path, text)
    assert counts.names | counts.attributes == set()


@pytest.mark.parametrize(
    "text",
    [
        "if loss < best: best = loss",
        "best = min(best, loss)",
        "is_best, best = loss < best, min(loss, best)",
        "best = loss if loss < best else best",
        "if best is None or loss > best + delta:\n    best, epoch = loss, 1",
        "if loss < best - delta:\n    pass\nelse:\n    wait, best = 0, loss",
    ],
)
def test_a_best_value_is_recognized(tmp_path: Path, text: str) -> None:
    counts = counting(tmp_path, text)
    assert (counts.names, counts.sums) == ({"best"}, set())


@pytest.mark.parametrize(
    "text",
    [
        "if loss < limit: best = loss",
        "best = min(loss, 1)",
        "if loss == best: best = loss",
        "last = time.monotonic()\nif now - last > 10: last = now",
        "gpu = int(os.environ['LOCAL_RANK'])\ngpu = min(gpu, 7)",
        "gpu = int(os.environ.get('LOCAL_RANK', 0))\ngpu = min(gpu, 7)",
    ],
)
def test_other_assignments_keep_no_best_value(tmp_path: Path, text: str) -> None:
    assert counting(tmp_path, text).names == set()


@pytest.mark.parametrize("text", [None, "for x in", "\0"])
def test_a_source_that_cannot_be_read_counts_nothing(tmp_path: Path, text: str | None) -> None:
    script = tmp_path / "train.py"
    if text is not None:
        script.write_text(text)
    assert counting_in(str(script)).names == set()
