"""Runs jobs of real processes, ranks included, that are forked instead of started.

The fork server of the history tests imports torch once; its ranks share those pages, so 32 of them
fit into the memory that one pays for by importing. Apart from how a process begins it is the
product: runner, coordinator, agents, mpiexec and ranks as `paceline run` starts them. A job goes
through phases, each with its own `spec.collective`, switched while it runs (R18): the modes that
are compared are the same processes, minutes apart at most.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec
from paceline.core.anatomy.samples import PodSamples

from testing.processes import fork_server
from testing.processes.history import ForkServer, read_all
from testing.temporary import OwnFolder

ROOT: Final = Path(__file__).parent.parent
SCRIPTS: Final = Path(__file__).parent / "scripts"
SAMPLES: Final = "samples-{}.json"
"""By the number of the phase, in a job's folder."""
ENDS_S: Final = 10.0
START_S: Final = 120.0


@dataclass(frozen=True)
class Phase:
    """A stretch of a job. `name` is free; `collective` is what differs from the job's own."""

    name: str
    seconds: float
    collective: Mapping[str, Any] = field(default_factory=dict)
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """For the script; see `probe.Probe.knob`."""


@dataclass(frozen=True)
class Plan:
    """A job for the lab."""

    script: str
    """File name in `scripts`."""
    ranks: int
    phases: Sequence[Phase]
    config: Mapping[str, Any]
    """For the script."""
    collective: Mapping[str, Any] = field(default_factory=dict)
    faults: str = ""
    one_pod: bool = False
    """All ranks below one agent: fewer processes around them."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """What else the job's spec says."""
    samples: bool = False
    """Keep what the agents tell of the last steps at the end of each phase; `Ran.pods`."""
    own_end_s: float = 0.0
    """Without phases: the script ends the job by itself, at the latest after so long."""

    def job(self) -> dict[str, Any]:
        env = [{"name": "BENCHMARK", "value": json.dumps(dict(self.config))}]
        trainer = {
            "name": "trainer",
            "image": "none",
            "command": [sys.executable, str(SCRIPTS / self.script)],
            "env": env,
        }
        # A loaded machine shall not look like a frozen rank.
        collective = {"backend": "mpi", "maxAge": 0, "freezeTimeout": "60s", "hashEveryRounds": 50}
        return {
            "apiVersion": "paceline.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "benchmark"},
            "spec": {
                "replicas": 1 if self.one_pod else self.ranks,
                "procsPerReplica": self.ranks if self.one_pod else 1,
                "minReplicas": 1,
                "collective": {**collective, **self.collective},
                "template": {"spec": {"containers": [trainer]}},
                **self.spec,
            },
        }

    def order(self) -> dict[str, Any]:
        phases = [
            {
                "name": p.name,
                "seconds": p.seconds,
                "collective": {**self.job()["spec"]["collective"], **p.collective},
                "knobs": dict(p.knobs),
            }
            for p in self.phases
        ]
        return {
            "job": self.job(),
            "faults": self.faults,
            "ranks": self.ranks,
            "phases": phases,
            "samples": self.samples,
        }

    @property
    def limit_s(self) -> float:
        return 90.0 + 2 * sum(p.seconds for p in self.phases) + self.own_end_s


@dataclass(frozen=True)
class Ran:
    """What came of a plan."""

    probes: list[dict[str, Any]]
    """Of the ranks that came to their end, by member."""
    phases: list[dict[str, Any]]
    """Each with `begun` and `ended` on the monotonic clock."""
    log: dict[str, Any]
    points: list[tuple[int, int]]
    """Whenever the runner saw the version grow: monotonic ns, gradients applied so far."""
    folder: Path

    def pods(self, phase: int) -> list[PodSamples]:
        """Of a plan with `samples`: the last steps and rounds of each rank when a phase ended."""
        path = self.folder / SAMPLES.format(phase)
        return msgspec.json.decode(path.read_bytes(), type=list[PodSamples])


class LabError(RuntimeError):
    """A job of a benchmark did not end as it should."""


class Lab:
    """`with Lab() as lab: lab.run(plan)`; one job at a time. Keeps nothing on disk."""

    def __enter__(self) -> Self:
        # A short path: socket files are below it.
        self._scratch = OwnFolder()
        self._runs = 0
        self._fork_server: ForkServer | None = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._fork_server is not None:
            self._fork_server.end_all(0.0)
            self._fork_server.__exit__(kind, error, at)
        self._scratch.close()

    def _started(self) -> ForkServer:
        """Return the fork server; the first job starts it."""
        if self._fork_server is not None:
            return self._fork_server
        # The processes import the scripts' helpers from the root.
        before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), *before]))
        self._fork_server = ForkServer()
        return self._fork_server.__enter__()

    @property
    def pid(self) -> int:
        """Of the process that all others are below."""
        return self._started().process.pid

    def call(self, function: str, order: object, folder: Path, *, limit_s: float) -> Any:
        """What `function(order, folder)` ("module:name") returns in a new process."""
        return self._started().call(function, order, folder, limit_s=limit_s)

    def run(self, plan: Plan) -> Ran:
        """Raises LabError. No process of the job lives afterwards."""
        server = self._started()
        self._runs += 1
        folder = self._scratch.path / str(self._runs)
        folder.mkdir()
        read_end, write_end = os.pipe()
        env = {**server.env, "TMPDIR": str(folder)}
        with (folder / "runner.log").open("wb") as log:
            fork_server.ask(
                server.name,
                "benchmarks.conductor:runner",
                arguments=[json.dumps(plan.order()), str(folder), 3],
                env=env,
                cwd=str(folder),
                fds={1: log.fileno(), 2: log.fileno(), 3: write_end},
                limit_s=START_S,
            )
        os.close(write_end)
        answer: bytes | None = read_all(read_end, plan.limit_s)
        left = server.end_all(0.0 if answer is None else ENDS_S)
        said = (folder / "runner.log").read_text()[-4000:]
        if not answer:
            why = "failed" if answer is not None else f"was not over after {plan.limit_s:.0f} s"
            raise LabError(f"{plan.script}: the job {why}\n{said}\n{_last_words(folder)}")
        result = json.loads(answer)
        if not result["complete"] or left:
            words = "\n".join(result["printed"][-20:])
            raise LabError(
                f"{plan.script}: {result['reason']}: {result['message']} {left}\n{words}\n{said}"
                f"\n{_last_words(folder)}"
            )
        probes = [json.loads(p.read_text()) for p in sorted(folder.glob("probe-*.json"))]
        probes.sort(key=lambda probe: int(probe.get("rank", 0)))
        points = [(at_ns, gradients) for at_ns, gradients in result["points"]]
        return Ran(probes, result["phases"], result["log"], points, folder)


def _last_words(folder: Path) -> str:
    texts = [
        f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}"
        for log in sorted(folder.glob("*.log"))
    ]
    return "\n".join(texts)[-12_000:]
