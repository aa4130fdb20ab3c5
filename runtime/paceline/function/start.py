"""Starts the function of a job in one rank: `python -m paceline.function.start`.

Its files lie in the folder `function` of the run folder. Packages that it wants are installed once
for all ranks of that folder, into an environment on top of the one that runs this: what is there
already stays and is not installed again. Then this process becomes the program.
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
"""Of the run folder: the environment with the packages."""
DONE: Final = "installed"
SAID_LINES: Final = 5
INSTALL_S: Final = 1800.0


def main(env: Mapping[str, str]) -> None:
    """Becomes the program, or ends with one sentence."""
    try:
        os.execv(*command(Path(env.get(ENV_RUN_DIR, "."))))
    except FunctionError as error:
        sys.exit(error.render())


def command(run_dir: Path) -> tuple[str, list[str]]:
    """The interpreter, and how it is called. Raises FunctionError."""
    folder = run_dir / FOLDER
    description = read(folder)
    python = sys.executable
    if description.packages:
        python = str(install(run_dir, description.packages))
    return python, [python, str(folder / PROGRAM)]


def read(folder: Path) -> Description:
    """Return what is said of the function in this folder, whose program this Python can read.

    Raises:
        FunctionError: It is none, or another Python's.
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
    """Raises FunctionError where this Python cannot read what another one wrote."""
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
    """The interpreter of an environment with the packages; made by the first rank that comes, and
    waited for by the others. Raises FunctionError."""
    folder = run_dir / ENVIRONMENT
    python = folder / "bin" / "python"
    with private_umask(), open(append(run_dir / f"{ENVIRONMENT}.lock"), "w") as lock:  # noqa: PTH123
        fcntl.flock(lock, fcntl.LOCK_EX)  # its end, or that of its process, lets the next one in
        if not (folder / DONE).exists():
            _make(folder)
            _pip(python, packages)
            (folder / DONE).touch()
    return python


def _make(folder: Path) -> None:
    """An environment that sees what this interpreter sees, whether that is in one itself or not."""
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
        said = " / ".join(line for line in done.stdout.splitlines()[-SAID_LINES:] if line.strip())
        raise FunctionError(
            f"pip could not install {', '.join(packages)}: {said}",
            hint="correct packages=[...]; where pods reach no index, use an image with them, or "
            "name one with PIP_INDEX_URL in the template",
        )


if __name__ == "__main__":
    main(os.environ)
