"""What a fuzz target is: a parser, the errors that it may raise, and inputs that it accepts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

CPU_MS: Final = 10.0
"""For one input, of the thread that reads it."""
INPUT_BYTES_MAX: Final = 128 * 1024

Reader = Callable[[bytes], object]


class Form(StrEnum):
    """How the seeds are written, so that mutations can change values and not bytes alone."""

    BYTES = "bytes"
    JSON = "json"
    MSGPACK = "msgpack"
    YAML = "yaml"


@dataclass(frozen=True, slots=True)
class Target:
    """One parser of the product."""

    name: str
    start: Callable[[ExitStack, Path], Reader]
    """Makes the reader. What it opens is closed by the stack; the folder is its own."""
    errors: tuple[type[Exception], ...]
    """What the reader may raise; empty if it answers each input in some other way."""
    seeds: tuple[bytes, ...]
    """Inputs that the reader accepts."""
    form: Form = Form.BYTES
    prefix: bytes = b""
    """Stands before the value in each seed, such as a version byte."""
    words: tuple[bytes, ...] = ()
    """Pieces that mean something to this parser."""
    bytes_max: int = INPUT_BYTES_MAX
    cpu_ms: float = CPU_MS


def pure(read: Reader) -> Callable[[ExitStack, Path], Reader]:
    """Return the `start` of a reader that needs nothing around it."""
    return lambda _stack, _folder: read
