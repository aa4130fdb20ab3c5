"""Each sample counts exactly once per epoch, by ids, under kills, a join and a slow rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.processes.drawing import CHANNELS
from testing.processes.history import ForkServer, History, check
from tests.layers import exhaustive_except

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("channel", exhaustive_except(["shm"], CHANNELS))
@pytest.mark.parametrize("pacing", exhaustive_except(["Samples"], ["Round", "Samples"]))
def test_samples_count_once_under_two_kills_a_join_and_a_straggler(
    fork_server: ForkServer, channel: str, pacing: str, tmp_path: Path
) -> None:
    history = History(
        channel,
        3,
        "Quorum",
        "all of it",
        seed=7,
        steps=(("kill", 1, 0, 40), ("scale", 4, 0, 30), ("kill", 2, 0, 70)),
        slow_ms={"0": 40.0},
        collective={"pacing": pacing},
        accumulate=2,
        epochs=3,
        rounds=50,
    )
    result = fork_server.run(history, tmp_path / "run")
    check(history, result)
    assert channel in result["transports"]
    log = result["log"]
    # `check` has compared the count of every sample with the epochs. Make sure that the run was
    # hard.
    assert log["exact"] == history.epochs, log
    assert log["late"] > 0, "the straggler was never late"
    assert log["redealt"] > 0, "nobody who died held a lease"


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["Full", "Quorum"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_samples_count_once_with_a_pipeline_under_two_kills_and_a_join(
    fork_server: ForkServer, mode: str, ranks: int, tmp_path: Path
) -> None:
    """Kill ranks that have one gradient in flight while they compute another one (R36)."""
    history = History(
        "mpi" if mode == "Full" else "gloo",
        ranks,
        mode,
        "all of it",
        seed=7,
        steps=(("kill", 1, 0, 40), ("scale", ranks + 1, 0, 30), ("kill", 0, 0, 70)),
        slow_ms={"0": 20.0},
        collective={"pipeline": 1},
        accumulate=2,
        epochs=3,
        rounds=60,
    )
    result = fork_server.run(history, tmp_path / "run")
    check(history, result)
    log = result["log"]
    assert log["exact"] == history.epochs, log
    assert log["streamed"] == 0
    assert log["redealt"] > 0, "nobody who died held a lease"
