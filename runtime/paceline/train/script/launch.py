"""Runs a training script in a rank of a job, as torchrun would run it (S1, S2, S16)."""

from __future__ import annotations

import builtins
import faulthandler
import importlib.util
import io
import logging
import os
import pkgutil
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

from paceline_api.errors import EXIT_FAILURE
from paceline_api.types.enums import Mode
from torch._C._distributed_c10d import TCPStore
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.core.agent.exits import EXIT_AGAIN
from paceline.environment import RankSettings
from paceline.errors import DismissedError, UsageError
from paceline.train.context import refuse_init
from paceline.train.mistakes import explain_errors, script_error
from paceline.train.script import words
from paceline.train.script.backend import register
from paceline.train.script.counters import LastSteps
from paceline.train.script.models import Models
from paceline.train.script.passes import Passes
from paceline.train.script.state import ScriptStates
from paceline.worker.operations import ScriptState
from paceline.worker.script_engine import LeftBehindError, ScriptEngine

log = logging.getLogger("paceline.rank")

STEP_HINT: Final = (
    "a loop that counts its steps by itself, without a DataLoader or with next() on one, says "
    "`while (step := paceline.step()) < steps:` at its top, so that a rank that joins knows where "
    "to begin"
)


class Launched:
    """The script of this process, and what the job does around it."""

    def __init__(self, settings: RankSettings | None) -> None:
        self.engine = engine = ScriptEngine(settings)
        self._settings = settings
        self.passes = Passes(engine)
        self.models = Models(engine, self.passes)
        self.states = ScriptStates(engine, self.models, self.passes)
        self.last_steps = LastSteps(lambda: self.passes.joined)
        self._started = False
        engine.opens_here = self.passes.opens
        engine.on_load = self.states.load
        engine.on_joined = self.passes.joined_here
        engine.operations.read_state = self.states.read
        engine.operations.places = self.states.places
        engine.operations.weights = self.models.parameters
        self.models.on_adopted = self._adopted
        self.passes.on_skipped = self._skipped
        self.passes.on_joined = self.states.begun
        self.passes.on_batch = self.models.took_batch
        self.passes.on_begin = self._begin_with_batch
        self.passes.on_end = self._ended_pass
        self.models.install()
        self.passes.install()
        register_optimizer_step_post_hook(lambda *_: self._stepped())
        self.slot = engine.place
        register(self, self.slot, engine.slots, self.models.are_training)
        words.install(self)
        refuse_init(
            "pl.init() in a script that `paceline run SCRIPT` or `paceline launch` runs: it takes "
            "part in the job by torch.distributed",
            hint="remove pl.init() and what follows from it; or run a script of the pl API with "
            "a job file whose command is `python SCRIPT`",
        )

    def start(self) -> None:
        """Join the job when the script makes its first process group (S3)."""
        if self._started:
            return
        self._started = True
        if self.slot >= self.engine.slots:
            sys.stderr.write(
                f"paceline: rank {self.slot} stands by: the script was started with "
                f"{self.engine.slots} ranks and never has more; to train with more, suspend the "
                "job, change spec.replicas, and resume it\n"
            )
        self.engine.start()
        _check(self.engine)
        received = self.engine.operations.received
        if self.engine.follows and received is not None:
            self.states.begin_to_follow(received)

    def _adopted(self, index: int) -> None:
        self.last_steps.install()
        self.passes.install_for_torchdata()
        received: ScriptState | None = self.engine.operations.received
        if received is not None:
            self.states.load_model(received, index)

    def step(self) -> int:
        """Return the number of the step that the script makes next (`pl.step`)."""
        return self.passes.step()

    def keep(self, objects: dict[str, Any]) -> None:
        """Add objects to the state that a rank gets when it joins (`pl.keep`)."""
        self.states.kept.update(objects)

    def _stepped(self) -> None:
        self.passes.stepped()
        self.last_steps.restore()

    def _skipped(self) -> None:
        received = self.engine.operations.received
        if received is not None:
            self.states.load_models(received)

    def _begin_with_batch(self) -> None:
        self.models.set_sending(self.models.turns.at_batch)

    def _ended_pass(self, place: int) -> None:
        received = self.engine.operations.received
        if self.engine.follows and received is not None:  # it may have been received since
            self.states.begin_to_follow(received)
        self.models.ended_pass(place)

    def environment(self) -> dict[str, str]:
        """Return the variables that torchrun sets, for this rank."""
        engine, settings = self.engine, self._settings
        local = settings is None or settings.local
        number = self.slot if local else settings.member.local  # type: ignore[union-attr]
        spec = engine.spec
        beside = engine.slots if local or spec is None else spec.procs
        job = settings.job if settings is not None else "alone"
        return {
            "RANK": str(self.slot),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(engine.slots),
            "LOCAL_WORLD_SIZE": str(beside),
            "GROUP_RANK": "0" if local else str(settings.member.slot),  # type: ignore[union-attr]
            "GROUP_WORLD_SIZE": str(engine.slots // beside),
            "ROLE_RANK": str(self.slot),
            "ROLE_WORLD_SIZE": str(engine.slots),
            "ROLE_NAME": "default",
            "TORCHELASTIC_RUN_ID": job,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def run(self, script: str, arguments: Sequence[str], *, is_module: bool = False) -> int:
        """Run the script to its end, then wait for the end of the job.

        Args:
            script: Path of the script, or the name of a module.
            arguments: Arguments of the script.
            is_module: True to run a module, as `python -m` does.

        Returns:
            The exit code of this process.
        """
        # A store of its own: nobody has to wait for the server of slot 0.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.environ.update(self.environment())
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
        sys.argv = [script, *arguments]
        try:
            run_as_main(script, is_module=is_module)
        except SystemExit as end:
            code = 1
            if end.code is None or isinstance(end.code, int):
                code = (end.code or 0) & 0xFF  # as the system cuts it
            else:
                sys.stderr.write(f"{end.code}\n")
            if code:
                # The agent adds the last lines: only there is what the script has printed.
                self.engine.failed("", script_error(end, end.__traceback__))
                return code
        except LeftBehindError as error:
            if self.engine.was_active:
                sys.stderr.write(f"paceline: {error}; this rank starts its script again\n")
                return EXIT_AGAIN
            return self._stay_outside(error)
        except DismissedError:
            return 0
        finally:
            self.passes.is_over = True
        return self._end()

    def _stay_outside(self, error: LeftBehindError) -> int:
        """Let the job go on without this slot: another start of the script would end here as well.

        Returns:
            The exit code of this process.

        Raises:
            UsageError: This is slot 0, without which the job would save nothing (S14).
        """
        if self.slot == 0:
            raise UsageError(
                f"rank 0, which writes what the script saves, was lost, and its replacement cannot "
                f"join: {error}",
                hint=STEP_HINT,
            )
        sys.stderr.write(f"paceline: this rank cannot join: {error}; hint: {STEP_HINT}\n")
        # The job goes on, unless it needs the slot: a script has failed there.
        self.engine.end(outside=True)
        return 0

    def _end(self) -> int:
        if not self._started:
            if self.engine.slots > 1:
                raise UsageError(
                    f"the script ended without a process group, on {self.engine.slots} ranks: each "
                    "has trained by itself",
                    hint="call torch.distributed.init_process_group() and wrap the model in "
                    "DistributedDataParallel; or run it with --replicas 1",
                )
            self.start()
        self.engine.end()
        return 0


def _check(engine: ScriptEngine) -> None:
    """Check that the job can run a script unchanged; a job file with `paceline launch` is.

    Raises:
        UsageError: The job has a mode or a shared model that needs Paceline's own API.
    """
    if engine.mode is Mode.SHADOW:
        raise UsageError(
            "spec.collective.mode is Shadow, which needs Paceline's own optimizer",
            hint="set it to Full, as under torchrun, or to Quorum, Majority, Solo or Deadline; or "
            "use pl.DistributedOptimizer and pl.DataLoader (docs/porting.md)",
        )
    if engine.pipeline:
        raise UsageError(
            f"spec.collective.pipeline is {engine.pipeline}, and a script without Paceline's "
            "optimizer has the average of all ranks in its gradients after backward()",
            hint="set it to 0, or use pl.DistributedOptimizer and pl.DataLoader (docs/porting.md)",
        )
    if engine.shards > 1:
        raise UsageError(
            f"spec.parallelism.model is {engine.shards}, and a script without Paceline's optimizer "
            "has the whole model on each rank",
            hint="remove it, or use pl.DistributedOptimizer and pl.group() (docs/porting.md)",
        )


def run_as_main(script: str, *, is_module: bool) -> None:
    """Run a script as `python SCRIPT` or `python -m MODULE` runs it, in this process (S16).

    Args:
        script: Path of the script, or the name of a module.
        is_module: True for a module.
    """
    folder = str(Path.cwd() if is_module else Path(script).resolve().parent)
    if not sys.flags.safe_path:
        # `python -m` has put the folder of this process there, which a script does not see.
        sys.path[: sys.path[:1] == [str(Path.cwd())]] = [folder]
    if is_module:
        _run_module(script)
    elif pkgutil.get_importer(script) is not None:
        runpy.run_path(script, run_name="__main__")  # a zip file with a __main__.py
    else:
        _run_file(os.path.abspath(script))  # noqa: PTH100 - as Python, which follows no links here


def _run_module(name: str) -> None:
    """Run a module, or the module `__main__` of a package.

    Args:
        name: Name of the module or the package.

    Raises:
        ModuleNotFoundError: There is no such module, or no code of it.
    """
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = importlib.util.find_spec(name)
    code = spec.loader.get_code(name) if spec and isinstance(spec.loader, InspectLoader) else None
    if spec is None or code is None:
        raise ModuleNotFoundError(f"No module named {name} that can be run", name=name)
    sys.argv[0] = spec.origin or name
    names = {"cached": spec.cached, "file": spec.origin, "loader": spec.loader}
    _run_code(code, **names, package=spec.parent, spec=spec)


def _run_file(file: str) -> None:
    """Run a script.

    Args:
        file: Absolute path of a script or of its bytecode.
    """
    with io.open_code(file) as stream:
        code = pkgutil.read_code(stream)
    loader: SourceFileLoader | SourcelessFileLoader
    if code is not None:
        loader = SourcelessFileLoader("__main__", file)
    else:
        loader = SourceFileLoader("__main__", file)
        code = loader.source_to_code(loader.get_data(file), file)
    _run_code(code, cached=None, file=file, loader=loader)


def _run_code(code: CodeType, **names: object) -> None:
    """Run code as the module `__main__`, which stays that module to the end of the process.

    The modules of runpy end with the last line of a script. Its classes and functions could not be
    pickled after it.

    Args:
        code: The code.
        names: Values of the module's names with two underscores, without these.
    """
    module = ModuleType("__main__")
    vars(module).update({f"__{name}__": value for name, value in names.items()})
    vars(module).update(__annotations__={}, __builtins__=builtins)
    sys.modules["__main__"] = module
    exec(code, vars(module))


def main(command: Sequence[str]) -> int:
    """Run a script in a rank; `command` is its path, or `-m` and a module, and its arguments.

    Args:
        command: The command line.

    Returns:
        The exit code of this process.

    Raises:
        UsageError: There is no script in the command line.
    """
    is_module = bool(command) and command[0] == "-m"
    command = command[1:] if is_module else command
    if not command:
        raise UsageError("no script to run", hint="paceline launch train.py [its arguments]")
    explain_errors(lambda *_: None)
    if not faulthandler.is_enabled():
        faulthandler.enable(all_threads=False)  # a crash names the line of the script
    settings = RankSettings.from_environment(os.environ)
    launched = Launched(settings)
    explain_errors(launched.engine.failed)
    try:
        return launched.run(command[0], command[1:], is_module=is_module)
    except BaseException as error:
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise  # the interpreter ends by SIGINT after the latter
        # The interpreter does so too: the hook of the script or of torch then sees the error.
        sys.excepthook(type(error), error, error.__traceback__)
        return EXIT_FAILURE
    finally:
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
