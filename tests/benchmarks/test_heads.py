"""Heads save the starter messages and delay a round little if ranks arrive one by one (R41)."""

from __future__ import annotations

import pytest

from benchmarks.heads import MODES, measure

RANKS, STEP_MS, HOP_MS = 256, 1000.0, 0.2
MESSAGES = {"Full": 31, "Quorum 75 %": 120, "Quorum 75 %, no grace": 85, "Deadline": 130}


@pytest.mark.parametrize("mode", MODES)
def test_heads_save_messages_at_a_bounded_delay(mode: str) -> None:
    cost = measure(RANKS, MODES[mode], step_ms=STEP_MS, hop_ms=HOP_MS, rounds=5)
    assert cost.messages <= MESSAGES[mode]
    assert HOP_MS <= cost.added_ms <= HOP_MS + STEP_MS / 16, "what R41 promises"
    # One hop if all ranks are waited for, else part of the 40 ms over which a group arrives.
    assert cost.added_ms <= (15 if mode == "Quorum 75 %, no grace" else 2 * HOP_MS)
    assert cost.held <= RANKS // 16


def test_ranks_that_arrive_together_are_reported_with_little_delay() -> None:
    cost = measure(RANKS, MODES["Quorum 75 %, no grace"], jitter=0.01, rounds=5)
    assert cost.added_ms <= 2
