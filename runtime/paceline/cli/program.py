"""What a command line asks to run: a job file, or a training script with its own arguments.

A word that ends in .yaml, .yml or .json, `-` and a device file name a job file. Everything else is
a script. All words after a script belong to it, also those that look like options of Paceline. The
only exceptions are options directly behind the script: the number of ranks, an image, GPUs, and
those with a value that only Paceline knows, such as a mode.
"""

from __future__ import annotations

import ast
import importlib.machinery
import re
import sys
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NoReturn

from paceline_api.bounded import TooLargeError, read_file
from paceline_api.errors import EXIT_BAD_INPUT, PacelineError, printable
from paceline_api.reading.load import load_job
from paceline_api.runtimes.merge import Runtime
from paceline_api.types.enums import Mode
from paceline_api.types.job import TrainingJob
from typer.core import TyperCommand

from paceline.core.faults import FaultKind
from paceline.function.packed import BYTES_MAX, FOLDER
from paceline.jobs.core.script_job import ScriptJob, job_name

JOB_FILES: Final = (".yaml", ".yml", ".json")
STDIN: Final = "/dev/stdin"
HEAD_BYTES: Final = 4096
"""How much of a file is read to see whether it is a job file without a suffix."""
_JOB_TEXT: Final = re.compile(rb"^(apiVersion|kind)\s*:", re.M)
_OF_TORCHRUN: Final = (
    *("--local-addr", "--log-dir", "--master-addr", "--master-port", "--max-restarts"),
    *("--monitor-interval", "--node-rank", "--rdzv-backend", "--rdzv-conf", "--rdzv-endpoint"),
    *("--rdzv-id", "--redirects", "--role", "--start-method", "--tee"),
)


SIZES: Final = ("--replicas", "--nproc-per-node", "--nproc_per_node")
"""Options that say how many ranks there are. Only one of them can be given."""
_OWN: Final = (*SIZES, "--image", "--gpus")
"""Options that count as Paceline's directly behind the script, whatever their value."""
_VALUES: Final = {
    "--mode": "|".join(Mode),
    "--quorum": r"\d+%?",
    "--inject": rf"({'|'.join(FaultKind)})(:.*)?",
    "--set": r"(spec|metadata)\..*",
}
"""Options that a script may have as well, and the values that only Paceline's has."""
_REPEATED: Final = ("--inject", "--set")
"""Options that can be given more than once."""


class UnrunnableScriptError(PacelineError):
    """Raised if a script cannot be run as the command line asks."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(printable(message), hint=printable(hint), exit_code=EXIT_BAD_INPUT)


def is_job_file(word: str) -> bool:
    """Return True if the word names a job file, and False for a script."""
    return word == "-" or word.startswith("/dev/") or Path(word).suffix.lower() in JOB_FILES


class ProgramCommand(TyperCommand):
    """A command whose argument is a job file, or a script and all words after it.

    Options may stand before and after a job file, but only before a script.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line.

        Args:
            ctx: Context of the command.
            args: Words after the name of the command.

        Returns:
            Words that no parameter took.
        """
        ctx.allow_interspersed_args = False
        ctx.ignore_unknown_options = True
        options, rest, _ = self.make_parser(ctx).parse_args(list(args))
        ctx.ignore_unknown_options = False
        first = options.get("file")
        if isinstance(first, str) and not is_job_file(first):
            known = {name for each in self.params for name in each.opts}
            args = _with_own_options_first(args, first, known)
        if isinstance(first, str) and first.startswith("-") and first != "-" and "--" not in args:
            if any(word.endswith(".py") for word in (*rest, *(options.get("words") or ()))):
                _refuse_misplaced(first, self.name or "", args)
        elif isinstance(first, str) and not options.get("is_module") and is_job_file(first):
            ctx.allow_interspersed_args = True
        return super().parse_args(ctx, args)


def _with_own_options_first(args: list[str], script: str, known: Container[str]) -> list[str]:
    """Return the words with the options of Paceline directly behind the script before it.

    Args:
        args: Words of the command line.
        script: The script.
        known: Options that the command has. Others belong to the script.

    Returns:
        The words.
    """
    at = args.index(script)
    behind = args[at + 1 :]
    given = {word.partition("=")[0] for word in args[:at]}
    if not given.isdisjoint(SIZES):
        given.update(SIZES)
    end = 0
    while end < len(behind):
        option, is_joined, value = behind[end].partition("=")
        if option not in known or (option in given and option not in _REPEATED):
            break
        value = value if is_joined else behind[end + 1] if end + 1 < len(behind) else ""
        if option not in _OWN and not re.fullmatch(_VALUES.get(option, r"(?!)"), value):
            break
        end = min(end + (1 if is_joined else 2), len(behind))
        given.update(SIZES if option in SIZES else (option,))
    return [*args[:at], *behind[:end], script, *behind[end:]]


def _refuse_misplaced(option: str, command: str, args: Sequence[str]) -> None:
    """Refuse an option before the script that the command does not have.

    Raises:
        UnrunnableScriptError: Always.
    """
    name = option.partition("=")[0]
    if name.replace("_", "-") in _OF_TORCHRUN:
        raise UnrunnableScriptError(
            f"{name} is an option of torchrun, which `paceline {command}` does not need",
            hint="leave it out: the ranks find each other through the job's coordinator",
        )
    script = next(word for word in args if word.endswith(".py"))
    if name in SIZES:
        _refuse_size(name, command, script)
    raise UnrunnableScriptError(
        f"{name} is not an option of `paceline {command}`",
        hint=f"arguments of the script come after it: paceline {command} {script} {option} ...; "
        f"`paceline {command} -h` lists the options that come before it",
    )


def _refuse_size(name: str, command: str, script: str) -> NoReturn:
    """Refuse torchrun's number of ranks for a command whose ranks are not on this machine.

    Raises:
        UnrunnableScriptError: Always.
    """
    if command == "launch":
        raise UnrunnableScriptError(
            f"{name} is not an option of `paceline launch`: it runs one rank",
            hint="in a pod, spec.replicas and spec.procsPerReplica of the job say how many there "
            f"are; on this machine, `paceline run --nproc-per-node N {script}` starts N ranks",
        )
    raise UnrunnableScriptError(
        f"{name} is not an option of `paceline {command}`: torchrun counts processes of this "
        "machine, and the ranks of this job run in pods",
        hint="--replicas N makes N pods, and --gpus N gives each N GPUs with a rank for each; "
        "--procs N is the number of ranks of a pod without GPUs",
    )


@dataclass(frozen=True, slots=True)
class Program:
    """The job file or the script of a command line; `of` makes it."""

    file: str
    """Path of a job file or a script, or name of a module."""
    arguments: tuple[str, ...] = ()
    """Arguments of the script."""
    is_module: bool = False

    @classmethod
    def of(cls, file: str, arguments: Sequence[str] | None, *, is_module: bool) -> Program:
        """Return the program, after a check that it can be run.

        Args:
            file: The first word that is not an option.
            arguments: All words after it.
            is_module: True if the option -m was given.

        Returns:
            The program.

        Raises:
            UnrunnableScriptError: There is no such script or module, or it is no Python.
        """
        program = cls(STDIN if file == "-" else file, tuple(arguments or ()), is_module)
        if not program.is_script:
            if program.arguments:
                raise UnrunnableScriptError(
                    f"{program.arguments[0]!r} after the job file {file} is not an option",
                    hint="arguments of the script of a job file stand in its command",
                )
        elif is_module:
            _check_module(file)
        else:
            _check_script(Path(file))
        return program

    @property
    def is_script(self) -> bool:
        """Return True for a script or a module, and False for a job file."""
        return self.is_module or not is_job_file(self.file)

    @property
    def folder(self) -> Path:
        """The folder to which paths of the job are relative."""
        return Path() if self.is_script else Path(self.file).parent

    def words(self) -> list[str]:
        """Return the program as the last words of a command line."""
        return ["-m"] * self.is_module + [self.file, *self.arguments]

    def job(
        self,
        command: Sequence[str],
        overrides: Sequence[str],
        image: str,
        gpus: int = 0,
        runtime: Runtime | None = None,
    ) -> TrainingJob:
        """Return the valid job; a wrong field raises InvalidJobError.

        Args:
            command: Words that launch a script in a rank.
            overrides: Changes of fields, as `path=value`.
            image: Image of a script's job; empty for that of its runtime.
            gpus: GPUs of each replica of a script's job.
            runtime: Runtime to merge the job with; None merges nothing.

        Returns:
            The job.
        """
        if not self.is_script:
            return load_job(Path(self.file), overrides, runtime)
        return self.script_job(command, image, gpus).job(overrides, runtime)

    def script_job(self, command: Sequence[str], image: str, gpus: int = 0) -> ScriptJob:
        """Return the job of a script, before changes; the arguments are those of `job`."""
        name = self.file.rpartition(".")[2] if self.is_module else Path(self.file).stem
        return ScriptJob(
            name=job_name(name), command=command, words=self.words(), image=image, gpus=gpus
        )

    def sent(self, place: str) -> tuple[Program, dict[str, str]]:
        """Return the program as the pods get it from a ConfigMap, and the files that travel.

        Args:
            place: Folder in a pod in which the files will lie.

        Returns:
            The script in that folder, and its text by name.

        Raises:
            UnrunnableScriptError: It cannot travel: it is a module, too large, no text, or needs
                files of its folder.
        """
        if self.is_module:
            raise UnrunnableScriptError(
                f"--with-script sends one file, and {self.file} is a module",
                hint="name the script's file, or an image that has the module: --image",
            )
        path = Path(self.file)
        try:
            text = read_file(path, BYTES_MAX).decode()
        except TooLargeError:
            raise UnrunnableScriptError(
                f"{path} has more than the {BYTES_MAX:,} bytes that travel with a job",
                hint="put it into an image: `paceline init --dockerfile` writes what makes one",
            ) from None
        except UnicodeDecodeError:
            raise UnrunnableScriptError(
                f"{path} is not UTF-8 text", hint="save it as UTF-8"
            ) from None
        if beside := sorted(_imported_from(path.resolve().parent, text)):
            raise UnrunnableScriptError(
                f"{path} imports {', '.join(beside)} from its folder, and --with-script sends one "
                "file only",
                hint="put the folder into an image: `paceline init --dockerfile` writes what makes "
                "one",
            )
        return replace(self, file=f"{place}/{FOLDER}/{path.name}"), {path.name: text}


def misread_options(program: Program, options: Sequence[str]) -> list[str]:
    """Return the options of Paceline that stand after a script, so that the script gets them.

    Args:
        program: The program.
        options: Options that the command line knows, and that were not given before the script.

    Returns:
        Those among the arguments of the script.
    """
    given = {word.partition("=")[0] for word in program.arguments}
    return [option for option in options if option in given]


def misread_values(program: Program) -> Iterator[tuple[str, str]]:
    """Yield the options of Paceline after a script that the script gets, each with its value.

    An option of one of these names with another value is one of the script's own.

    Args:
        program: The program.

    Yields:
        Option and value.
    """
    words = program.arguments
    joined = [word.partition("=")[::2] for word in words if "=" in word]
    for option, value in (*pairwise(words), *joined):
        if option in _VALUES and re.fullmatch(_VALUES[option], value):
            yield option, value


def _check_script(path: Path) -> None:
    here = "" if path.is_absolute() else f" in {Path.cwd()}"
    if path.is_dir():
        scripts = sorted(each.name for each in path.glob("*.py"))[:3]
        named = f"name the script in it, such as {path / scripts[0]}" if scripts else "name a file"
        raise UnrunnableScriptError(f"{path}{here} is a folder, not a script", hint=named)
    try:
        with path.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
    except FileNotFoundError:
        near = [each for each in (path.with_suffix(".py"), *_job_files(path)) if each.is_file()]
        hint = f"did you mean {near[0]}?" if near else "paths are relative to that folder"
        if path.is_absolute() and not near:
            hint = "name the path of a Python script, or of a job file that ends in .yaml"
        raise UnrunnableScriptError(f"there is no script {path}{here}", hint=hint) from None
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise UnrunnableScriptError(
            f"{path} cannot be read: {reason}", hint="name a script that you may read"
        ) from None
    if path.suffix in (".sh", ".bash") or re.match(rb"#!.*\b(ba|da|z|k)?sh\b", head):
        raise UnrunnableScriptError(
            f"{path} is a script for a shell, and not for Python",
            hint="name the Python script that it starts; or write a job file whose container "
            f'trainer has command: ["bash", "{path.name}"]',
        )
    if path.suffix == ".ipynb":
        raise UnrunnableScriptError(
            f"{path} is a notebook, and not a script",
            hint="save it as a .py file: jupyter nbconvert --to script",
        )
    if path.suffix != ".py" and _JOB_TEXT.search(head):
        raise UnrunnableScriptError(
            f"{path} is a job file without the suffix .yaml",
            hint=f"rename it to {path.name}.yaml, or read it from stdin: paceline run - < {path}",
        )


def _job_files(path: Path) -> list[Path]:
    return [path.with_name(path.name + suffix) for suffix in JOB_FILES]


def _check_module(name: str) -> None:
    """Check that the first part of a module's name exists, without importing anything.

    Raises:
        UnrunnableScriptError: It does not exist, or is the path of a file.
    """
    if name.endswith(".py") or "/" in name:
        raise UnrunnableScriptError(
            f"-m takes the name of a module, and {name} is a path", hint="leave out -m"
        )
    first = name.partition(".")[0]
    path = [str(Path.cwd()), *sys.path]
    if first in sys.builtin_module_names or importlib.machinery.PathFinder.find_spec(first, path):
        return
    raise UnrunnableScriptError(
        f"there is no module {first}, neither in {Path.cwd()} nor installed for {sys.executable}",
        hint="name a module as for `python -m`; without -m, the path of a script",
    )


def _imported_from(folder: Path, text: str) -> Iterator[str]:
    """Yield the modules in `folder` that a script imports; none if it does not parse."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    for name in names:
        if (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file():
            yield name
