"""The book of what could not be read: counted always, logged once, shown on a line, and of a bounded size."""

from __future__ import annotations

import pytest

from baton.cluster import StoreGarbage
from kvstore.index import GarbageBook
from kvstore.index.garbage import MAX_CHARACTERS, MAX_LOGGED


def test_each_value_is_logged_once_and_counted_every_time(caplog: pytest.LogCaptureFixture) -> None:
    book = GarbageBook()
    for reason in ("first", "second"):
        book.note("lease", "k:a", reason)
    book.note("lease", "k:b", "third")
    book.note("event", "k:a", "fourth")
    assert book.seen() == (StoreGarbage("event", 1, "k:a: fourth"), StoreGarbage("lease", 3, "k:b: third"))
    assert [record.getMessage().rpartition(" ")[2] for record in caplog.records] == ["first", "third", "fourth"]


def test_whoever_writes_there_writes_no_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    book = GarbageBook()
    book.note("lease", "k\nERROR all is lost", "x" * 10_000 + "\x1b[31m")
    (seen,) = book.seen()
    assert seen.latest.isprintable()
    assert len(seen.latest) < 2 * MAX_CHARACTERS + 20
    assert "\n" not in caplog.text.strip()


def test_a_million_keys_are_no_million_lines(caplog: pytest.LogCaptureFixture) -> None:
    book = GarbageBook()
    for number in range(2 * MAX_LOGGED):
        book.note("record", f"k:{number}", "x")
    assert book.seen()[0].times == 2 * MAX_LOGGED
    assert len(caplog.records) == MAX_LOGGED
    assert "not logged" in caplog.records[-1].getMessage()
    book.note("lease", "k:a", "x")
    assert len(caplog.records) == MAX_LOGGED + 1, "of each kind so many"
