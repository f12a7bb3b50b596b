"""Logging of the command line: one handler on stderr, as text or as one JSON object a line.

A record's values are given as `extra={"fields": {...}}` and printed as key=value, or as JSON members.
"""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ..config import LogConfig


def configure_logging(config: LogConfig) -> None:
    """Send the records of headrace's loggers to stderr, and other libraries' warnings too. May be called again."""
    handler = _StderrHandler()
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _StderrHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("headrace").setLevel(config.log_level.upper())


class TextFormatter(logging.Formatter):
    """`12:30:59 message key=value`; warnings and errors say so, debug records name their module."""

    def format(self, record: logging.LogRecord) -> str:
        """One record as a line (and a traceback, if it has one)."""
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        module = f"[{record.name}] " if record.levelno == logging.DEBUG else ""
        fields = "".join(f" {key}={_quoted(value)}" for key, value in _fields(record).items())
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{time} {level}{module}{record.getMessage()}{fields}{trace}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, and the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """One record as a JSON object."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class _StderrHandler(logging.Handler):
    """Writes to whatever sys.stderr is now; a closed pipe is no reason to fail."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except OSError:
            return


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return fields


def _quoted(value: object) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c in text for c in ' "=\n') else text
