"""Slot 0 is lost near the end of a script: the job waits for what it would save (S14)."""

from __future__ import annotations

import pytest
from paceline.core.protocol.log import Log
from paceline.core.protocol.places import Path, Spot, SpotAction

from testing.simulation.faults import Fault, Kind
from testing.simulation.scripts import ScriptSimulation, ScriptWorld, run_script
from testing.simulation.simulation import BrokenPromiseError

WITHOUT_SLOT_0 = [
    (seed, Fault(40 + seed * 37 % 400, kind, 100, 0))
    for seed in range(24, 40)
    for kind in (Kind.KILL, Kind.LOSE)
]


def kill_slot_0() -> list[ScriptSimulation]:
    """Run histories in which slot 0 is lost once, in many of them in its last pass."""
    return [
        run_script(
            ScriptWorld(replicas=3, program=(2, 3, 1, 5, seed % 3), calls_in_pass=seed % 2),
            seed,
            [fault],
        )
        for seed, fault in WITHOUT_SLOT_0
    ]


@pytest.mark.long
def test_a_job_is_complete_only_when_the_script_of_slot_0_has_ended_with_the_last_weights() -> None:
    """`ScriptSimulation.check_slot_0` holds, and in some histories slot 0 came after the others."""
    sims = kill_slot_0()
    assert all(sim.finished for sim in sims)
    last = [sim for sim in sims if sim.values.loaded[-1:] == [end_of(sim)]]
    assert last, "no replacement of slot 0 came to its end after the others"


def end_of(sim: ScriptSimulation) -> Spot:
    """Return where the scripts of a history end."""
    assert isinstance(sim.world, ScriptWorld)
    return Spot(len(sim.world.program) - 1, sim.world.program[-1])


@pytest.mark.long
def test_a_job_that_ends_without_slot_0_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Log, "may_end_with", lambda *_: True)
    with pytest.raises(BrokenPromiseError, match="the script of slot 0 has not ended"):
        kill_slot_0()


@pytest.mark.long
def test_a_script_that_saves_its_first_copy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "behind_pass", lambda _: SpotAction.GO_ON)
    with pytest.raises(BrokenPromiseError, match="S14: slot 0 saved"):
        kill_slot_0()
