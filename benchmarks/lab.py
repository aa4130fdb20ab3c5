"""Run jobs of real processes whose processes, ranks included, are forked instead of started.

The fork server of the history tests imports torch once and its ranks share those pages. So 32 ranks
fit into memory that would otherwise hold far fewer. Apart from how a process begins, this is the
product: runner, coordinator, agents, mpiexec and ranks as `paceline run` starts them. A job goes
through phases. Each phase has its own `spec.collective`, which is switched while the job runs
(R18), so the modes that are compared run in the same processes, minutes apart at most.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec
from paceline.core.anatomy.samples import PodSamples

from benchmarks.jobs import JobError, manifest, python_path, script
from testing.processes import fork_server
from testing.processes.history import ForkServer, read_all
from testing.temporary import OwnFolder

SAMPLES: Final = "samples-{}.json"
"""Name pattern of the sample files in a job's folder, filled in with the index of the phase."""
ENDS_S: Final = 10.0
START_S: Final = 120.0


@dataclass(frozen=True)
class Phase:
    """One stretch of a job, during which its settings stay the same.

    `name` is free text; `collective` holds what differs from the job's own collective settings.
    """

    name: str
    seconds: float
    collective: Mapping[str, Any] = field(default_factory=dict)
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Values that the script reads with `probe.Probe.knob` while this phase runs."""


@dataclass(frozen=True)
class Plan:
    """Everything that the lab needs to run one job: script, ranks, phases and spec."""

    script: str
    """File name of the training script in `benchmarks/scripts`."""
    ranks: int
    phases: Sequence[Phase]
    config: Mapping[str, Any]
    """Configuration of the script, passed as JSON in the environment variable BENCHMARK."""
    collective: Mapping[str, Any] = field(default_factory=dict)
    faults: str = ""
    one_pod: bool = False
    """True to run all ranks below one agent, which saves processes."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the job's spec, merged over those that the lab sets."""
    samples: bool = False
    """True to keep the agents' samples of the last steps at the end of each phase; see `Ran.pods`.
    """
    own_end_s: float = 0.0
    """Upper bound, in seconds, on a job without phases, whose script ends it by itself."""

    def job(self) -> dict[str, Any]:
        """Return the TrainingJob manifest of this plan as a plain dict."""
        # Ranks on a loaded machine must not look frozen.
        collective = {"backend": "mpi", "maxAge": 0, "freezeTimeout": "60s", "hashEveryRounds": 50}
        spec = {
            "replicas": 1 if self.one_pod else self.ranks,
            "procsPerReplica": self.ranks if self.one_pod else 1,
            "minReplicas": 1,
            "collective": {**collective, **self.collective},
            **self.spec,
        }
        return manifest(script(self.script), env={"BENCHMARK": json.dumps(self.config)}, **spec)

    def order(self) -> dict[str, Any]:
        """Return what the conductor needs to run the plan, as a dict that JSON can hold."""
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
        """Time in seconds after which the job counts as hung."""
        return 90.0 + 2 * sum(p.seconds for p in self.phases) + self.own_end_s


@dataclass(frozen=True)
class Ran:
    """Results of one job that ended as planned."""

    probes: list[dict[str, Any]]
    """Probe files of the ranks that ran to their end, ordered by rank number."""
    phases: list[dict[str, Any]]
    """Phases as they ran, each with `begun` and `ended` in ns on the monotonic clock."""
    log: dict[str, Any]
    points: list[tuple[int, int]]
    """Progress as the runner observed it: pairs of monotonic ns and gradients applied so far."""
    folder: Path

    def pods(self, phase: int) -> list[PodSamples]:
        """Return the last steps and rounds of each rank at the end of a phase.

        Args:
            phase: Index of the phase. The plan must have set `samples`.

        Returns:
            One PodSamples per pod.
        """
        path = self.folder / SAMPLES.format(phase)
        return msgspec.json.decode(path.read_bytes(), type=list[PodSamples])


class Lab:
    """Context manager that runs one job at a time in a temporary folder: `lab.run(plan)`.

    The folder, and all that the jobs wrote into it, is removed at the end.
    """

    def __init__(self, stretch: float = 1.0) -> None:
        """Prepare a lab; `stretch` is a factor on the length of all phases."""
        self._stretch = stretch

    def __enter__(self) -> Self:
        # The path must be short, because socket files are below it.
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
        """Return the fork server; the first call starts it."""
        if self._fork_server is not None:
            return self._fork_server
        # The processes import the scripts' helpers from the repository's root.
        os.environ["PYTHONPATH"] = python_path()
        self._fork_server = ForkServer()
        return self._fork_server.__enter__()

    @property
    def pid(self) -> int:
        """Process id of the fork server, the ancestor of all other processes of the lab."""
        return self._started().pid

    def call(self, function: str, order: object, folder: Path, *, limit_s: float) -> Any:
        """Call a function in a new forked process and return its result.

        Args:
            function: Name as "module:name"; it is called as `function(order, folder)`.
            order: First argument of the function; it must be serializable as JSON.
            folder: Working folder of the new process.
            limit_s: Timeout in seconds.

        Returns:
            The function's result.
        """
        return self._started().call(function, order, folder, limit_s=limit_s)

    def run(self, plan: Plan) -> Ran:
        """Run one job to its end; no process of the job is alive afterwards.

        Args:
            plan: The job and its phases.

        Returns:
            The probes of the ranks, the phases, and the job's log.

        Raises:
            JobError: The job failed, timed out, ended incomplete, or left processes behind.
        """
        longer = [replace(p, seconds=self._stretch * p.seconds) for p in plan.phases]
        plan = replace(plan, phases=longer)
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
        log_tail = (folder / "runner.log").read_text()[-4000:]
        if not answer:
            why = "failed" if answer is not None else f"was not over after {plan.limit_s:.0f} s"
            raise JobError(f"{plan.script}: the job {why}\n{log_tail}\n{_last_words(folder)}")
        result = json.loads(answer)
        if not result["complete"] or left:
            words = "\n".join(result["printed"][-20:])
            raise JobError(
                f"{plan.script}: {result['reason']}: {result['message']} {left}\n{words}\n"
                f"{log_tail}\n{_last_words(folder)}"
            )
        probes = [json.loads(p.read_text()) for p in sorted(folder.glob("probe-*.json"))]
        probes.sort(key=lambda probe: int(probe.get("rank", 0)))
        points = [(at_ns, gradients) for at_ns, gradients in result["points"]]
        return Ran(probes, result["phases"], result["log"], points, folder)


def _last_words(folder: Path) -> str:
    """Return the ends of all log files in the job's folder, for an error message."""
    texts = [
        f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}"
        for log in sorted(folder.glob("*.log"))
    ]
    return "\n".join(texts)[-12_000:]
