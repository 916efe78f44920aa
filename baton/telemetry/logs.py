"""Log lines of every process, in one form: text for people, or one JSON object per line.

    {"timestamp": "2026-11-21T20:38:24.123456+00:00", "level": "WARNING", "logger": "router.serve.driver",
     "process": 7, "service": "baton-router", "message": "...", "trace_id": "4bf9...", "span_id": "00f0..."}

A line of text has no control characters but tabs, so untrusted content, such as a request's id, cannot add lines or
control a terminal. A traceback follows on indented lines.

`trace_id` and `span_id` belong to the request of a line, if it has a trace: the client's, or one that starts here when
traces are exported. `exception` is the traceback. A line is ASCII and ends where its object ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections import deque
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

from baton.visible import in_line, indented

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

_SUBJECT: ContextVar[SpanContext | None] = ContextVar("subject", default=None)
"""Request that this task works for; tasks that it starts inherit it."""
MAX_KEPT_LINES, MAX_KEPT_CHARACTERS = 400, 2000
"""Number of recent lines that a process keeps in memory, and the maximum length of each; longer ones are cut."""
TEXT_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"


def configure(level: str, log_format: str = "text", service: str = "baton") -> None:
    """Send log lines of `level` and above to standard error, and keep the latest for `latest_lines`.

    Args:
        log_format: text, or json; with json, warnings and uncaught exceptions become such lines, too.
        service: the kind of process, as in traces.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(service) if log_format == "json" else TextFormatter())
    kept = _LatestLines()
    kept.setFormatter(TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler, kept], force=True)
    if log_format == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
    for name in ("uvicorn", "httpx", "httpx2", "opentelemetry"):
        logging.getLogger(name).setLevel("WARNING")


def latest_lines() -> list[str]:
    """Return the latest log lines of this process as text, the oldest first; none before `configure`."""
    kept = (each for each in logging.getLogger().handlers if isinstance(each, _LatestLines))
    return [line for handler in kept for line in handler.lines]


def as_text(line: str) -> str:
    """Return a line of a process for people.

    A log line in JSON is converted to `TEXT_FORMAT`, with the traceback on further lines. Any other line stays
    unchanged.
    """
    try:
        entry = json.loads(line)
        text = in_line("{timestamp} {level} {process} {logger}: {message}".format_map(entry))
    except (ValueError, TypeError, KeyError):
        return line
    return "\n".join([text, *(indented(str(entry[name])) for name in ("exception", "stack") if name in entry)])


class _LatestLines(logging.Handler):
    """Handler that keeps the latest lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=MAX_KEPT_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):  # the handler that writes reports a record that cannot be formatted
            self.lines.append(self.format(record)[:MAX_KEPT_CHARACTERS])


def about(request: SpanContext) -> None:
    """Attribute the later log lines of this task, and of tasks that it starts, to the request."""
    _SUBJECT.set(request)


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__(TEXT_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class' name
        record.message = in_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the base class' name
        return indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 - the base class' name
        return indented(super().formatStack(stack_info))


class JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "service": self._service,
            "message": _message(record),
        }
        subject = _SUBJECT.get()
        if subject is not None and subject.is_valid:
            entry |= {"trace_id": f"{subject.trace_id:032x}", "span_id": f"{subject.span_id:016x}"}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = self.formatStack(record.stack_info)
        return json.dumps(entry)


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as error:  # a record may not match its format, or the write may fail
        return f"{record.msg!r} cannot be formatted: {type(error).__name__}"


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    logging.getLogger("baton").critical("the process ends", exc_info=(kind, error, traceback))
