"""A script has the variables of torchrun, and fails by name if it trains alone (S1, S16)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from paceline.errors import UsageError
from paceline.train.script.launch import Launched
from paceline_api.ids import MemberId

from testing.scripts.plain import environment

ADDRESSES = {"MASTER_ADDR", "MASTER_PORT"}
"""Variables that `Launched.run` sets when it has made the store."""
OWN = {"TORCHELASTIC_RUN_ID"}
"""Variables with another value in each run."""
WITHOUT_A_MEANING = {
    *("OMP_NUM_THREADS", "TORCHELASTIC_SIGNALS_TO_HANDLE"),
    *("TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
}
"""Variables of torchrun's own agent and of NCCL, which a job does not set."""


def launched(slot: int, slots: int, *, local: bool = True, procs: int = 1) -> Any:
    """Return a process with a rank of a job, without the job."""
    engine = SimpleNamespace(slots=slots, spec=SimpleNamespace(procs=procs), end=lambda: True)
    member = MemberId(slot // procs, slot % procs, 0)
    settings = SimpleNamespace(local=local, member=member, job="job")
    process: Any = SimpleNamespace(engine=engine, slot=slot, _settings=settings, _started=False)
    process.start = lambda: None
    return process


@pytest.mark.parametrize("slot", range(4))
def test_a_rank_of_one_machine_has_the_variables_of_torchrun(slot: int) -> None:
    theirs = environment(slot, 4, 29500, "job", Path("errors"))
    ours = Launched.environment(launched(slot, 4))
    assert theirs.keys() - ours.keys() == ADDRESSES | WITHOUT_A_MEANING
    assert {name for name in ours if ours[name] != theirs[name]} <= OWN


def test_pods_are_the_groups_of_torchrun() -> None:
    ours = Launched.environment(launched(3, 4, local=False, procs=2))
    assert (ours["RANK"], ours["LOCAL_RANK"], ours["GROUP_RANK"]) == ("3", "1", "1")
    assert (ours["LOCAL_WORLD_SIZE"], ours["GROUP_WORLD_SIZE"]) == ("2", "2")


def test_a_script_that_ends_without_a_process_group_fails_by_name() -> None:
    with pytest.raises(UsageError, match="without a process group, on 2 ranks"):
        Launched._end(launched(0, 2))


def test_one_rank_needs_no_process_group() -> None:
    assert Launched._end(launched(0, 1)) == 0
