"""Groups of ranks that hold one copy of a model together, with real processes (R50 to R54)."""

from __future__ import annotations

import json
import sys
from itertools import combinations, cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from paceline.core.protocol.records import DataPlan
from paceline.core.protocol.sampling import batches_of, total_leases

from testing.processes.history import ForkServer
from tests.layers import exhaustive
from tests.local import group_script

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).with_name("group_script.py")
M = 2


def job(config: dict[str, Any], collective: dict[str, Any], **spec: Any) -> dict[str, Any]:
    trainer = {
        "name": "trainer",
        "image": "none",
        "command": [sys.executable, str(SCRIPT)],
        "env": [{"name": "CONFIG", "value": json.dumps(config)}],
    }
    return {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "groups"},
        "spec": {
            "replicas": 2,
            "procsPerReplica": M,
            "parallelism": {"model": M},
            "collective": {"backend": "gloo", "mode": "Full", "freezeTimeout": "8s"} | collective,
            "template": {"spec": {"containers": [trainer]}},
            **spec,
        },
    }


def run(
    fork_server: ForkServer,
    folder: Path,
    config: dict[str, Any],
    collective: dict[str, Any] | None = None,
    steps: list[list[Any]] | None = None,
    name: str = "run",
    **spec: Any,
) -> dict[str, Any]:
    at = folder / name
    at.mkdir()
    nothing = {"at_the_end": [], "inject": "", "slow_log": "", "small_disk": False}
    order = {"job": job(config, collective or {}, **spec), "steps": steps or [], **nothing}
    result: dict[str, Any] = fork_server.call("testing.processes.history_run:history", order, at)
    return result


def weights_of(result: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the final weights of the shards, which must be the same on all groups."""
    assert result["complete"], result
    assert not result["left_over"]
    by_shard: dict[int, list[str]] = {}
    for line in result["printed"]:
        _, marked, text = line.partition("WEIGHTS ")
        if marked:
            shard, _, state = text.partition(" ")
            by_shard.setdefault(int(shard), []).append(state)
    assert sorted(by_shard) == list(range(M)), result["printed"]
    for shard, states in by_shard.items():
        assert len(states) == len(by_shard[0])
        assert len(set(states)) == 1, f"shard {shard} differs between groups"
    named = [json.loads(by_shard[shard][0]) for shard in range(M)]
    if set(named[0]) == {"0.weight", "0.bias"} == set(named[1]):  # the stages of a pipeline
        named[1] = {name.replace("0.", "2."): value for name, value in named[1].items()}
    return {name: torch.tensor(value) for one in named for name, value in one.items()}


def one_process(
    epochs: int, *, clip_norm: float | None, groups: int = 2
) -> dict[str, torch.Tensor]:
    """Train the whole model by hand: a round is the batches of all groups."""
    model = group_script.whole_model()
    optimizer = group_script.optimizer_of(model)
    dataset = group_script.data()
    plan = DataPlan(samples=len(dataset), batch=8, accumulate=1, epochs=epochs, seed=3)
    leases = list(range(total_leases(plan)))
    for first in range(0, len(leases), groups):
        optimizer.zero_grad()
        for lease in leases[first : first + groups]:
            for batch in batches_of(plan, lease):
                x, y = dataset[list(batch)]
                (torch.nn.functional.mse_loss(model(x), y) / groups).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
@pytest.mark.parametrize(
    ("backend", "clip_norm"), [("gloo", None), exhaustive("mpi", 0.3), ("shm", 0.3)]
)
def test_groups_in_full_mode_equal_one_process(
    fork_server: ForkServer, kind: str, backend: str, clip_norm: float | None, tmp_path: Path
) -> None:
    """Check that the shards together equal one process that trains the whole model (R53, R54)."""
    config = {"kind": kind, "epochs": 3, "clip_norm": clip_norm}
    spec: dict[str, Any] = {}
    if backend == "shm":  # shared memory needs one pod
        spec = {"replicas": 1, "procsPerReplica": 2 * M}
    result = run(fork_server, tmp_path, config, {"backend": backend}, **spec)
    weights, wanted = weights_of(result), one_process(3, clip_norm=clip_norm)
    assert set(weights) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
    assert result["log"]["streamed"] == 0, "R52"


LONG = {"kind": "tensor", "epochs": 40}
BENCH_AFTER = "3s"
"""The benchAfter of a job with a shard that freezes. The script of its group hangs in the forward
pass, which counts as slow until the group is benched; only the round that the others then begin
finds it stuck. The default, 60 s, would be most of the test."""
IN_REDUCTION = {"a shard is killed in a reduction": "1.0#0/1", "a lead too": "0.0#0/0"}
FAULTS: dict[str, tuple[list[list[Any]], dict[str, str]]] = {
    **{fault: ([], {}) for fault in IN_REDUCTION},
    "a lead is killed": ([["kill", 1, 0, 60]], {}),
    "a shard is killed": ([], {"1.0#0/1/9": "die"}),
    "a shard is killed, and a group joins": ([["scale", 3, 0, 60]], {"0.0#0/1/12": "die"}),
    "a shard is frozen": ([], {"1.0#0/1/9": "stop"}),
    "a lead is frozen": ([["stop", 0, 0, 60]], {}),
    "a shard's script fails": ([], {"0.0#0/1/9": "exit"}),
    "a group joins and a pod drains": ([["scale", 3, 0, 60], ["sigterm", 0, 0, 60]], {}),
    "the coordinator dies": ([["coordinator_kill", 0, 0, 60], ["kill", 1, 0, 60]], {}),
}


MODES = ("Quorum", "Full")
"""The modes of the faults, in turn: one fault in both modes costs as much as two faults."""


@pytest.mark.parametrize(
    ("fault", "mode"),
    [
        pytest.param(fault, mode, marks=[pytest.mark.exhaustive] if number else [])
        for number, (fault, mode) in enumerate(zip(FAULTS, cycle(MODES), strict=False))
    ],
)
def test_a_group_fails_and_restarts_as_one(
    fork_server: ForkServer, mode: str, fault: str, tmp_path: Path
) -> None:
    """Let a fault hit one rank: the whole group restarts in its place (R50).

    It gets the state of another group, shard by shard, and every sample counts once.
    """
    steps, at = FAULTS[fault]
    config = {**LONG, "at": at}
    if fault in IN_REDUCTION:
        config["in_reduction"] = {IN_REDUCTION[fault]: 9}
    goes_on(fork_server, tmp_path, config, mode, steps)


def goes_on(
    fork_server: ForkServer,
    folder: Path,
    config: dict[str, Any],
    mode: str,
    steps: list[list[Any]],
    **spec: Any,
) -> None:
    collective: dict[str, Any] = {"mode": mode, "maxAge": 0}
    if mode == "Quorum":
        collective |= {"quorum": 1}
    if "stop" in config.get("at", {}).values():
        collective |= {"benchAfter": BENCH_AFTER}
    result = run(fork_server, folder, config, collective, steps, **spec)
    assert not result["undone"], result
    weights_of(result)
    assert result["log"]["applied"] == 40 * group_script.SAMPLES, result["log"]


TWO: dict[str, tuple[list[list[Any]], dict[str, Any]]] = {
    "killed in a reduction": ([], {"in_reduction": {"1.0#0/1": 9}}),
    "frozen": ([], {"at": {"2.0#0/1/9": "stop"}}),
    "drained": ([["sigterm", 0, 0, 60]], {}),
    "joined": ([["scale", 4, 0, 60]], {}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("first", "second", "mode"),
    [(*pair, mode) for pair, mode in zip(combinations(TWO, 2), cycle(MODES), strict=False)],
)
def test_groups_survive_two_faults(
    fork_server: ForkServer, mode: str, first: str, second: str, tmp_path: Path
) -> None:
    """Combine each two faults, at different groups out of three, so that one keeps its state."""
    (some, config), (more, other) = TWO[first], TWO[second]
    goes_on(fork_server, tmp_path, {**LONG, **config, **other}, mode, [*some, *more], replicas=3)


@pytest.mark.exhaustive
def test_a_job_whose_groups_all_died_resumes_from_its_checkpoint(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """Kill both groups: each rank loads its own shard of the checkpoint (R26)."""
    steps: list[list[Any]] = [["kill", 0, 0, 400], ["kill", 1, 0, -1]]
    checkpoint = {"path": str(tmp_path / "kept"), "everyRounds": 4}
    result = run(fork_server, tmp_path, LONG, {}, steps, checkpoint=checkpoint)
    assert not result["undone"], result
    weights_of(result)
    assert result["log"]["applied"] == 40 * group_script.SAMPLES, result["log"]


@pytest.mark.exhaustive
def test_shards_are_restored_by_another_number_of_groups(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """Save with two groups and restore with three (R53)."""
    config: dict[str, Any] = {"kind": "tensor", "epochs": 12}
    checkpoint = {"path": str(tmp_path / "kept"), "everyRounds": 4}
    failing = {**config, "at": {"0.0#0/1/20": "exit"}}
    first = run(fork_server, tmp_path, failing, backoffLimit=0, checkpoint=checkpoint)
    assert not first["complete"]
    second = run(fork_server, tmp_path, config, name="again", replicas=3, checkpoint=checkpoint)
    weights_of(second)
    assert second["log"]["applied"] == 12 * group_script.SAMPLES, second["log"]
    lines = [line for line in second["said"] if "goes on from the checkpoint" in line]
    assert lines, second["said"]


MISTAKES = {
    "nothing is sharded": ({"kind": "whole"}, "nothing is sharded"),
    "one rank leaves a step out": (
        {"kind": "tensor", "skips": "0/1/3"},
        "their scripts must take the same steps",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_group_whose_ranks_disagree_fails_the_job(
    fork_server: ForkServer, mistake: str, tmp_path: Path
) -> None:
    config, words = MISTAKES[mistake]
    result = run(fork_server, tmp_path, {"epochs": 2, **config})
    assert not result["complete"]
    assert result["reason"] == "GroupDisagrees", result
    assert words in result["message"]
