"""`paceline checkpoint`: what can be done with checkpoints besides training on from them."""

from __future__ import annotations

import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class WeightsFormat(StrEnum):
    """A kind of file with weights."""

    SAFETENSORS = "safetensors"
    STATE_DICT = "state-dict"
    TRANSFORMERS = "transformers"
    DCP = "dcp"


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="Folder of a job's checkpoints or one version of it, a .safetensors file, a file "
            "of torch.save, a folder of transformers or of torch.distributed.checkpoint."
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            help="File or folder to write: weights and buffers, not the optimizer's state."
        ),
    ],
    to: Annotated[
        WeightsFormat | None,
        typer.Option(help="Kind to write. Default: by the suffix, .safetensors or .pt."),
    ] = None,
    trust_pickle: Annotated[
        bool,
        typer.Option(
            "--trust-pickle",
            help="Read a folder of torch.distributed.checkpoint, whose metadata is a program.",
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a target that exists.")] = False,
) -> int:
    """Convert the weights of a checkpoint for other programs, or theirs for a script."""
    # The command line itself works without torch.
    words = [sys.executable, "-m", "paceline.worker.checkpoint.convert", str(source), str(target)]
    words += ["--to", to] if to is not None else []
    words += ["--trust-pickle"] if trust_pickle else []
    words += ["--force"] if force else []
    return subprocess.run(words, check=False, stdin=subprocess.DEVNULL).returncode
