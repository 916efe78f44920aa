"""The objects of the test cluster, with versions and watches. Thread-safe; everything that goes in or out is a copy."""

from __future__ import annotations

import copy
import itertools
import queue
import threading
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

Object = dict[str, Any]


class Resource(NamedTuple):
    """A kind of object: `Resource("apps", "deployments")`. The group of the core is empty. Versions are not told apart:
    every resource has one."""

    group: str
    plural: str


class Key(NamedTuple):
    resource: Resource
    namespace: str
    """Empty: the resource is the cluster's."""
    name: str


@dataclass(frozen=True, slots=True)
class Event:
    type: str
    """ADDED, MODIFIED or DELETED."""
    key: Key
    object: Object
    previous: Object = field(default_factory=dict)
    """What it was before. Empty: there was none."""


class Missing(Exception):
    """No such object."""


class Exists(Exception):
    """There is one of that name already."""


class Stale(Exception):
    """`metadata.resourceVersion` is not the current one: somebody else was faster."""


class Gone(Exception):
    """Changes since that version are no longer remembered."""


HISTORY = 10_000


class Store:
    def __init__(self, history: int = HISTORY) -> None:
        """`history` changes are remembered for watches which begin at a version."""
        self._history: deque[Event] = deque(maxlen=history)
        self._objects: dict[Key, Object] = {}
        self._lock = threading.RLock()
        self._versions = itertools.count(1)
        self._version = 0
        self._watches: list[tuple[queue.Queue[Event], Callable[[Key], bool]]] = []

    @property
    def version(self) -> str:
        """The newest resourceVersion."""
        return str(self._version)

    def get(self, key: Key) -> Object:
        """Raises Missing."""
        with self._lock:
            if key not in self._objects:
                raise Missing(f"{key.resource.plural} {key.name!r} not found")
            return copy.deepcopy(self._objects[key])

    def objects(self, resource: Resource, namespace: str = "") -> list[Object]:
        """By name. An empty namespace means all of them."""
        with self._lock:
            found = [k for k in self._objects if k.resource == resource and namespace in ("", k.namespace)]
            return [copy.deepcopy(self._objects[key]) for key in sorted(found)]

    def keys(self) -> list[Key]:
        with self._lock:
            return sorted(self._objects)

    def versions(self, resource: Resource) -> dict[Key, str]:
        """The resourceVersion of each object."""
        with self._lock:
            found = {key: value for key, value in self._objects.items() if key.resource == resource}
            return {key: found[key]["metadata"]["resourceVersion"] for key in sorted(found)}

    def has_uid(self, uid: str) -> bool:
        with self._lock:
            return any(value["metadata"]["uid"] == uid for value in self._objects.values())

    def dependents(self, uid: str) -> list[Key]:
        """The objects whose ownerReferences name this one."""
        with self._lock:
            return sorted(key for key, value in self._objects.items() if uid in owners(value))

    def scratch(self, key: Key) -> Store:
        """A store with this object alone, for a request that is not to be carried out."""
        copied = Store()
        with self._lock:
            if key in self._objects:
                copied._objects[key] = copy.deepcopy(self._objects[key])
            copied._versions = itertools.count(self._version + 1)
        return copied

    def create(self, key: Key, value: Object) -> Object:
        """Fills in uid, creationTimestamp, generation and resourceVersion. Raises Exists."""
        with self._lock:
            if key in self._objects:
                raise Exists(f"{key.resource.plural} {key.name!r} already exists")
            stored = copy.deepcopy(value)
            metadata = stored.setdefault("metadata", {})
            metadata["name"] = key.name
            if key.namespace:
                metadata["namespace"] = key.namespace
            metadata["uid"] = str(uuid.uuid4())
            metadata["creationTimestamp"] = now()
            metadata["generation"] = 1
            return self._put("ADDED", key, stored)

    def update(self, key: Key, value: Object) -> Object:
        """Replaces an object. Its generation rises when anything but `metadata` and `status` has changed.

        An object with a deletionTimestamp, no finalizers left and no grace period is removed.

        Raises:
            Missing; Stale: the value has a resourceVersion, and not the current one.
        """
        with self._lock:
            old = self._objects.get(key)
            if old is None:
                raise Missing(f"{key.resource.plural} {key.name!r} not found")
            stored = copy.deepcopy(value)
            metadata = stored.setdefault("metadata", {})
            current = old["metadata"]["resourceVersion"]
            if metadata.get("resourceVersion", current) != current:
                raise Stale(f"the object has been modified: {key.resource.plural} {key.name!r}")
            kept = ("uid", "creationTimestamp", "generation", "deletionTimestamp", "deletionGracePeriodSeconds")
            metadata |= {name: old["metadata"][name] for name in kept if name in old["metadata"]}
            metadata |= {name: old["metadata"][name] for name in ("name", "namespace") if name in old["metadata"]}
            metadata["resourceVersion"] = current
            if stored == old:
                return copy.deepcopy(old)  # no new version
            if _without_status(stored) != _without_status(old):
                metadata["generation"] = old["metadata"]["generation"] + 1
            if (
                metadata.get("deletionTimestamp")
                and not metadata.get("finalizers")
                and not metadata.get("deletionGracePeriodSeconds")
            ):
                del self._objects[key]
                self._emit(Event("DELETED", key, copy.deepcopy(self._versioned(stored)), old))
                return stored
            return self._put("MODIFIED", key, stored)

    def modify(self, key: Key, change: Callable[[Object], None]) -> Object:
        """`change` edits the newest version in place; nobody comes in between. Raises Missing."""
        with self._lock:
            value = self.get(key)
            change(value)
            return self.update(key, value)

    def delete(self, key: Key, grace_s: float | None = None) -> Object:
        """Removes an object, or marks it where finalizers or a grace period keep it.

        Args:
            grace_s: more than 0: the object stays, with deletionTimestamp and deletionGracePeriodSeconds, until
                somebody deletes it with 0 (a kubelet, when a pod's processes have ended).

        Raises:
            Missing.
        """
        with self._lock:
            value = self.get(key)
            metadata = value["metadata"]
            if not grace_s and not metadata.get("finalizers"):
                old = self._objects.pop(key)
                self._emit(Event("DELETED", key, copy.deepcopy(self._versioned(value)), old))
                return value
            if "deletionTimestamp" in metadata:
                return value
            metadata["deletionTimestamp"] = now()
            metadata["deletionGracePeriodSeconds"] = int(grace_s or 0)
            return self._put("MODIFIED", key, value)

    @contextmanager
    def watch(self, wants: Callable[[Key], bool] = lambda key: True) -> Generator[Iterator[Event]]:
        """What is there, as ADDED, then every change from entering on. The iterator blocks while there is none, and
        ends with `close_watches`."""
        with self.changes(wants) as changes:
            yield (event for event in iter(changes.get, CLOSED))

    @contextmanager
    def changes(
        self, wants: Callable[[Key], bool] = lambda key: True, since: str = ""
    ) -> Generator[queue.Queue[Event]]:
        """As `watch`, as a queue: CLOSED is its last.

        Args:
            since: a resourceVersion: what changed after it, instead of what is there.

        Raises:
            Gone.
        """
        with self._lock:
            changes: queue.Queue[Event] = queue.Queue()
            for event in self._since(int(since)) if since else self._present():
                if wants(event.key):
                    changes.put(copy.deepcopy(event))
            watching = (changes, wants)
            self._watches.append(watching)
        try:
            yield changes
        finally:
            with self._lock:
                self._watches.remove(watching)

    def close_watches(self) -> None:
        """Every watch ends, as if its server went away."""
        with self._lock:
            for changes, _ in self._watches:
                changes.put(CLOSED)

    def _present(self) -> Iterator[Event]:
        return (Event("ADDED", key, self._objects[key]) for key in sorted(self._objects))

    def _since(self, version: int) -> Iterator[Event]:
        """Raises Gone."""
        if len(self._history) == self._history.maxlen and version < version_of(self._history[0].object) - 1:
            raise Gone(f"too old resource version: {version}")
        return (event for event in self._history if version_of(event.object) > version)

    def _put(self, kind: str, key: Key, value: Object) -> Object:
        old = self._objects.get(key, {})
        self._objects[key] = self._versioned(value)
        self._emit(Event(kind, key, copy.deepcopy(value), old))
        return copy.deepcopy(value)

    def _versioned(self, value: Object) -> Object:
        self._version = next(self._versions)
        value["metadata"]["resourceVersion"] = str(self._version)
        return value

    def _emit(self, event: Event) -> None:
        self._history.append(event)
        for changes, wants in self._watches:
            if wants(event.key):
                changes.put(copy.deepcopy(event))


CLOSED = Event("CLOSED", Key(Resource("", ""), "", ""), {})


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def owners(value: Object) -> list[str]:
    """The uids in its ownerReferences."""
    return [reference["uid"] for reference in value["metadata"].get("ownerReferences") or ()]


def version_of(value: Object) -> int:
    return int(value["metadata"]["resourceVersion"])


def _without_status(value: Object) -> Object:
    return {name: part for name, part in value.items() if name not in ("metadata", "status")}
