"""The ring buffers of steps and rounds in a rank's record."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array

import pytest
from paceline.core.anatomy.samples import ROUNDS, SEGMENTS_MAX, STEPS, StepSample
from paceline.telemetry.records import RankRecord, RecordReader, allocate_record
from paceline_api.ids import MemberId

PEER = MemberId(3, 1, 2)


def write_step(record: RankRecord, number: int) -> None:
    record.steps.write(
        began_ns=number,
        announced_ns=number + 1,
        resumed_ns=number + 2,
        spent_ns=(1, 2, 3, 4),
        lease_ns=5,
        version=number,
        fresh=True,
        samples=32,
    )


def write_round(record: RankRecord, number: int, segments: int = 2) -> None:
    ring = record.rounds
    ring.begin(number, go_ns=100, streamed=True)
    ring.arrived(90)
    for segment in range(segments):
        ring.opened(segment, 110 + segment)
        ring.carried(200 + 10 * segment, 207 + 10 * segment)
    ring.carried(5000, 5001)  # buffers of the model
    ring.handed_over(array("Q", range(40, 40 + segments)))
    ring.sum_is_taken()
    ring.copied(1001, 1002)
    ring.end(PEER, 95, 900, 1000)


def test_the_ring_keeps_the_last_steps_in_order() -> None:
    fd = allocate_record()
    record, reader = RankRecord.open(os.dup(fd)), RecordReader(fd)
    assert reader.steps() == ()
    for number in range(STEPS + 10):
        write_step(record, number)
    steps = reader.steps()
    assert [step.version for step in steps] == list(range(10, STEPS + 10))
    assert steps[0] == StepSample(10, 11, 12, 2, 3, 4, 5, 10, fresh=True, samples=32)
    record.close()
    reader.close()
    os.close(fd)


def test_the_ring_keeps_the_last_rounds_with_their_segments() -> None:
    fd = allocate_record()
    record, reader = RankRecord.open(os.dup(fd)), RecordReader(fd)
    record.rounds.divide([4096, 100])
    for number in range(ROUNDS + 1):
        write_round(record, number)
    rounds = reader.rounds()
    assert [r.round for r in rounds] == list(range(1, ROUNDS + 1))
    assert (rounds[-1].last, rounds[-1].last_ns, rounds[-1].arrived_ns) == ("3.1", 95, 90)
    assert (rounds[-1].streamed, rounds[-1].fresh) == (True, True)
    first, second = rounds[-1].segments
    assert (first.payload_bytes, first.ready_ns, first.opened_ns) == (4096, 40, 110)
    assert (second.begun_ns, second.ended_ns, second.busy_ns) == (210, 217, 7)
    record.rounds.begin(1000, 5, streamed=False)
    record.rounds.end(None, 0, 6, 7)
    alone = reader.rounds()[-1]
    assert (alone.last, alone.arrived_ns, alone.copy_ended_ns, alone.segments) == ("", 0, 0, ())
    record.close()
    reader.close()
    os.close(fd)


def test_many_segments_are_merged_into_bounded_entries() -> None:
    fd = allocate_record()
    record, reader = RankRecord.open(os.dup(fd)), RecordReader(fd)
    count = 2 * SEGMENTS_MAX + 1
    record.rounds.divide([10] * count)
    write_round(record, 0, count)
    segments = reader.rounds()[0].segments
    assert len(segments) == 22
    assert sum(s.payload_bytes for s in segments) == 10 * count
    assert (segments[0].begun_ns, segments[0].ended_ns, segments[0].busy_ns) == (200, 227, 21)
    assert (segments[0].ready_ns, segments[0].opened_ns) == (42, 112)
    record.close()
    reader.close()
    os.close(fd)


@pytest.mark.long
def test_a_killed_rank_leaves_only_complete_entries() -> None:
    """The rank is killed inside a store: that entry is left out, and the others are kept."""
    fd = allocate_record()
    script = (
        "import os\n"
        "from paceline.telemetry.records import RankRecord\n"
        f"record = RankRecord.open({fd})\n"
        "def write(n):\n"
        "    record.steps.write(began_ns=n, announced_ns=n, resumed_ns=n, spent_ns=(0,) * 4,\n"
        "        lease_ns=0, version=n, fresh=True, samples=1)\n"
        "for n in range(70): write(n)\n"
        "class Dies:\n"
        "    def __setitem__(self, *_): os.kill(os.getpid(), 9)\n"
        "record.steps._ring._entries[70 % 64] = Dies()\n"
        "write(70)\n"
    )
    subprocess.run([sys.executable, "-c", script], pass_fds=[fd], timeout=60, check=False)
    reader = RecordReader(fd)
    assert [step.version for step in reader.steps()] == list(range(7, 70))
    reader.close()
    os.close(fd)
