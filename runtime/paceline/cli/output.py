"""Printing of results: as text for people, or as data for programs."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import Any

import msgspec
import yaml
from paceline_api.errors import is_visible, printable_lines
from rich.console import Console


class Output(StrEnum):
    """Values of --output: data instead of a table, or a table with more columns."""

    JSON = "json"
    YAML = "yaml"
    WIDE = "wide"


class Format(StrEnum):
    """Values of --output of a verb that prints data, or text without a table."""

    JSON = "json"
    YAML = "yaml"


def console() -> Console:
    """Return a console that neither wraps nor interprets text as markup."""
    return Console(highlight=False, soft_wrap=True, markup=False, emoji=False)


def say(text: str, *, to_stderr: bool = False) -> None:
    """Print a line for people; escape what names, messages and paths of others may contain."""
    print(printable_lines(text), file=sys.stderr if to_stderr else sys.stdout, flush=to_stderr)


def is_printed_as_data(data: Any, output: Output | Format | None) -> bool:
    """Print an object if the user wants data; return False if it is to be printed for people.

    Args:
        data: An object that msgspec can encode.
        output: Value of --output; None without the option.

    Returns:
        True if it was printed.
    """
    if output is None or output is Output.WIDE:
        return False
    print_data(data, output)
    return True


def print_data(data: Any, output: Output | Format) -> None:
    """Print an object as one line of JSON or as one YAML document.

    Characters that a terminal would act on are escaped in the syntax of the format, so that a
    program reads the original text.

    Args:
        data: An object that msgspec can encode.
        output: JSON or YAML.
    """
    if output == Output.JSON:  # a Format is equal to it too
        try:
            text = msgspec.json.encode(data).decode()
        except UnicodeEncodeError:  # half of a surrogate pair, which msgspec rejects
            text = json.dumps(msgspec.to_builtins(data))
        print("".join(c if is_visible(c) else _in_json(c) for c in text), flush=True)
    else:
        plain = msgspec.to_builtins(data)
        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
        if printable_lines(text) != text:
            text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=False)
        print(f"---\n{text}", end="", flush=True)


def _in_json(char: str) -> str:
    escaped = json.dumps(char)[1:-1]
    return f"\\u{ord(char):04x}" if escaped == char else escaped
