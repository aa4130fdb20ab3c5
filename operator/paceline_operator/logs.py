"""Structured logs: one JSON object per line, with the job's name in lines about a job."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import msgspec
from paceline_api.errors import printable_lines


class JsonFormatter(logging.Formatter):
    """Formatter of log records as one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without control characters that a foreign text may contain."""
        line = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        if job := getattr(record, "job", ""):
            line["job"] = str(job)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode({k: printable_lines(v) for k, v in line.items()}).decode()


class TextFormatter(logging.Formatter):
    """Formatter of log records as text, with the job's name at the end."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without control characters that a foreign text may contain."""
        text = super().format(record)
        job = getattr(record, "job", "")
        return printable_lines(f"{text} [{job}]" if job else text)


def set_up(form: str, level: str) -> None:
    """Send all logs to stderr; `form` is json or text."""
    handler = logging.StreamHandler(sys.stderr)
    text = "%(asctime)s %(levelname)s %(name)s %(message)s"
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter(text))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
