"""The log of a process of Paceline: lines on stderr, in which nothing is obeyed by a terminal."""

from __future__ import annotations

import logging
import sys

from paceline_api.errors import printable_lines


class PrintableFormatter(logging.Formatter):
    """Formats a record, traceback included, with what ranks and peers say written out."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


def log_to_stderr(prefix: str = "") -> None:
    """Send the log of this process to stderr. `prefix`: of each message, such as `agent: `."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter(f"%(asctime)s %(levelname)s {prefix}%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
