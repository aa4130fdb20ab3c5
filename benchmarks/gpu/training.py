"""Jobs whose ranks train on GPUs: beside torch's DDP, and through a fault."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.harness import Bar, Report, middle
from benchmarks.jobs import JobError, manifest, python_path, run_job, script
from benchmarks.network import free_port
from testing.temporary import temporary_folder

SCRIPT: Final = "gpu_steps.py"
LIMIT_S: Final = 300
BESIDE_DDP: Final = 1.02


@dataclass(frozen=True)
class Setup:
    """Ranks, and their backends on both sides."""

    ranks: int
    ddp: str
    """Backend of torch.distributed."""
    paceline: str
    """Value of spec.collective.backend."""
    layers: int
    sentences: int
    """Batch size of a rank."""
    steps: int
    runs: int


def beside_ddp(places: Sequence[torch.device], *, smoke: bool) -> Report:
    """Measure a step of a transformer with DDP and Paceline in turn.

    DDP uses the fastest of its settings.

    Returns:
        The report.
    """
    columns = (
        *("ranks", "sentences", "DDP over", "its ms", "Paceline over", "its ms"),
        *("over DDP", "from", "to"),
    )
    report = Report("gpu_training", "A step of a transformer beside DDP", columns)
    for setup in setups(places):
        runs = [_pair(setup, places[0], smoke=smoke) for _ in range(1 if smoke else setup.runs)]
        ratios = [own / other for other, own, _ in runs]
        theirs = middle(other for other, _, _ in runs)
        report.rows.append(
            (
                *(setup.ranks, setup.sentences, setup.ddp, theirs * 1e3),
                *(setup.paceline, middle(own for _, own, _ in runs) * 1e3),
                *(middle(ratios), min(ratios), max(ratios)),
            )
        )
        where = f"{setup.ranks} ranks, {setup.sentences} sentences, {setup.paceline}"
        report.checks[f"{where}: equal weights on all ranks"] = all(same for *_, same in runs)
        report.bars.append(
            Bar(f"{where}: step over DDP's", middle(ratios), BESIDE_DDP, at_least=False)
        )
    return report


def setups(places: Sequence[torch.device]) -> list[Setup]:
    """Return the setups for these devices, each with two ranks at least.

    Ranks that share a GPU reduce through host memory on both sides.

    Returns:
        The setups.
    """
    if places[0].type == "cpu":
        return [Setup(2, "gloo", "auto", 2, 2, 5, 1)]
    shared = Setup(2, "gloo", "auto", 4, 16, 20, 2)
    # Kernel launches limit the first setup, the GPU limits the second.
    own = [Setup(len(places), "nccl", "nccl", 8, *each) for each in ((16, 100, 3), (128, 30, 3))]
    return own if len(places) > 1 else [*own, shared]


def _pair(setup: Setup, place: torch.device, *, smoke: bool) -> tuple[float, float, bool]:
    """Return the seconds of a step with DDP and Paceline, and True if all weights are equal."""
    config = {
        "model": "transformer",
        "device": place.type,
        "layers": 2 if smoke else setup.layers,
        "width": 32 if smoke else 1024,
        "sentences": 2 if smoke else setup.sentences,
        "words": 16 if smoke else 256,
        "steps": 5 if smoke else setup.steps,
    }
    ddp = run_ddp(setup, config)
    own = run_paceline(setup.ranks, {"backend": setup.paceline, "mode": "Full"}, config)
    slowest = [max(rank["step_s"] for rank in ranks) for ranks in (ddp, own)]
    return slowest[0], slowest[1], len({rank["hash"] for rank in own}) == 1


def run_ddp(setup: Setup, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run the plain script on all ranks.

    Args:
        setup: Ranks and backend.
        config: Configuration of the script.

    Returns:
        What each rank wrote.

    Raises:
        RuntimeError: A rank failed.
    """
    with temporary_folder() as results:
        order = {**config, "backend": setup.ddp, "results": str(results)}
        common = {
            **os.environ,
            "BENCHMARK": json.dumps(order),
            "PYTHONPATH": python_path(),
            "WORLD_SIZE": str(setup.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        own = [
            {"RANK": str(rank), "CUDA_VISIBLE_DEVICES": _of(setup, rank)}
            for rank in range(setup.ranks)
        ]
        processes = [subprocess.Popen(script(SCRIPT), env={**common, **each}) for each in own]
        try:
            codes = [process.wait(LIMIT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            raise RuntimeError(f"ranks of DDP ended with {codes}")
        return _read(results)


def _of(setup: Setup, rank: int) -> str:
    """Return the GPU of a rank of DDP: its own with NCCL, the first one with gloo."""
    return str(rank if setup.ddp == "nccl" else 0)


def run_paceline(
    ranks: int, collective: Mapping[str, Any], config: Mapping[str, Any], *words: str
) -> list[dict[str, Any]]:
    """Run the script with `paceline run`.

    Args:
        ranks: World size.
        collective: Collective settings.
        config: Configuration of the script.
        *words: Further arguments of `paceline run`.

    Returns:
        What each rank wrote.
    """
    with temporary_folder() as results:
        order = {**config, "results": str(results)}
        job = manifest(
            script(SCRIPT),
            env={"BENCHMARK": json.dumps(order), "PYTHONPATH": python_path()},
            replicas=ranks,
            procsPerReplica=1,
            collective=dict(collective),
        )
        run_job(job, results, *words, limit_s=LIMIT_S)
        return _read(results)


def through_a_fault(places: Sequence[torch.device], *, smoke: bool) -> Report:
    """Kill one of four ranks, which is restarted and catches up.

    The ranks share GPUs if there are fewer than four.

    Returns:
        The report.
    """
    report = Report("gpu_fault", "A rank on a GPU is killed", ("check",))
    config = {
        "model": "transformer",
        "device": places[0].type,
        "layers": 2,
        "width": 32 if smoke else 256,
        "sentences": 2,
        "words": 16,
        "steps": 60 if smoke else 800,
        "pause_ms": 0 if smoke else 30,
    }
    collective = {"backend": "auto", "mode": "Quorum", "quorum": "75%"}
    what = "the job is complete, and all ranks hold the same weights"
    try:
        ranks = run_paceline(4, collective, config, "--inject", "kill:rank=1,at=round:30")
        report.checks[what] = len({rank["hash"] for rank in ranks}) == 1
        report.notes.append(f"{len(ranks)} of 4 ranks were there at the end")
    except JobError as error:
        report.checks[what] = False
        report.notes.append(str(error))
    report.rows = [(what,) for what in report.checks]
    return report


def _read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in folder.glob("[0-9]*.json")]
