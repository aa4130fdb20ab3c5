"""Record what a benchmark's training script does inside its rank.

The records go to `probe-<member>.<local rank>.json` in the job's folder when the script is done.
Times are monotonic nanoseconds, comparable between the processes of one machine. For each committed
round: when the rank began and ended the reduction, when the update was done, and who took part. For
each step of the main thread: when it announced and when it continued. The cost is two clock
readings and a tuple, the same for every mode.
"""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

from paceline.clock import now_ns
from paceline.worker.comm_thread import CommThread

CONFIG: dict[str, Any] = json.loads(os.environ.get("BENCHMARK", "{}"))
MEMBER = os.environ.get("PACELINE_MEMBER", "0.0#0")
KNOBS = Path("knobs.json")
"""File with values that the conductor may change between two steps of a running job."""


class Probe:
    """Records of one rank; create it before `pl.init()`."""

    def __init__(self, *, rounds: bool = True) -> None:
        """Prepare the records.

        Args:
            rounds: False for steps that are so short that recording the rounds would distort them.
        """
        self.reductions: list[tuple[int, int, int]] = []
        """Tuples (round, began, ended)."""
        self.commits: list[dict[str, Any]] = []
        self.steps: list[tuple[int, int, int, int]] = []
        """Tuples (version before the step, announced, continued, iteration)."""
        self._knobs: dict[str, Any] = {}
        self._knobs_at = -1
        if rounds:
            self._wrap()

    def _wrap(self) -> None:
        reduce, apply = CommThread._reduce, CommThread._apply  # noqa: SLF001

        def timed_reduce(driver: CommThread, effect: Any) -> Any:
            begun = now_ns()
            after = reduce(driver, effect)
            self.reductions.append((effect.go.round, begun, now_ns()))
            return after

        def timed_apply(driver: CommThread, go: Any, weighing: Any, **named: Any) -> Any:
            after = apply(driver, go, weighing, **named)
            made = driver.machine.state.log.read(go)
            self.commits.append(
                {
                    "round": go.round,
                    "at": now_ns(),
                    "trigger": str(go.trigger),
                    "fresh": len(made.arrivals.fresh),
                    "gradients": made.gradients,
                    "weight": weighing.samples / (weighing.divisor * weighing.unit),
                    "request": go.request.number if go.request else 0,
                    "by": {str(s.member): s.count for s in made.shares if s.count},
                }
            )
            return after

        setattr(CommThread, "_reduce", timed_reduce)  # noqa: B010
        setattr(CommThread, "_apply", timed_apply)  # noqa: B010

    def step(self, optimizer: Any, iteration: int = 0) -> None:
        """Call `optimizer.step()` and record when it began and ended."""
        version = optimizer._context.session.version  # noqa: SLF001
        announced = now_ns()
        optimizer.step()
        self.steps.append((version, announced, now_ns(), iteration))

    def knob(self, name: str, default: Any) -> Any:
        """Return the current value of a knob; the file is read again when it has changed."""
        try:
            changed = KNOBS.stat().st_mtime_ns
        except FileNotFoundError:
            return CONFIG.get(name, default)
        if changed != self._knobs_at:
            self._knobs_at = changed
            self._knobs = json.loads(KNOBS.read_text())
        return self._knobs.get(name, CONFIG.get(name, default))

    def write(self, **result: Any) -> None:
        """Write all records, CPU time, memory and `result` to the probe file."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        text = json.dumps(
            {
                "member": MEMBER,
                "reductions": self.reductions,
                "commits": self.commits,
                "steps": self.steps,
                "cpu_s": usage.ru_utime + usage.ru_stime,
                **memory(),
                **result,
            }
        )
        # The ranks of a group are one member.
        name = f"probe-{MEMBER}.{os.environ.get('LOCAL_RANK', '0')}"
        draft = Path(f"{name}.draft")
        draft.write_text(text)
        draft.rename(f"{name}.json")


def memory() -> dict[str, float]:
    """Return this process's memory in MiB: private pages, proportional share, and resident set."""
    figures: dict[str, float] = {}
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return figures
    values = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}
    own = values.get("Private_Clean", 0.0) + values.get("Private_Dirty", 0.0)
    return {"own_mib": own, "share_mib": values.get("Pss", 0.0), "all_mib": values.get("Rss", 0.0)}
