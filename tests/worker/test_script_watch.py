"""The deadline of a script that stays away from step(), and the report of one that exceeds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from paceline.clock import now_ns
from paceline.core.messages import STUCK, ScriptError
from paceline.worker.script_watch import ScriptClock, ScriptWatch
from paceline_api.times import NS_PER_S as S


def test_the_time_of_a_script_counts_from_the_end_of_its_last_call() -> None:
    clock = ScriptClock(S)
    assert clock.look(10 * S, 9 * S) == S
    assert clock.look(11 * S, 9 * S) == 2 * S
    assert clock.look(12 * S, 9 * S) == 3 * S
    assert clock.look(13 * S, 12 * S) == S, "it was back in between"
    assert clock.look(14 * S, None) == 0, "it is in a call, or evaluates"
    assert clock.look(15 * S, 14 * S) == S


def test_time_while_the_process_was_stopped_does_not_count() -> None:
    clock = ScriptClock(S)
    assert clock.look(10 * S, 9 * S) == S
    assert clock.look(5000 * S, 9 * S) == 3 * S
    assert clock.look(9000 * S, 8999 * S) == S
    assert ScriptClock(S).look(9000 * S, 9 * S) == 2 * S


def test_two_stuck_scripts_are_the_same_error_if_the_file_is_the_same() -> None:
    """Compare by file, because an endless loop can be observed at any of its lines."""
    one = ScriptError(STUCK, "", "train.py", 7)
    assert one.is_same(ScriptError(STUCK, "", "train.py", 8))
    assert not one.is_same(ScriptError(STUCK, "", "data.py", 7))
    assert not one.is_same(ScriptError("KeyError", "", "train.py", 7))
    assert not ScriptError("KeyError", "", "train.py", 8).is_same(
        ScriptError("KeyError", "", "train.py", 7)
    )


SCRIPT = """\
import sys
from paceline.worker.script_watch import ScriptWatch
def overdue(why, error):
    print(error.file, error.line, error.type, why.count("spins()"), flush=True)
watch = ScriptWatch(200_000_000, overdue)
watch.start()
watch.left()
def spins():
    while True:
        pass
spins()
"""


@pytest.mark.long
def test_a_script_in_an_endless_loop_is_reported_with_its_line(tmp_path: Path) -> None:
    script = tmp_path / "spins.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    file, line, kind, shown = done.stdout.split()
    assert (file, kind, int(shown) > 0) == (str(script), STUCK, True)
    assert int(line) in (9, 10)
    assert f"not called for 0.2 s, spec.stepDeadlineSeconds ({script}, line" in done.stderr


def test_a_script_is_reported_from_half_its_deadline_until_it_returns() -> None:
    watch = ScriptWatch(100 * S, lambda *_: None)
    watch.left()
    left_ns = now_ns()
    for second in range(1, 49):
        watch.look(left_ns + second * S)
    assert watch.away is None
    for second in range(49, 60):
        watch.look(left_ns + second * S)
    named = watch.away
    assert named is not None
    assert named.file == __file__
    watch.look(left_ns + 61 * S)
    assert watch.away == named, "the same news as long as it stays"
    watch.came()
    watch.look(left_ns + 62 * S)
    assert watch.away is None
