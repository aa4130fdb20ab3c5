"""Start of the function of a job in one rank: `python -m paceline.function.start`.

The files of the function are in the subfolder `function` of the run folder. Packages that it needs
are installed once for all ranks that share the run folder, into an environment on top of the one
that runs this module. Packages that exist there already are not installed again. Then this process
becomes the program.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import site
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from paceline_api.bounded import read_file
from paceline_api.decoding import UNDECODABLE
from paceline_api.names import ENV_RUN_DIR

from paceline.function.errors import FunctionError
from paceline.function.packed import BYTES_MAX, DESCRIPTION, FOLDER, PROGRAM, Description
from paceline.private_files import append, private_umask

ENVIRONMENT: Final = "function-packages"
"""Subfolder of the run folder with the environment for the packages."""
DONE: Final = "installed"
"""File in the environment that marks the installation as complete."""
SAID_LINES: Final = 5
"""Number of lines of pip's output that an error message shows."""
INSTALL_S: Final = 1800.0
"""Timeout of the installation in seconds."""


def main(env: Mapping[str, str]) -> None:
    """Become the program of the function, or exit with a message of one sentence."""
    try:
        os.execv(*command(Path(env.get(ENV_RUN_DIR, "."))))
    except FunctionError as error:
        sys.exit(error.render())


def command(run_dir: Path) -> tuple[str, list[str]]:
    """Return the interpreter and the arguments that run the function of a run folder.

    Installs the packages first, if there are any. An unusable function raises FunctionError.

    Returns:
        Path of the interpreter, and its argv.
    """
    folder = run_dir / FOLDER
    description = read(folder)
    python = sys.executable
    if description.packages:
        python = str(install(run_dir, description.packages))
    return python, [python, str(folder / PROGRAM)]


def read(folder: Path) -> Description:
    """Return the description of the function in this folder; its program must compile here.

    Args:
        folder: The folder with the files of the function.

    Returns:
        The description.

    Raises:
        FunctionError: The folder holds no function, or this Python cannot compile the program.
    """
    try:
        data = read_file(folder / DESCRIPTION, BYTES_MAX)
        description = msgspec.json.decode(data, type=Description)
        program = read_file(folder / PROGRAM, BYTES_MAX).decode()
    except (OSError, *UNDECODABLE) as error:
        raise FunctionError(
            f"{folder} holds no function: {error}",
            hint="this is started by jobs of paceline.client; let `train` make the job",
        ) from None
    check_python(description, program)
    return description


def check_python(
    description: Description, program: str, here: tuple[int, int] = sys.version_info[:2]
) -> None:
    """Check that this Python can compile a program that another version may have written.

    Args:
        description: Has the version that the program was written for.
        program: Source of the program.
        here: Version of this Python.

    Raises:
        FunctionError: It cannot be compiled.
    """
    try:
        compile(program, PROGRAM, "exec", dont_inherit=True)
    except SyntaxError as error:
        wrote, runs = (".".join(map(str, version)) for version in (description.python, here))
        raise FunctionError(
            f"function {description.name} was written for Python {wrote}, and the Python {runs} of "
            f"this rank does not read its line {error.lineno}: {(error.text or '').strip()}",
            hint=f"use an image with Python {wrote}, or write it for {runs}",
        ) from None
    except (MemoryError, RecursionError, ValueError) as error:
        raise FunctionError(
            f"function {description.name} is nothing that Python compiles: "
            f"{str(error) or 'it is nested too deeply'}",
            hint="write it with fewer brackets inside each other, and without zero bytes",
        ) from None


def install(run_dir: Path, packages: Sequence[str]) -> Path:
    """Return the interpreter of an environment that has these packages.

    The first rank that comes makes the environment; the others wait for it at a file lock. If pip
    fails or takes longer than INSTALL_S, FunctionError is raised.

    Args:
        run_dir: The run folder, which the ranks share.
        packages: Requirements, as `pip install` takes them.

    Returns:
        Path of the interpreter.
    """
    folder = run_dir / ENVIRONMENT
    python = folder / "bin" / "python"
    with private_umask(), open(append(run_dir / f"{ENVIRONMENT}.lock"), "w") as lock:  # noqa: PTH123
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the block or the process ends
        if not (folder / DONE).exists():
            _make(folder)
            _pip(python, packages)
            (folder / DONE).touch()
    return python


def _make(folder: Path) -> None:
    """Make an environment that sees every package that this interpreter sees.

    That holds whether or not this interpreter is in an environment itself.

    Raises:
        FunctionError: This Python has no ensurepip.
    """
    if importlib.util.find_spec("ensurepip") is None:
        raise FunctionError(
            f"packages cannot be installed: {sys.executable} comes without ensurepip",
            hint="use an image whose Python has it, as the official ones, or one that contains the "
            "packages",
        )
    venv.create(folder, clear=True, with_pip=True, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (folder / "lib" / version / "site-packages" / "around.pth").write_text("\n".join(lines) + "\n")


def _pip(python: Path, packages: Sequence[str]) -> None:
    words = ["install", "--quiet", "--disable-pip-version-check", "--no-input", "--", *packages]
    try:
        done = subprocess.run(
            [python, "-m", "pip", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=INSTALL_S,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise FunctionError(
            f"pip did not install {', '.join(packages)} within {INSTALL_S:g} s",
            hint="see whether the package index can be reached, or use an image that contains them",
        ) from None
    if done.returncode:
        output = " / ".join(line for line in done.stdout.splitlines()[-SAID_LINES:] if line.strip())
        raise FunctionError(
            f"pip could not install {', '.join(packages)}: {output}",
            hint="correct packages=[...]; where pods reach no index, use an image with them, or "
            "name one with PIP_INDEX_URL in the template",
        )


if __name__ == "__main__":
    main(os.environ)
