"""B9: what a checkpoint costs the training loop, beside torch.save and DCP, sync and async.

The job has one rank with the whole runtime. Each window of steps begins with one way to save the
same state (weights and AdamW's). The ways take turns, window after window, so that all meet the
same machine. The stall is by how much a window takes longer than the one of the same round in which
nothing is saved.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks import report as r
from benchmarks.command import Options, main
from benchmarks.lab import SCRIPTS, Lab, LabError
from testing.temporary import temporary_folder

WAYS: Final = ("paceline", "nothing", "torch.save", "dcp.save", "dcp.async_save")
PACELINE: Final = Path(sys.executable).parent / "paceline"
LIMIT_S: Final = 1200.0


def job(config: dict[str, Any]) -> dict[str, Any]:
    """Return the TrainingJob manifest; `config` configures the script."""
    trainer = {
        "name": "trainer",
        "image": "none",
        "command": [sys.executable, str(SCRIPTS / "checkpoint.py")],
        "env": [{"name": "BENCHMARK", "value": json.dumps(config)}],
    }
    return {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "b9"},
        "spec": {
            "replicas": 1,
            "collective": {"backend": "gloo", "mode": "Full", "freezeTimeout": "120s"},
            "checkpoint": {"path": "saved", "everyRounds": config["every"], "keep": 1},
            "template": {"spec": {"containers": [trainer]}},
        },
    }


def measure(config: dict[str, Any]) -> dict[str, Any]:
    """Run the job and return its figures.

    Args:
        config: Configuration of the script.

    Returns:
        The script's result file, with `facts` that the rank reported about its checkpoints.

    Raises:
        LabError: The job failed.
    """
    with temporary_folder() as folder:
        (folder / "job.yaml").write_text(json.dumps(job(config)))
        done = subprocess.run(
            [PACELINE, "run", "job.yaml", "--run-dir", "run"],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode != 0:
            raise LabError(f"checkpoint.py: {done.stdout[-4000:]}\n{done.stderr[-2000:]}")
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        status = json.loads((folder / "run" / "status.json").read_text())
        result["facts"] = status["ranks"][0]["facts"]
        return result


def run(_lab: Lab, given: Options) -> r.Report:
    """Run B9 and return its report."""
    width, layers = (256, 4) if given.smoke else (1024, 4)
    window = 20 if given.smoke else 30
    config = {
        "ways": WAYS,
        "window": window,
        "every": window * len(WAYS),
        "rounds": given.rounds,
        "width": width,
        "layers": layers,
        "work": 128,
        "step_ms": 10 if given.smoke else 30,
    }
    parameters = layers * (width + 1) * width
    mib = parameters * 12 / 2**20
    out = r.Report(
        "b9_checkpoint",
        f"B9: checkpoint of {parameters / 1e6:.1f} M parameters with AdamW's state "
        f"({mib:.0f} MiB), steps of about {config['step_ms']} ms",
        ("kept with", "stall, s", "range, s", "longest step, s", "window, s"),
        smoke=given.smoke,
    )
    ran = measure(config)
    rounds = [ran["windows"][i : i + len(WAYS)] for i in range(0, len(ran["windows"]), len(WAYS))]
    base = [round_[WAYS.index("nothing")]["seconds"] for round_ in rounds]
    stalls: dict[str, float] = {}
    for at, way in enumerate(WAYS):
        windows = [round_[at] for round_ in rounds]
        lost = [w["seconds"] - b for w, b in zip(windows, base, strict=True)]
        stalls[way] = r.middle(lost)
        out.rows.append(
            (
                way,
                stalls[way],
                f"{min(lost):.3f} to {max(lost):.3f}",
                r.middle(w["longest"] for w in windows),
                r.middle(w["seconds"] for w in windows),
            )
        )
        out.details[way] = windows
    facts = ran["facts"]
    written = facts.get("checkpoints_written", 0.0)
    out.details["facts"] = facts
    exposed = facts.get("checkpoint_exposed_seconds", 0.0) / max(1.0, written)
    hidden = facts.get("checkpoint_hidden_seconds", 0.0) / max(1.0, written)
    out.notes.append(
        f"paceline by its own figures, per checkpoint: {exposed:.3f} s exposed (the copy), "
        f"{hidden:.2f} s hidden (written and published in the background)"
    )
    out.notes.append(
        "the window is long enough for what goes on in the background, which shares the cores with "
        "training: its cost is part of the stall"
    )
    out.checks["every checkpoint of the job was written"] = written >= given.rounds
    out.checks["none failed"] = not facts.get("checkpoints_failed", 0.0)
    out.hashes["the ways"] = r.one_hash([f"{w['way']}" for w in ran["windows"]])
    if not given.smoke:
        others = {
            "the better of torch.save and dcp.save": min(stalls["torch.save"], stalls["dcp.save"]),
            "dcp.async_save": stalls["dcp.async_save"],
        }
        for other, stall in others.items():
            text = f"stall, beside {other}"
            out.bars.append(r.Bar(text, stalls["paceline"], stall, at_least=False))
    return out


if __name__ == "__main__":
    main(run, __doc__)
