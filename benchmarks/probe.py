"""What a benchmark's training script records inside its rank.

Written to `probe-<member>.json` in the job's folder when the script is done. Times are monotonic
nanoseconds, comparable between the processes of one machine. Per committed round: when GO was acted
on, when the sum was complete, when the update was done, and who took part; per step of the main
thread: when it announced and when it went on. The cost is two clock readings and a tuple, the same
for every mode.
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
"""What the controller may change between two steps of a running job."""


class Probe:
    """Records of one rank; made before `pl.init()`."""

    def __init__(self, *, rounds: bool = True) -> None:
        """`rounds`: false for steps that are so short that watching the rounds would be felt."""
        self.reductions: list[tuple[int, int, int]] = []
        """(round, begun, ended)."""
        self.commits: list[dict[str, Any]] = []
        self.steps: list[tuple[int, int, int, int]] = []
        """(version before, announced, went on, iteration)."""
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

        def timed_apply(driver: CommThread, go: Any, *given: Any, **named: Any) -> Any:
            after = apply(driver, go, *given, **named)
            made = driver.machine.state.log.read(go)
            self.commits.append(
                {
                    "round": go.round,
                    "at": now_ns(),
                    "trigger": str(go.trigger),
                    "fresh": len(made.heard.fresh),
                    "gradients": made.gradients,
                    "request": go.request.number if go.request else 0,
                    "by": {str(s.member): s.count for s in made.shares if s.count},
                }
            )
            return after

        setattr(CommThread, "_reduce", timed_reduce)  # noqa: B010
        setattr(CommThread, "_apply", timed_apply)  # noqa: B010

    def step(self, optimizer: Any, iteration: int = 0) -> None:
        """`optimizer.step()`, timed."""
        version = optimizer._context.session.version  # noqa: SLF001
        announced = now_ns()
        optimizer.step()
        self.steps.append((version, announced, now_ns(), iteration))

    def knob(self, name: str, default: Any) -> Any:
        """The present value; the file is read again when it has changed."""
        try:
            changed = KNOBS.stat().st_mtime_ns
        except FileNotFoundError:
            return CONFIG.get(name, default)
        if changed != self._knobs_at:
            self._knobs_at = changed
            self._knobs = json.loads(KNOBS.read_text())
        return self._knobs.get(name, CONFIG.get(name, default))

    def write(self, **result: Any) -> None:
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
        draft = Path(f"probe-{MEMBER}.draft")
        draft.write_text(text)
        draft.rename(draft.with_suffix(".json"))


def memory() -> dict[str, float]:
    """MiB of this process: its own pages, and its share of those that it has in common."""
    figures: dict[str, float] = {}
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return figures
    values = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}
    own = values.get("Private_Clean", 0.0) + values.get("Private_Dirty", 0.0)
    return {"own_mib": own, "share_mib": values.get("Pss", 0.0), "all_mib": values.get("Rss", 0.0)}
