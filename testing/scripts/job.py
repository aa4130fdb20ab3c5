"""Run a training script in a job of Paceline, with a result that compares with a plain run's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import yaml

from testing.processes.runs import forked_paceline
from testing.scripts.imports import prepare_for
from testing.scripts.plain import Rank, Result

REDIRECTED: Final = Path(__file__).with_name("redirected.py")


@dataclass(frozen=True)
class JobResult:
    """Result of one job."""

    last: Result
    """Result of the last process in each slot. The exit codes are those of `paceline run`."""
    report: str
    """Text that `paceline run` printed."""
    attempts: tuple[int, ...]
    """Number of processes that were started in each slot."""
    taken: tuple[int, ...] = ()
    """Samples in each gradient that a script brought to the job, if the job had pauses."""

    @property
    def story(self) -> str:
        """Everything that the run and the last processes printed, for a failed test."""
        return f"{self.report}\n{self.last.story}"


def run_paceline(
    script: Path,
    ranks: int,
    args: Sequence[str],
    out: Path,
    *words: str,
    backend: str = "gloo",
    pause_s: float = 0.0,
    late_s: float = 0.0,
    collective: Mapping[str, Any] = MappingProxyType({"mode": "Full"}),
) -> JobResult:
    """Run `script ARGS --out OUT` in a job with one rank for each of `ranks` replicas.

    Args:
        script: path of the script.
        ranks: number of replicas.
        args: arguments of the script.
        out: folder for the files of the script; a second run may continue from those of the first.
        words: more arguments of `paceline run`, such as faults.
        backend: transport of the job.
        pause_s: pause before each operation in seconds, so that a fault meets a short script.
        late_s: further pause of one rank, which is drawn for each operation.
        collective: fields of `spec.collective`, but for `backend`.

    Returns:
        The result of the job. No process of it is left.
    """
    prepare_for(script)
    out.mkdir(parents=True, exist_ok=True)
    folder = out.with_name(f"{out.name}.job-{len(list(out.parent.glob(f'{out.name}.job-*')))}")
    streams = folder / "streams"
    streams.mkdir(parents=True)
    command = ["python", str(REDIRECTED), str(streams), str(pause_s), str(late_s)]
    command += [str(script), *args]
    container = {"name": "trainer", "image": "none", "command": [*command, "--out", str(out)]}
    job = {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "script"},
        "spec": {
            "replicas": ranks,
            "collective": {**collective, "backend": backend},
            "template": {"spec": {"containers": [container]}},
        },
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    code, report = forked_paceline(folder, "run", "job.yaml", *words)
    per_rank = [_streams_of(slot, streams) for slot in range(ranks)]
    last = tuple(
        Rank(code, *processes[-1]) if processes else Rank(code, "", "") for processes in per_rank
    )
    taken = tuple(int(x) for path in streams.glob("*.taken") for x in path.read_text().split())
    return JobResult(Result(last, out), report, tuple(map(len, per_rank)), taken)


def _streams_of(slot: int, folder: Path) -> list[tuple[str, str]]:
    """Return stdout and stderr of each process in a slot, in the order of their starts."""
    attempts = sorted(
        folder.glob(f"{slot}-*.stdout"), key=lambda path: int(path.stem.split("-")[1])
    )
    return [(path.read_text(), path.with_suffix(".stderr").read_text()) for path in attempts]
