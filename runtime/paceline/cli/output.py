"""How an answer is printed: for people, or as data for programs."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec
import yaml
from rich.console import Console


class Output(StrEnum):
    """Instead of a table: data, or a table with more columns."""

    JSON = "json"
    YAML = "yaml"
    WIDE = "wide"

    @property
    def is_data(self) -> bool:
        return self is not Output.WIDE


def console() -> Console:
    return Console(highlight=False, soft_wrap=True)


def print_data(found: Any, output: Output) -> None:
    """One JSON document a line, or a YAML document."""
    if output is Output.JSON:
        print(msgspec.json.encode(found).decode(), flush=True)
    else:
        text = yaml.safe_dump(msgspec.to_builtins(found), sort_keys=False, allow_unicode=True)
        print(f"---\n{text}", end="", flush=True)
