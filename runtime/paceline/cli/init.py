"""`paceline init`: writes the job file of a training script, and a Dockerfile for its image."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import yaml
from paceline_api.errors import EXIT_BAD_INPUT, PacelineError

from paceline.cli.options import (
    Fields,
    Gpus,
    Image,
    IsModule,
    Script,
    Words,
)
from paceline.cli.output import say
from paceline.cli.program import Program, UnrunnableScriptError
from paceline.cli.runtimes import RuntimeName, changes_of
from paceline.jobs.core.script_job import LAUNCH, default_image

DOCKERFILE: Final = Path("Dockerfile")
REQUIREMENTS: Final = Path("requirements.txt")
WIDTH: Final = 100


def init(
    file: Script,
    words: Words = None,
    is_module: IsModule = False,
    *,
    replicas: Annotated[int, typer.Option(help="Number of replicas.", min=1)] = 1,
    fields: Fields,
    gpus: Gpus = 0,
    image: Image = None,
    runtime: RuntimeName = None,
    to: Annotated[Path, typer.Option("--file", "-f", help="Where the job file is written.")] = Path(
        "job.yaml"
    ),
    dockerfile: Annotated[
        bool, typer.Option("--dockerfile", help="Write ./Dockerfile as well, for the image.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> int:
    """Write the job file of a script, for `paceline run`, `submit` and kubectl."""
    program = within_folder(Program.of(file, words, is_module=is_module))
    changes = [*changes_of(runtime), *fields.changes(program, replicas)]
    made = program.script_job(LAUNCH, image or ("" if runtime else default_image()), gpus)
    job = made.job(changes)
    if dockerfile and image is None:
        made = program.script_job(LAUNCH, f"{job.metadata.name}:1", gpus)
    texts = {to: job_text(made.changed(changes))}
    if dockerfile:
        texts[DOCKERFILE] = dockerfile_text(made.image, has_requirements=REQUIREMENTS.is_file())
    write(texts, force=force)
    trial = f"paceline run {to}" if runtime is None else f"paceline validate --cluster {to}"
    say(f"{to} is written: job {job.metadata.name}; try it with `{trial}`")
    if dockerfile:
        say(f"{DOCKERFILE} is written: docker build -t {made.image} .")
    elif image is None and runtime is None:
        say(f"hint: the image {made.image} has no script; name yours with --image", to_stderr=True)
    return 0


def within_folder(program: Program) -> Program:
    """Return the script with its path relative to this folder, as an image will have it.

    Args:
        program: A script or a module.

    Returns:
        The program.

    Raises:
        UnrunnableScriptError: It is a job file, or a script outside of this folder.
    """
    if not program.is_script:
        raise UnrunnableScriptError(
            f"{program.file} is a job file already", hint="name the script that it shall start"
        )
    if program.is_module:
        return program
    here = Path.cwd()
    path = Path(program.file).resolve()
    if not path.is_relative_to(here):
        raise UnrunnableScriptError(
            f"{program.file} is not below {here}, where the job file's paths begin",
            hint="go to the folder of the script first",
        )
    return Program(str(path.relative_to(here)), program.arguments)


def job_text(job: Mapping[str, Any]) -> str:
    """Return the text of a job file.

    Args:
        job: The job, as in YAML.

    Returns:
        The YAML text, with the commands that use it above.
    """
    body = yaml.safe_dump(
        dict(job), sort_keys=False, default_flow_style=None, allow_unicode=True, width=WIDTH
    )
    return (
        "# On this machine: paceline run job.yaml. In a cluster: paceline submit job.yaml, or\n"
        "# kubectl apply -f job.yaml. All fields: docs/reference/trainingjob.md of Paceline.\n"
    ) + body


def dockerfile_text(image: str, *, has_requirements: bool) -> str:
    """Return a Dockerfile for an image with Paceline and the files of this folder.

    Args:
        image: Name of the image.
        has_requirements: True if requirements.txt shall be installed.

    Returns:
        The text.
    """
    install = (
        f"COPY {REQUIREMENTS} .\nRUN pip install --no-cache-dir --requirement {REQUIREMENTS}\n"
        if has_requirements
        else ""
    )
    return (
        "# The image of this job: Paceline's worker, what the script imports, and this folder.\n"
        f"#   docker build -t {shlex.quote(image)} .\n"
        "# List in .dockerignore what the image does not need, such as data and runs/.\n"
        f"ARG WORKER={default_image()}\n"
        "FROM ${WORKER}\n"
        "USER root\n"
        f"{install}"
        "COPY . .\n"
        "USER 65532:65532\n"
    )


def write(texts: Mapping[Path, str], *, force: bool) -> None:
    """Write files, or none of them if one exists and may not be replaced.

    Args:
        texts: The files.
        force: Replace files that exist.

    Raises:
        PacelineError: A file exists, or cannot be written.
    """
    if not force and (existing := [str(path) for path in texts if path.exists()]):
        raise PacelineError(
            f"{' and '.join(existing)} exists already",
            hint="replace it with --force; --file names another job file",
            exit_code=EXIT_BAD_INPUT,
        )
    for path, text in texts.items():
        try:
            path.write_text(text)
        except OSError as error:
            raise PacelineError(
                f"{path} cannot be written: {(error.strerror or str(error)).lower()}",
                hint="write it into another folder with --file",
                exit_code=EXIT_BAD_INPUT,
            ) from None
