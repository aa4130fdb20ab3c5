"""Definition of a fuzz target: a parser, the errors that it may raise, inputs that it accepts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

CPU_MS: Final = 10.0
"""CPU time that the reading thread may take for one input."""
INPUT_BYTES_MAX: Final = 128 * 1024

Reader = Callable[[bytes], object]


class Form(StrEnum):
    """Encoding of the seeds, which lets mutations change values as well as bytes."""

    BYTES = "bytes"
    JSON = "json"
    MSGPACK = "msgpack"
    YAML = "yaml"


@dataclass(frozen=True, slots=True)
class Target:
    """One parser of the product."""

    name: str
    start: Callable[[ExitStack, Path], Reader]
    """Maker of the reader. The stack closes what it opens; the folder is its own."""
    errors: tuple[type[Exception], ...]
    """Errors that the reader may raise; empty if it never raises."""
    seeds: tuple[bytes, ...]
    """Inputs that the reader accepts."""
    form: Form = Form.BYTES
    prefix: bytes = b""
    """Bytes before the value in each seed, such as a version byte."""
    words: tuple[bytes, ...] = ()
    """Byte strings that have a meaning for this parser."""
    bytes_max: int = INPUT_BYTES_MAX
    cpu_ms: float = CPU_MS


def pure(read: Reader) -> Callable[[ExitStack, Path], Reader]:
    """Return the `start` of a reader that needs no stack and no folder."""
    return lambda _stack, _folder: read
