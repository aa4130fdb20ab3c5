"""Run a training script in a job of Paceline, and compare the result with a plain run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import yaml

from testing.processes.runs import forked_paceline
from testing.scripts.plain import Rank, Result

REDIRECTED: Final = Path(__file__).with_name("redirected.py")


def run_paceline(
    script: Path,
    ranks: int,
    args: Sequence[str],
    out: Path,
    *words: str,
    backend: str = "gloo",
) -> tuple[Result, str]:
    """Run `script ARGS --out OUT` in a job on `ranks` replicas.

    Args:
        script: path of the script.
        ranks: number of replicas.
        args: arguments of the script.
        out: folder for the files of the script; a second run may continue from those of the first.
        words: more arguments of `paceline run`, such as faults.
        backend: transport of the job.

    Returns:
        The result, with the output of the last process in each slot, and what the run printed.
    """
    out.mkdir(parents=True, exist_ok=True)
    number = len(list(out.parent.glob("job-*")))
    folder = out.parent / f"job-{number}"
    logs = folder / "streams"
    logs.mkdir(parents=True)
    command = ["python", str(REDIRECTED), str(logs), str(script), *args, "--out", str(out)]
    container = {"name": "trainer", "image": "none", "command": command}
    job = {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "script"},
        "spec": {
            "replicas": ranks,
            "collective": {"mode": "Full", "backend": backend},
            "template": {"spec": {"containers": [container]}},
        },
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    code, said = forked_paceline(folder, "run", "job.yaml", *words)
    found = []
    for slot in range(ranks):
        streams = sorted(logs.glob(f"{slot}-*.stdout"), key=lambda p: p.stat().st_mtime_ns)
        last = streams[-1] if streams else None
        texts = (
            ("", "")
            if last is None
            else (
                last.read_text(),
                last.with_suffix(".stderr").read_text(),
            )
        )
        found.append(Rank(code, *texts))
    return Result(tuple(found), out), said


if __name__ == "__main__":
    result, text = run_paceline(
        Path(sys.argv[1]), int(sys.argv[2]), sys.argv[4:], Path(sys.argv[3])
    )
    sys.stdout.write(json.dumps([result.codes, text, result.story], indent=1))
