"""Answers that go on: watches, and logs that are followed. An empty piece comes while there is nothing to say."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.fakekube.kinds import Kind
from tests.fakekube.messages import Request, Target
from tests.fakekube.status import Refused
from tests.fakekube.store import CLOSED, Event, Gone, Key, Missing, Object, Store, version_of

WATCH_S = 1800.0
LOOK_S = 0.5
"""How often a quiet stream looks whether its client is still there."""


def events(
    store: Store,
    target: Target,
    request: Request,
    wanted: Callable[[Object], bool],
    shown: Callable[[Object], Object],
) -> Iterator[bytes]:
    """A watch: lines of JSON, until its time is over or the store closes its watches."""
    ends = time.monotonic() + float(request.query.get("timeoutSeconds") or WATCH_S)
    initial = request.flag("sendInitialEvents")
    since = request.query.get("resourceVersion", "")
    since = "" if initial or since == "0" else since

    def concerns(key: Key) -> bool:
        return key.resource == target.kind.resource and target.namespace in ("", key.namespace)

    version = int(store.version)
    try:
        with store.changes(concerns, since) as changes:
            left = changes.qsize()
            while (wait_s := ends - time.monotonic()) > 0:
                if initial and left <= 0:
                    yield _line("BOOKMARK", _bookmark(target.kind, version))
                    initial = False
                try:
                    event = changes.get(timeout=min(wait_s, LOOK_S))
                except queue.Empty:
                    yield b""
                    continue
                if event is CLOSED:
                    return
                left -= 1
                version = max(version, version_of(event.object))
                if kind := _seen_as(event, wanted):
                    yield _line(kind, shown(event.object))
    except Gone as gone:
        yield _line("ERROR", Refused(410, "Expired", str(gone)).status())


def log_lines(store: Store, key: Key, container: str, path: Path, request: Request) -> Iterator[bytes]:
    """What a container has written; when it is followed, until the container ends."""
    with path.open("rb") as log:
        text = log.read()
        if "tailLines" in request.query:
            lines = text.splitlines(keepends=True)
            text = b"".join(lines[max(len(lines) - int(request.query["tailLines"]), 0) :])
        yield text
        while request.flag("follow"):
            ended = _has_ended(store, key, container)
            yield log.read()
            if ended:
                return
            time.sleep(LOOK_S / 2)


def _has_ended(store: Store, key: Key, container: str) -> bool:
    try:
        statuses = store.get(key).get("status", {}).get("containerStatuses") or ()
    except Missing:
        return True
    return any("terminated" in (one.get("state") or {}) for one in statuses if one["name"] == container)


def _seen_as(event: Event, wanted: Callable[[Object], bool]) -> str:
    """An object that comes to match a watch's selectors is added for it, and one that ceases to, deleted."""
    before = bool(event.previous) and wanted(event.previous)
    after = event.type != "DELETED" and wanted(event.object)
    return {(False, True): "ADDED", (True, True): "MODIFIED", (True, False): "DELETED"}.get((before, after), "")


def _bookmark(kind: Kind, version: int) -> Object:
    metadata = {"resourceVersion": str(version), "annotations": {"k8s.io/initial-events-end": "true"}}
    return {"kind": kind.name, "apiVersion": kind.api_version, "metadata": metadata}


def _line(kind: str, value: Object) -> bytes:
    return json.dumps({"type": kind, "object": value}).encode() + b"\n"
