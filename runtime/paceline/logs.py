"""Logging to stderr for Paceline's processes, without control characters for a terminal."""

from __future__ import annotations

import logging
import sys

from paceline_api.errors import printable_lines


class PrintableFormatter(logging.Formatter):
    """Formats a record, traceback included, and escapes control characters of ranks and peers."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted record with control characters escaped."""
        return printable_lines(super().format(record))


def log_to_stderr(prefix: str = "") -> None:
    """Send the log of this process to stderr.

    Args:
        prefix: Text in front of each message, such as `agent: `.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter(f"%(asctime)s %(levelname)s {prefix}%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
