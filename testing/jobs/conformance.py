"""The contract of the job commands, on any back end: one suite for this machine and for a cluster.

A back end's test module makes a `Place` and runs each of `CHECKS` over it. `the_whole_script` uses
the command line from submission to deletion; the other checks call the interface itself
(`paceline.jobs.interface`). Jobs are slow while the file `brake` lies in the place's folder, so no
job ends before a test has acted on it.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from paceline.jobs.errors import (
    NameTakenError,
    NoSuchJobError,
    NoSuchRankError,
    RejectedError,
    WaitTimeoutError,
)
from paceline.jobs.interface import COMPLETE, FAILED, SUSPENDED, Jobs, Selection, Until
from paceline_api.reading.load import parse_job
from paceline_api.status import RankPhase, place_of

from testing.jobs.terminal import LIMIT_S, Followed, Terminal, until

NAME = "verbs"
TIMEOUT = f"{LIMIT_S:g}s"
SCRIPT = """\
import os
import time
import paceline as pl
import torch

torch.set_num_threads(1)
print("begins", flush=True)
pl.init()
model = torch.nn.Linear(2, 1)
optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
loader = pl.DataLoader(torch.utils.data.TensorDataset(torch.randn(2048, 2)), batch_size=4)
steps = 0
for epoch in loader.epochs(8):
    for (x,) in loader:
        time.sleep(0.3 if os.path.exists("brake") else 0.0)
        if os.path.exists("mistake"):
            raise ValueError("made on purpose")
        model(x).square().mean().backward()
        optimizer.step()
        steps += 1
        if steps % 5 == 0:
            print(f"step {steps}", flush=True)
"""


class Place(ABC):
    """A back end in a test, and the actions that only a test has."""

    jobs: Jobs
    terminal: Terminal
    start: ClassVar[tuple[str, ...]]
    """The command that starts a job file."""
    formed: ClassVar[str]
    """Reason of the event for the moment in which the ranks formed the first membership."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "train.py").write_text(SCRIPT)
        self.brake = folder / "brake"
        self.brake.touch()

    def manifest(self, **spec: Any) -> dict[str, Any]:
        """Return the manifest of a job with two replicas."""
        container = {"name": "trainer", "image": "none", "command": ["python", "train.py"]}
        return {
            "apiVersion": "paceline.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": NAME},
            "spec": {
                "replicas": 2,
                "maxReplicas": 4,
                "collective": {"mode": "Full"},
                "elasticity": {"nodeLostSeconds": 10, "settleSeconds": 60},
                "template": {"spec": {"containers": [container]}},
                **spec,
            },
        }

    def submit(self, **spec: Any) -> None:
        """Submit the job by the interface, with these fields of the spec."""
        text = yaml.safe_dump(self.manifest(**spec))
        self.jobs.submit(parse_job(text), folder=self.folder)

    @abstractmethod
    def kill(self, rank: int) -> None:
        """Kill the replica of a rank without warning."""

    @abstractmethod
    def left(self) -> object:
        """Return what still runs of the job; anything false means nothing."""


def the_whole_script(place: Place) -> None:
    """Submit, watch, follow while a worker is killed, scale, suspend, resume, wait, delete."""
    say = place.terminal
    (place.folder / "job.yaml").write_text(yaml.safe_dump(place.manifest()))
    assert NAME in say.call(*place.start, "job.yaml")
    watched = say.start("status", NAME, "--watch")
    assert "Training" in say.call("wait", NAME, "--for", "training", "--timeout", TIMEOUT)
    assert "active" in say.call("status", NAME)
    assert "nothing holds it up" in say.call("explain", NAME)

    followed = say.start("logs", NAME, "-f", "--timestamps")
    until(lambda: followed.of(0) and followed.of(1), "lines of both ranks")
    figures = re.compile(r" 0:active step=[\d.]+ ms lag=[\d.]+ ms share=\d+%")
    until(lambda: any(map(figures.search, list(watched.lines))), "figures of the ranks")
    assert f"job {NAME}: 2 ranks" in say.call("report", NAME, "--out", "told")
    shows_both_ranks_on_one_clock(place.folder / "told")
    until(lambda: has_made_ten_steps(followed, 1), "enough rounds for a plan")
    first = planned(say)
    assert (first["compared"][-1]["setting"]["members"], first["error"]) == (2, None)
    before = len(followed.of(1))
    place.kill(1)
    until(lambda: len(followed.of(1)) > before + 2, "the replacement is heard")
    say.call("wait", NAME, "--for", "training", "--timeout", TIMEOUT)

    assert "2 -> 3 replicas" in say.call("scale", NAME, "--replicas", "3")
    until(lambda: followed.of(2), "the new rank is heard")
    say.call("wait", NAME, "--for", "training", "--timeout", TIMEOUT)
    assert say.status(NAME)["ready"] == 3
    wide = say.call("status", NAME, "-o", "wide")
    assert "member" in wide
    assert "host" in wide
    until(lambda: has_made_ten_steps(followed, 2), "enough rounds of three")
    at_three = planned(say)["compared"][-1]
    assert (at_three["setting"]["members"], at_three["by"]) == (3, "plan before")
    assert abs(at_three["error"]) < 1

    assert "is being suspended" in say.call("suspend", NAME)
    say.call("wait", NAME, "--for", "suspended", "--timeout", TIMEOUT)
    assert "resume" in say.call("explain", NAME)
    assert "Suspended" in say.call("wait", NAME, "--timeout", "1s", code=3)
    assert "is resumed" in say.call("resume", NAME)
    say.call("wait", NAME, "--for", "training", "--timeout", TIMEOUT)

    place.brake.unlink()
    assert "Complete" in say.call("wait", NAME, "--timeout", TIMEOUT)
    assert followed.end() == 0, "logs -f ends with the job"
    assert watched.end() == 0, "status --watch too"
    assert watched.lines[-1].startswith("Complete")
    times = [line.partition(" ")[0] for line in followed.lines if " rank " in line]
    late = sum(a > b for a, b in pairwise(times))
    # Lines that arrive after the reorder window of half a second are rare.
    assert late <= len(times) // 50, f"{late} of {len(times)} lines are out of order"

    listed = say.call("logs", NAME).splitlines()
    assert {line.partition(" |")[0] for line in listed} >= {"rank 0", "rank 1", "rank 2"}
    assert place.formed in say.call("events", NAME, "-o", "wide")
    assert "It is complete" in say.call("explain", NAME)
    assert "is deleted" in say.call("delete", NAME)
    assert not place.left()
    assert f"no job {NAME}" in say.call("status", NAME, code=2)


def has_made_ten_steps(followed: Followed, rank: int) -> bool:
    """Return True once the followed log shows ten steps of a rank."""
    return any("step 10" in line for line in followed.of(rank))


def planned(say: Terminal) -> dict[str, Any]:
    """Return the output of `paceline plan` for two and three ranks."""
    output: dict[str, Any] = json.loads(say.call("plan", NAME, "--ranks", "2,3", "-o", "json"))
    return output


def shows_both_ranks_on_one_clock(folder: Path) -> None:
    """Check that the report's trace aligns the clocks of two ranks.

    Steps take 300 ms and a common sum takes a few milliseconds, so the spans of a sum must nearly
    meet.

    Args:
        folder: folder of the report.
    """
    page = (folder / "report.html").read_text()
    assert page.count('<text x="0"') == 2
    assert 'id="silent"' not in page
    sums: dict[str, list[tuple[float, float]]] = {}
    for event in json.loads((folder / "trace.json").read_text())["traceEvents"]:
        if match := re.search(r"round \d+, segment \d+", event["args"].get("what", "")):
            span = event["ts"], event["ts"] + event["dur"]
            sums.setdefault(match[0], []).append(span)
    shared = [spans for spans in sums.values() if len(spans) == 2]
    assert len(shared) > 2, sums
    apart_us = [max(b for b, _ in spans) - min(e for _, e in spans) for spans in shared]
    assert max(apart_us) < 100_000, apart_us


def a_job_is_seen_and_changed(place: Place) -> None:
    """Check status, wait, logs, scale, suspend, resume and delete of a running job."""
    jobs = place.jobs
    place.submit()
    with pytest.raises(NameTakenError, match=NAME) as taken:
        place.submit()
    assert f"paceline delete {NAME}" in taken.value.hint
    with pytest.raises(WaitTimeoutError, match="not yet ended"):
        jobs.wait(NAME, timeout_s=0.5)
    trains = jobs.wait(NAME, Until.TRAINING, timeout_s=LIMIT_S)
    assert (trains.name, trains.ready, trains.replicas) == (NAME, 2, 2)
    assert trains.detail is not None
    ranks = {place_of(rank.member, 1): rank.state for rank in trains.detail.ranks}
    assert ranks == {0: RankPhase.ACTIVE, 1: RankPhase.ACTIVE}
    assert (jobs.resolved(NAME).name, jobs.resolved(NAME).world_size) == (NAME, 2)
    assert [one.name for one in jobs.all()] == [NAME]
    with pytest.raises(NoSuchRankError, match="no rank 2"):
        next(jobs.logs(NAME, Selection(rank=2)))
    with pytest.raises(RejectedError, match="maxReplicas") as refused:
        jobs.scale(NAME, 9)
    assert "\n" not in refused.value.message

    watched = jobs.watch(NAME)
    assert next(watched).state == "Training", "the present one first"
    followed = jobs.logs(NAME, Selection(rank=1), follow=True)
    lines = [next(followed) for _ in range(3)]
    followed.close()
    assert {line.rank for line in lines} == {1}
    assert [line.wall_ns for line in lines] == sorted(line.wall_ns for line in lines)

    assert jobs.scale(NAME, 3) == 2
    assert jobs.wait(NAME, Until.TRAINING, timeout_s=LIMIT_S).ready == 3
    assert jobs.resolved(NAME).replicas == 3
    jobs.suspend(NAME)
    jobs.suspend(NAME)
    assert jobs.wait(NAME, Until.SUSPENDED, timeout_s=LIMIT_S).state == SUSPENDED
    assert not place.left(), "a suspended job has no processes"
    jobs.resume(NAME)
    jobs.resume(NAME)
    assert jobs.wait(NAME, Until.TRAINING, timeout_s=LIMIT_S).replicas == 3
    assert [one.wall_s for one in jobs.events(NAME)] == sorted(
        one.wall_s for one in jobs.events(NAME)
    )
    assert len(jobs.explain(NAME).commands) <= 3

    jobs.delete(NAME, wait_s=LIMIT_S)
    assert not place.left()
    list(watched)  # ends with the job
    assert jobs.all() == []
    with pytest.raises(NoSuchJobError):
        jobs.status(NAME)


def a_job_ends_by_itself(place: Place) -> None:
    """Check the verbs on a job that completes."""
    jobs = place.jobs
    place.brake.unlink()
    place.submit()
    followed = list(jobs.logs(NAME, follow=True))
    assert {line.rank for line in followed} >= {0, 1}
    ended = jobs.wait(NAME, timeout_s=LIMIT_S)
    assert ended.state == COMPLETE
    assert ended.round > 0
    assert jobs.wait(NAME, Until.TRAINING, timeout_s=1.0).state == COMPLETE, "never again"
    assert [status.state for status in jobs.watch(NAME)] == [COMPLETE]
    last = list(jobs.logs(NAME, Selection(rank=0, tail=2)))
    assert 1 <= len(last) <= 2
    assert "complete" in jobs.explain(NAME).verdict
    jobs.delete(NAME, wait_s=LIMIT_S)


def a_job_that_fails_says_why(place: Place) -> None:
    """Check that the error of the script appears in status, explain, logs and events."""
    jobs = place.jobs
    place.submit(backoffLimit=0)
    jobs.wait(NAME, Until.TRAINING, timeout_s=LIMIT_S)
    (place.folder / "mistake").touch()
    ended = jobs.wait(NAME, timeout_s=LIMIT_S)
    assert ended.state == FAILED
    assert "made on purpose" in ended.message
    explanation = jobs.explain(NAME)
    assert "It has failed" in explanation.verdict
    assert any("logs" in command for command in explanation.commands)
    assert any("made on purpose" in line.text for line in jobs.logs(NAME))
    assert any(event.warning for event in jobs.events(NAME))
    jobs.delete(NAME, wait_s=LIMIT_S)


def nobody_of_that_name(place: Place) -> None:
    """Check that each verb refuses an unknown name with a hint."""
    jobs = place.jobs
    asked: tuple[Callable[[], object], ...] = (
        lambda: jobs.status("none"),
        lambda: list(jobs.watch("none")),
        lambda: jobs.wait("none"),
        lambda: list(jobs.logs("none")),
        lambda: jobs.scale("none", 2),
        lambda: jobs.suspend("none"),
        lambda: jobs.resume("none"),
        lambda: jobs.delete("none"),
        lambda: jobs.events("none"),
        lambda: jobs.explain("none"),
        lambda: jobs.samples("none"),
        lambda: jobs.resolved("none"),
    )
    for ask in asked:
        with pytest.raises(NoSuchJobError, match="none") as caught:
            ask()
        assert "\n" not in caught.value.message
        assert caught.value.hint


CHECKS = (
    the_whole_script,
    a_job_is_seen_and_changed,
    a_job_ends_by_itself,
    a_job_that_fails_says_why,
    nobody_of_that_name,
)
