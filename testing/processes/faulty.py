"""Random faults of a job at its command line: what happens, and what the run has to report.

The module is pure. `plan_of` makes a plan from a seed, `script_of` the training script of a plan,
and `expected` derives from docs/faults.md how the run ends. Each pair of a moment and a
misbehavior, and each signal from outside, is one cell; as many seeds as there are cells cover all
of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, Signals
from typing import Final


class When(StrEnum):
    """Place in the script at which a rank misbehaves."""

    BEFORE_INIT = "before pl.init()"
    BEFORE_LOOP = "before the loop"
    IN_BATCH = "in a batch of the second epoch"
    IN_ITEM = "in the data set, at one sample"
    IN_WORKER = "in a worker of the loader, at one sample"
    AFTER_LOOP = "after the loop"
    AFTER_FINISH = "after pl.finish()"


class How(StrEnum):
    """Kind of misbehavior; the value is the line of the script."""

    LOOPS = "while True: pass"
    READS = "os.read(os.pipe()[0], 1)"
    IS_DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
    KEY_ERROR = "raise KeyError('label')"
    OS_ERROR = "raise OSError(5, 'bad sector')"
    SYS_EXIT_0 = "sys.exit(0)"
    SYS_EXIT_3 = "sys.exit(3)"
    EXIT_0 = "os._exit(0)"
    EXIT_7 = "os._exit(7)"
    CRASHES = "os.kill(os.getpid(), signal.SIGSEGV)"
    IS_KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


HANGS: Final = (How.LOOPS, How.READS, How.IS_DEAF)
SAID: Final = {
    How.KEY_ERROR: "KeyError: 'label'",
    How.OS_ERROR: "OSError: [Errno 5] bad sector",
    How.SYS_EXIT_3: "exit code 3",
    How.EXIT_7: "exit code 7",
    How.CRASHES: "signal 11 (SIGSEGV)",
}
"""How the run describes a process that failed by its script."""
RAISES: Final = (How.KEY_ERROR, How.OS_ERROR)


class Script(StrEnum):
    """Behavior of the ranks when a signal comes from outside."""

    TRAINS = "trains"
    IGNORES_SIGTERM = "ignores SIGTERM"
    IS_STUCK = "rank 1 is stuck in a batch"


@dataclass(frozen=True)
class Outside:
    """A signal that the test sends to a process of the run."""

    target: str
    """Process that gets the signal: runner, coordinator or agent."""
    signal: Signals
    script: Script = Script.TRAINS


@dataclass(frozen=True)
class Plan:
    """One run with one fault."""

    ranks: int
    mode: str
    everybody: bool = False
    """True if all ranks misbehave each time they are started; otherwise rank 1 does, the first
    time. A fault at one sample hits the rank that has the sample."""
    when: When = When.IN_BATCH
    how: How | None = None
    outside: Outside | None = None

    @property
    def hangs_before_training(self) -> bool:
        """Return True if a rank hangs before the loop begins."""
        early = self.when in (When.BEFORE_INIT, When.BEFORE_LOOP)
        return early and self.how in HANGS

    @property
    def nobody_trains(self) -> bool:
        """Return True if the job cannot start.

        Either all ranks hang before training, or one of two never registers and might hold what the
        job has computed (R26).
        """
        unheard = self.when is When.BEFORE_INIT and self.ranks == 2
        return self.hangs_before_training and (self.everybody or unheard)


@dataclass(frozen=True)
class Expected:
    """The expected end of a run."""

    verdicts: tuple[str, ...]
    """Texts of which one must be in the output."""
    code: int | None
    """Exit code; None allows any, for example where the run itself is killed."""
    first: tuple[str, ...] = ()
    """Texts that the error line and the first line of `paceline explain` must contain; a text may
    hold alternatives, with | between them."""
    warns: tuple[str, ...] = ()
    """Texts of which one must be in the output."""


INSIDE: Final = tuple(
    (when, how)
    for when, how in product(When, How)
    # A kill at one sample repeats whenever a rank draws the sample. How often is open.
    if not (when is When.IN_ITEM and how is How.IS_KILLED)
)
OUTSIDE: Final = (
    *(
        Outside("runner", number, script)
        for number, script in product((SIGINT, SIGTERM, SIGHUP), Script)
    ),
    *(Outside(target, SIGKILL) for target in ("runner", "coordinator", "agent")),
    Outside("runner", SIGKILL, Script.IS_STUCK),
    Outside("runner", SIGKILL, Script.IGNORES_SIGTERM),
)
CELLS: Final[tuple[tuple[When, How] | Outside, ...]] = (*INSIDE, *OUTSIDE)
SEEDS: Final = len(CELLS)


def plan_of(seed: int) -> Plan:
    """Return the plan of a seed; equal seeds give equal plans."""
    order = random.Random(28).sample(range(SEEDS), SEEDS)
    cell = CELLS[order[seed % SEEDS]]
    draw = random.Random(seed)
    ranks, mode = draw.choice((2, 3)), draw.choice(("Full", "Majority", "Solo"))
    if isinstance(cell, Outside):
        return Plan(ranks, mode, outside=cell)
    when, how = cell
    # Repeated kills of all ranks end the job after backoffLimit, unless it completes first. The
    # outcome would not be known in advance.
    everybody = how is not How.IS_KILLED and draw.random() < 0.5
    return Plan(ranks, mode, everybody, when, how)


SCRIPT: Final = """\
import os, signal, sys, time, torch
import paceline as pl

torch.set_num_threads(1)
PLACE, _, ATTEMPT = map(int, os.environ["PACELINE_MEMBER"].replace("#", ".").split("."))
EPOCH = -1

def misbehaves(when):
    if when == WHEN and (EVERYBODY or (PLACE == 1 and ATTEMPT == 0)):
        HOW

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 240
    def __getitem__(self, i):
        time.sleep(0.001)
        if i == 77 and torch.utils.data.get_worker_info() is not None:
            misbehaves("IN_WORKER")
        elif i == 77 and EPOCH > 0:
            misbehaves("IN_ITEM")
        return torch.ones(4), torch.zeros(1)

if IGNORES:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
misbehaves("BEFORE_INIT")
pl.init()
model = torch.nn.Linear(4, 1)
optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model)
loader = pl.DataLoader(Data(), batch_size=4, num_workers=WORKERS)
misbehaves("BEFORE_LOOP")
for EPOCH in loader.epochs(EPOCHS):
    for k, (x, y) in enumerate(loader):
        if EPOCH > 0:
            if k == 0 and EPOCH == 1:
                print("trains its second epoch", flush=True)
            misbehaves("IN_BATCH")
        (model(x) - y).square().mean().backward()
        optimizer.step()
misbehaves("AFTER_LOOP")
pl.finish()
misbehaves("AFTER_FINISH")
"""
LINE: Final = SCRIPT[: SCRIPT.index("HOW")].count("\n") + 1
"""Line number at which a script misbehaves."""
TRAINS: Final = "trains its second epoch"


def script_of(plan: Plan) -> str:
    """Return the script that all ranks of the job run."""
    stuck = plan.outside is not None and plan.outside.script is Script.IS_STUCK
    deaf = plan.outside is not None and plan.outside.script is Script.IGNORES_SIGTERM
    how = How.READS if stuck else plan.how
    for_all = plan.everybody or plan.when in (When.IN_ITEM, When.IN_WORKER)
    by_signal = plan.outside is not None and plan.outside.target == "runner"
    values = {
        "WHEN": repr(plan.when.name if how is not None else ""),
        "EVERYBODY": repr(for_all),
        "HOW": str(how or "pass"),
        "IGNORES": repr(deaf),
        "WORKERS": "1" if plan.when is When.IN_WORKER else "0",
        "EPOCHS": "400" if by_signal else "5",
    }
    text = SCRIPT
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def step_deadline_s(plan: Plan) -> int:
    """Return the step deadline; torch looks for dead workers only every 5 s."""
    return 15 if plan.when is When.IN_WORKER and plan.how not in HANGS else 5


def options_of(plan: Plan) -> list[str]:
    """Return the arguments that follow `paceline run JOB`."""
    sets = [
        f"replicas={plan.ranks}",
        f"collective.mode={plan.mode}",
        f"stepDeadlineSeconds={step_deadline_s(plan)}",
        "finishDeadlineSeconds=4",
        "elasticity.drainGraceSeconds=4",
    ]
    if plan.hangs_before_training:
        # The job waits so long for ranks that do not register. If none does, a deadline ends it.
        limit = "activeDeadlineSeconds=15" if plan.nobody_trains else "elasticity.settleSeconds=1"
        sets.append(limit)
    return ["--quiet", *(f"--set=spec.{each}" for each in sets)]


COMPLETE: Final = "job job: Complete"


DEAD_WORKER: Final = "RuntimeError: DataLoader worker|FileNotFoundError|ConnectionResetError"
"""What torch raises when a worker of its loader has ended. The others come when the worker had
handed over a batch whose memory it could not send any more."""


def _failed(reason: str, *first: str) -> Expected:
    return Expected((f"job job: Failed ({reason})",), 1, first)


def expected(plan: Plan) -> Expected:
    """Return how a run of this plan ends, as in the table of docs/faults.md."""
    if plan.outside is not None:
        return _of_outside(plan.outside)
    how = plan.how
    assert how is not None
    if plan.when in (When.AFTER_LOOP, When.AFTER_FINISH):
        return _after_the_release(how)
    if plan.when is When.IN_WORKER and how not in (*HANGS, *RAISES):
        return _failed("ScriptFailed", DEAD_WORKER)
    if how in HANGS:
        return _of_hanging(plan)
    if how in (How.SYS_EXIT_0, How.EXIT_0):
        reason = "ScriptTookNoPart" if plan.when is When.BEFORE_INIT else "ScriptEndedEarly"
        return _failed(reason, reason)
    if how is How.IS_KILLED:
        return Expected((COMPLETE,), 0)
    if plan.when is When.IN_BATCH and not plan.everybody:
        return Expected((COMPLETE,), 0, warns=(f"SCRIPT FAILED         {SAID[how]}", SAID[how]))
    lines = (f"line {LINE})",) if how in RAISES else ()
    samples = ("77",) if plan.when is When.IN_ITEM else ()
    return _failed("ScriptFailed", SAID[how], *lines, *samples)


def _of_outside(outside: Outside) -> Expected:
    if outside.target != "runner":
        return Expected((COMPLETE,), 0)
    if outside.signal is SIGKILL:
        return Expected(("",), None)
    return Expected(("job job: stopped by the user", "job job: Failed (Interrupted)"), 130)


def _after_the_release(how: How) -> Expected:
    if how in HANGS:
        return Expected((COMPLETE,), 0, warns=("ScriptCutShort", "ScriptStillRuns"))
    if how in (How.SYS_EXIT_0, How.EXIT_0):
        return Expected((COMPLETE,), 0)
    if how in (How.IS_KILLED, How.CRASHES):
        return Expected((COMPLETE,), 0, warns=("ScriptCutShort",))
    return _failed("ScriptFailed", "after the end", SAID[how])


def _of_hanging(plan: Plan) -> Expected:
    if plan.nobody_trains:
        return _failed("DeadlineExceeded", "the job ran for 15s")
    if plan.hangs_before_training:
        return Expected((COMPLETE,), 0)
    if plan.when is When.IN_BATCH and not plan.everybody:
        # The step deadline ends the rank, or the finish deadline if the others complete first.
        return Expected((COMPLETE,), 0, warns=("ScriptStuck", "ScriptCutShort"))
    return _failed("ScriptFailed", "ScriptStuck: step() was not called for 5 s")
