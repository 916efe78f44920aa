"""Usage log for billing: one line of JSON for each answered request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError, StoreUnavailable
from baton.tasks import seen_through
from baton.telemetry.instruments import Instruments
from kvstore.leases import RecordKey
from router.timeline.usage_marks import MarkStore
from router.timeline.usage_record import MarkStep, UsageCall, UsageMark, UsageRecord, ended, is_due, placed

logger = logging.getLogger(__name__)
TIMEOUT_S = 1.0
"""Timeout for one change of a mark; after that the record is written without it."""
SWEEP_S = 2.0
"""Pause between two searches for due records, and between attempts to reach Redis while it is away."""


class UsageFile:
    """A file for appending lines. Each line is one write, so several routers can share the file.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._is_torn = False
        """True if the file ends within a line."""
        try:
            self._file = self._opened()
        except OSError as error:
            raise ConfigError(f"router.usage_log: cannot write {path}: {error}") from error

    def append(self, lines: Sequence[str]) -> None:
        """Append lines; if the file was moved, to a new file.

        Raises:
            OSError: not all lines could be written.
        """
        if self._is_moved():
            opened = self._opened()
            os.close(self._file)
            self._file, self._is_torn = opened, False
        for line in lines:
            data = ("\n" if self._is_torn else "").encode() + line.encode() + b"\n"
            num_written = os.write(self._file, data)
            if num_written != len(data):
                self._is_torn = True
                raise OSError(f"{num_written} of {len(data)} bytes of a line were written")
            self._is_torn = False

    def close(self) -> None:
        os.close(self._file)

    def _opened(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

    def _is_moved(self) -> bool:
        try:
            there, ours = Path(self._path).stat(), os.fstat(self._file)
        except FileNotFoundError:
            return True
        return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)


@dataclass(frozen=True, slots=True)
class _UsageEvent:
    """First token or end of a call."""

    key: RecordKey
    call: UsageCall
    record: UsageRecord | None
    """The usage of a call that has ended; None: the call has its first token."""


class UsageBook:
    """Usage records of one router, which `run` writes in the background. Owns file and marks: `close` closes them.

    Args:
        file: None: no records are kept.
        num_routers: returns the number of routers that are known to be alive.
    """

    def __init__(
        self,
        file: UsageFile | None,
        marks: MarkStore,
        instruments: Instruments,
        num_routers: Callable[[], int] = lambda: 1,
    ) -> None:
        self._file = file
        self._marks = marks
        self._instruments = instruments
        self._num_routers = num_routers
        self._events: deque[_UsageEvent] = deque()
        self._has_events = asyncio.Event()
        self._held: set[RecordKey] = set()
        """Requests whose records this router has left in the marks until they are due."""
        self._away_until_s = 0.0
        self._is_away = self._is_failing = False
        """True if the log already reports that the marks, or the file, are unavailable."""

    @property
    def is_kept(self) -> bool:
        """True if usage is logged."""
        return self._file is not None

    def placed(self, key: RecordKey, digest: bytes, is_resumption: bool) -> UsageCall:
        """Record that a call has its first token."""
        call = UsageCall(secrets.token_hex(8), digest.hex(), is_resumption)
        self._note(_UsageEvent(key, call, None))
        return call

    def ended(self, key: RecordKey, call: UsageCall, record: UsageRecord) -> None:
        """Record that a call has ended, with its usage."""
        self._note(_UsageEvent(key, call, record))

    async def run(self) -> None:
        """Write records until cancelled."""
        while self._file is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_S):
                    await self._has_events.wait()
            self._has_events.clear()
            await self.flush()
            await self.sweep()

    async def flush(self) -> None:
        """Write the records of all events so far."""
        while self._events:  # each event is handled exactly once and completely, even if this is cancelled
            writing = asyncio.ensure_future(self._handle(self._events.popleft()))
            await seen_through(writing)
            writing.result()

    async def close(self) -> None:
        """Write the remaining records and, if no other router is alive, the held ones as well."""
        await self.flush()
        if self._num_routers() <= 1:
            for key in list(self._held):
                await self._write(await self._step(key, is_due))
        await self._marks.close()
        if self._file is not None:
            self._file.close()

    def _note(self, event: _UsageEvent) -> None:
        if self._file is not None:
            self._events.append(event)
            self._has_events.set()

    async def _handle(self, event: _UsageEvent) -> None:
        await self._write(await self._record_of(event))

    async def _record_of(self, event: _UsageEvent) -> UsageRecord | None:
        """Return the record to write after an event; None: none."""
        call, record = event.call, event.record
        try:
            if record is None:
                self._held.discard(event.key)
                return await self._changed(event.key, lambda mark: placed(mark, call))
            if record.status != "ok":
                self._held.add(event.key)
            return await self._changed(event.key, lambda mark: ended(mark, call, record))
        except StoreUnavailable:
            return record

    async def _step(self, key: RecordKey, change: Callable[[UsageMark | None], MarkStep]) -> UsageRecord | None:
        try:
            return await self._changed(key, change)
        except StoreUnavailable:
            return None

    async def _changed(self, key: RecordKey, change: Callable[[UsageMark | None], MarkStep]) -> UsageRecord | None:
        """Change a mark, and return the record to write as a result; None: none.

        Raises:
            StoreUnavailable: the store cannot be reached, or could not be reached within the last SWEEP_S seconds.
        """
        if time.monotonic() < self._away_until_s:
            raise StoreUnavailable("Redis was away a moment ago")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    found = await self._marks.get(key)
                    step = change(found.mark)
                    if step.mark is None or await self._marks.swap(key, found, step.mark):
                        return step.record
        except (StoreUnavailable, TimeoutError) as error:
            if not self._is_away:
                logger.warning("usage records are written without asking other routers: %s", str(error) or "no answer")
            self._is_away, self._away_until_s = True, time.monotonic() + SWEEP_S
            raise StoreUnavailable(str(error)) from error

    async def sweep(self) -> None:
        """Write the due records of all routers."""
        if time.monotonic() < self._away_until_s:
            return
        try:
            async with asyncio.timeout(TIMEOUT_S):
                due = await self._marks.due()
        except (StoreUnavailable, TimeoutError):
            return
        if self._is_away:
            logger.info("usage records are agreed on with other routers again")
        self._is_away = False
        for key in due:
            self._held.discard(key)
            if (record := await self._step(key, is_due)) is not None:
                await self._write(record)
            else:
                await self._forget_due(key)

    async def _forget_due(self, key: RecordKey) -> None:
        with contextlib.suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                await self._marks.forget_due(key)

    async def _write(self, record: UsageRecord | None) -> None:
        if record is None or self._file is None:
            return
        try:
            await asyncio.to_thread(self._file.append, [record.line()])
        except OSError as error:
            if not self._is_failing:
                logger.error("usage records cannot be written and are lost until this is fixed: %s", error)
            self._is_failing = True
            self._instruments.usage_records.add(1, {"outcome": "failed"})
        else:
            self._is_failing = False
            self._instruments.usage_records.add(1, {"outcome": "written"})
