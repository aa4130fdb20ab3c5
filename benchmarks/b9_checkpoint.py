"""B9: what a checkpoint costs the training loop, beside torch.save and DCP, sync and async.

The job has one rank with the whole runtime. Each window of steps begins with one way to save the
same state (weights and AdamW's). The ways take turns, window after window, so that all meet the
same machine. The stall is by how much a window takes longer than the one of the same round in which
nothing is saved.
"""

from __future__ import annotations

import json
from typing import Any, Final

from benchmarks.harness import Report, benchmark, middle, one_hash
from benchmarks.jobs import manifest, run_job, script
from testing.temporary import temporary_folder

WAYS: Final = ("paceline", "nothing", "torch.save", "dcp.save", "dcp.async_save")
LIMIT_S: Final = 1200.0


def measure(config: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Run the job; `config` configures the script.

    Args:
        config: Configuration of the script.

    Returns:
        The windows of the script in order, and what the rank reported about its checkpoints.
    """
    job = manifest(
        script("checkpoint.py"),
        env={"BENCHMARK": json.dumps(config)},
        replicas=1,
        collective={"backend": "gloo", "mode": "Full", "freezeTimeout": "120s"},
        checkpoint={"path": "saved", "everyRounds": config["every"], "keep": 1},
    )
    with temporary_folder() as folder:
        run_dir = run_job(job, folder, limit_s=LIMIT_S)
        windows: list[dict[str, Any]] = json.loads((folder / "result.json").read_text())["windows"]
        status = json.loads((run_dir / "status.json").read_text())
        return windows, status["ranks"][0]["facts"]


@benchmark(
    "B9: cost of a checkpoint",
    ("kept with", "stall, s", "range, s", "longest step, s", "window, s"),
)
def run(out: Report) -> None:
    """Run B9."""
    width, layers = (256, 4) if out.smoke else (1024, 4)
    window = 20 if out.smoke else 30
    config = {
        "ways": WAYS,
        "window": window,
        "every": window * len(WAYS),
        "rounds": out.rounds,
        "width": width,
        "layers": layers,
        "work": 128,
        "step_ms": 10 if out.smoke else 30,
    }
    parameters = layers * (width + 1) * width
    out.title = (
        f"B9: checkpoint of {parameters / 1e6:.1f} M parameters with AdamW's state "
        f"({parameters * 12 / 2**20:.0f} MiB), steps of about {config['step_ms']} ms"
    )
    windows, facts = measure(config)
    base = [w["seconds"] for w in windows if w["way"] == "nothing"]
    stalls: dict[str, float] = {}
    for way in WAYS:
        mine = [w for w in windows if w["way"] == way]
        lost = [w["seconds"] - b for w, b in zip(mine, base, strict=True)]
        stalls[way] = middle(lost)
        longest, seconds = (middle(w[name] for w in mine) for name in ("longest", "seconds"))
        spread = f"{min(lost):.3f} to {max(lost):.3f}"
        out.rows.append((way, stalls[way], spread, longest, seconds))
        out.samples[way] = mine
    written = facts.get("checkpoints_written", 0.0)
    exposed, hidden = (
        facts.get(f"checkpoint_{name}_seconds", 0.0) / max(1.0, written)
        for name in ("exposed", "hidden")
    )
    out.notes.append(
        f"paceline by its own figures, per checkpoint: {exposed:.3f} s exposed (the copy), "
        f"{hidden:.2f} s hidden (written and published in the background)"
    )
    out.notes.append(
        "the window is long enough for what goes on in the background, which shares the cores with "
        "training: its cost is part of the stall"
    )
    out.checks["every checkpoint of the job was written"] = written >= out.rounds
    out.checks["none failed"] = not facts.get("checkpoints_failed", 0.0)
    out.hashes["the ways"] = one_hash([w["way"] for w in windows])
    if not out.smoke:
        better = min(stalls["torch.save"], stalls["dcp.save"])
        text = "stall, beside the better of torch.save and dcp.save"
        out.at_most(text, stalls["paceline"], better)
        out.at_most("stall, beside dcp.async_save", stalls["paceline"], stalls["dcp.async_save"])
