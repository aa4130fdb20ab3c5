"""Run one job of a benchmark in place of `paceline run`, and lead it through its phases.

The lab's fork server forks this process (`lab`). It waits until every rank is active. Then it leads
the job from phase to phase by posting new targets, as the operator would, and ends it at an agreed
round (R17, R18).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from paceline.clock import now_ns
from paceline.core.faults import parse_faults
from paceline.core.messages import Targets
from paceline.local import steps
from paceline.local.client import CoordinatorAwayError
from paceline.local.runner import Runner
from paceline.local.timeline import Timeline
from paceline_api.reading.load import job_from_mapping
from paceline_api.resolve import resolve
from paceline_api.rounds import RoundSettings
from paceline_api.status import RankPhase, Status

from benchmarks.lab import SAMPLES
from testing.processes import fork_server, forked

START_S = 90.0
RETRY_S = 0.05


def runner(text: str, folder: str, answer: int) -> int:
    """Run one job and write its result as JSON to the file descriptor `answer`.

    Args:
        text: The order of the lab's plan, as JSON.
        folder: Run directory and working directory of the job.
        answer: File descriptor that the result goes to; it is closed afterwards.

    Returns:
        The exit code, always 0; a failed job shows in the result.
    """
    forked.start_by(fork_server.start_below())
    result = asyncio.run(_conduct(json.loads(text), Path(folder)))
    with os.fdopen(answer, "w") as file:
        json.dump(result, file)
    return 0


def make_runner(
    order: Mapping[str, Any],
    folder: Path,
    look: Callable[[Status, Timeline], None],
    printed: list[str],
) -> Runner:
    """Return the runner of a job that keeps its files and its working directory in one folder.

    Args:
        order: `job` (the manifest) and `faults` (as for `--inject`).
        folder: Run directory and working directory.
        look: Function that receives each status of the job.
        printed: List to which all lines are added that the runner prints.
    """
    return Runner(
        resolve(job_from_mapping(order["job"])),
        run_dir=folder,
        working_dir=folder,
        faults=tuple(parse_faults(order["faults"])),
        show=look,
        say=printed.append,
        on_line=printed.append,
    )


async def _conduct(order: dict[str, Any], folder: Path) -> dict[str, Any]:
    printed: list[str] = []
    conductor = Conductor(order, folder)
    runs = make_runner(order, folder, conductor.look, printed)
    task = asyncio.create_task(conductor.play(runs))
    result = await runs.run()
    if not task.done():
        task.cancel()
    elif not task.cancelled() and task.exception() is not None:
        printed.append(repr(task.exception()))
    log = result.status.log if result.status is not None else None
    return {
        "complete": result.outcome.complete and len(conductor.played) == len(order["phases"]),
        "reason": result.outcome.reason,
        "message": result.outcome.message,
        "printed": printed,
        "phases": conductor.played,
        "points": conductor.points,
        "log": {
            "gradients": log.gradients if log else 0,
            "applied": log.samples_applied if log else 0,
            "late": log.samples_late if log else 0,
            "dropped": log.samples_dropped if log else {},
            "shares": log.shares if log else {},
        },
    }


class Conductor:
    """Leads a job through its phases, following the statuses that `look` receives."""

    def __init__(self, order: dict[str, Any], folder: Path) -> None:
        self.played: list[dict[str, Any]] = []
        self.points: list[tuple[int, int]] = []
        self._order = order
        self._folder = folder
        self._status: Status | None = None
        self._news = asyncio.Event()

    def look(self, status: Status, timeline: Timeline) -> None:
        """Receive a status of the job and record its progress."""
        self._status = status
        if (last := timeline.last) is not None:
            point = last.at_ns, last.gradients
            if self.points[-1:] != [point]:
                self.points.append(point)
        self._news.set()

    async def play(self, runs: Runner) -> None:
        """Wait until all ranks are active, run the phases, and stop the job.

        Without phases, the script ends the job by itself.
        """
        async with asyncio.timeout(START_S):
            while not self._all_active():
                self._news.clear()
                await self._news.wait()
        for phase in self._order["phases"]:
            knobs = self._folder / "knobs.draft"
            knobs.write_text(json.dumps(phase["knobs"]))
            knobs.rename(self._folder / "knobs.json")
            begun = now_ns()
            await self._post(runs, Targets(settings=self._settings(phase["collective"])))
            await asyncio.sleep(phase["seconds"])
            ended = now_ns()
            if self._order["samples"]:
                pods, _ = await asyncio.to_thread(steps.of_run, self._folder)
                kept = self._folder / SAMPLES.format(len(self.played))
                kept.write_bytes(msgspec.json.encode(pods))
            self.played.append({"name": phase["name"], "begun": begun, "ended": ended})
        assert runs._cluster is not None  # noqa: SLF001
        if self.played:  # without phases, the script ends the job
            runs._cluster.stop()  # noqa: SLF001

    def _all_active(self) -> bool:
        status = self._status
        if status is None or status.version < 2:
            return False
        active = [rank for rank in status.ranks if rank.state is RankPhase.ACTIVE]
        return len(active) == int(self._order["ranks"])

    def _settings(self, collective: dict[str, Any]) -> RoundSettings:
        job = json.loads(json.dumps(self._order["job"]))
        job["spec"]["collective"] = collective
        return RoundSettings.of(resolve(job_from_mapping(job)).collective)

    async def _post(self, runs: Runner, targets: Targets) -> None:
        assert runs._cluster is not None  # noqa: SLF001
        while True:
            try:
                await runs._cluster._client.post("/v1/targets", targets)  # noqa: SLF001
                return
            except CoordinatorAwayError:
                await asyncio.sleep(RETRY_S)
