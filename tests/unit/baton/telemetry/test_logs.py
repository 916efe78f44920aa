"""A log line of JSON is one object on one line, whatever was logged."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext

from baton.telemetry import logs

REQUEST = SpanContext(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, is_remote=False)


class Unwritable:
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonFormatter("baton-router"))
    logger = logging.getLogger("router.test")
    logger.addHandler(handler)
    logger.setLevel("DEBUG")
    yield stream
    logger.removeHandler(handler)


def entries(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_the_fields_of_a_line(written: io.StringIO) -> None:
    logging.getLogger("router.test").warning("%s is placed again after %d tokens", "r/0/1", 7)
    (entry,) = entries(written)
    assert datetime.fromisoformat(entry.pop("timestamp")).utcoffset() is not None
    assert entry.pop("process") > 0
    assert entry == {
        "level": "WARNING",
        "logger": "router.test",
        "service": "baton-router",
        "message": "r/0/1 is placed again after 7 tokens",
    }


def test_no_message_breaks_a_line(written: io.StringIO) -> None:
    logger = logging.getLogger("router.test")
    texts = ["two\nlines\r\n", '"quoted" \\', "\u2028 \x00 \x1b", "ünï"]
    for text in texts:
        logger.info("%s", text)
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        logger.exception("it failed", stack_info=True)
    assert written.getvalue().isascii()
    found = entries(written)
    assert [entry["message"] for entry in found[: len(texts)]] == texts
    assert found[-1]["exception"].startswith("Traceback")
    assert found[-1]["exception"].endswith("ValueError: first\nsecond")
    assert "test_logs.py" in found[-1]["stack"]
    # Not through a logger: pytest keeps what it sees, and cannot hand such a text from process to process.
    lone = logging.makeLogRecord({"msg": "\udcff lone", "levelno": logging.INFO})
    line = logs.JsonFormatter("baton").format(lone)
    assert line.isascii()
    assert json.loads(line)["message"] == "\udcff lone"


@pytest.mark.parametrize(
    ("text", "value", "sentence"),
    [
        ("%d", "no number", "'%d' cannot be formatted: TypeError"),
        ("%s", Unwritable(), "'%s' cannot be formatted: RuntimeError"),
    ],
)
def test_a_message_that_does_not_fit_its_format_is_a_line_too(text: str, value: object, sentence: str) -> None:
    """Formatted here: pytest's own handlers fail on it."""
    record = logging.getLogger("router.test").makeRecord("router.test", 20, "file", 1, text, (value,), None)
    assert json.loads(logs.JsonFormatter("baton-router").format(record))["message"] == sentence


async def test_a_line_names_the_request_that_its_task_works_for(written: io.StringIO) -> None:
    logger = logging.getLogger("router.test")

    async def child() -> None:
        logger.info("of a task that it started")

    async def serve() -> None:
        logs.about(REQUEST)
        logger.info("its own")
        await asyncio.create_task(child())

    await asyncio.create_task(serve())
    logger.info("nobody's")
    logs.about(INVALID_SPAN_CONTEXT)
    logger.info("without a trace")
    ids = [(entry.get("trace_id"), entry.get("span_id")) for entry in entries(written)]
    named = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    assert ids == [named, named, (None, None), (None, None)]


def test_a_process_that_fails_says_so_in_such_a_line() -> None:
    code = """
import warnings
from baton.telemetry import logs
logs.configure("info", "json", "baton-worker")
warnings.warn("beware")
raise RuntimeError("a\\nb")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    warned, failed = (json.loads(line) for line in done.stderr.splitlines())
    assert (warned["logger"], warned["level"]) == ("py.warnings", "WARNING")
    assert (failed["level"], failed["service"]) == ("CRITICAL", "baton-worker")
    assert "RuntimeError: a\nb" in failed["exception"]


LATEST = """
import logging
from baton.telemetry import logs
assert logs.latest_lines() == []
logs.configure("info", "json")
logging.raiseExceptions = False
for number in range(410):
    logging.getLogger("worker").info("line %d", number)
logging.getLogger("worker").debug("not of this level")
logging.getLogger("worker").info("%d", "no number")
logging.getLogger("worker").info("x" * 5000)
for line in logs.latest_lines():
    print(line[-2000:])
"""


def test_the_latest_lines_are_kept_as_text() -> None:
    done = subprocess.run([sys.executable, "-c", LATEST], capture_output=True, text=True, check=True, timeout=60)
    lines = done.stdout.splitlines()
    assert len(lines) == logs.MAX_KEPT_LINES
    assert lines[0].endswith("worker: line 11")
    assert lines[-2].endswith("worker: line 409")
    assert lines[-1].endswith("xxx")
    assert len(lines[-1]) == logs.MAX_KEPT_CHARACTERS
    assert len([json.loads(line) for line in done.stderr.splitlines()]) == 412, "what is written is JSON all the same"
