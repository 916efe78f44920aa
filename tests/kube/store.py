"""The objects of the test cluster, with versions and watches. Thread-safe; everything that goes in or out is a copy."""

from __future__ import annotations

import copy
import itertools
import queue
import threading
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


class Missing(Exception):
    """No such object."""


class Exists(Exception):
    """There is one of that name already."""


class Stale(Exception):
    """`metadata.resourceVersion` is not the current one: somebody else was faster."""


class Store:
    def __init__(self) -> None:
        self._objects: dict[Key, Object] = {}
        self._lock = threading.RLock()
        self._versions = itertools.count(1)
        self._version = 0
        self._watches: list[queue.Queue[Event]] = []

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

        An object with a deletionTimestamp and no finalizers left is removed.

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
            if metadata.get("deletionTimestamp") and not metadata.get("finalizers"):
                del self._objects[key]
                self._emit(Event("DELETED", key, self._versioned(stored)))
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
                del self._objects[key]
                self._emit(Event("DELETED", key, self._versioned(value)))
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
        with self._lock:
            changes: queue.Queue[Event] = queue.Queue()
            for key in sorted(self._objects):
                if wants(key):
                    changes.put(Event("ADDED", key, copy.deepcopy(self._objects[key])))
            self._watches.append(changes)
        try:
            yield (event for event in iter(changes.get, CLOSED) if wants(event.key))
        finally:
            with self._lock:
                self._watches.remove(changes)

    def close_watches(self) -> None:
        """Every watch ends, as if its server went away."""
        with self._lock:
            for changes in self._watches:
                changes.put(CLOSED)

    def _put(self, kind: str, key: Key, value: Object) -> Object:
        self._objects[key] = self._versioned(value)
        self._emit(Event(kind, key, copy.deepcopy(value)))
        return copy.deepcopy(value)

    def _versioned(self, value: Object) -> Object:
        self._version = next(self._versions)
        value["metadata"]["resourceVersion"] = str(self._version)
        return value

    def _emit(self, event: Event) -> None:
        for changes in self._watches:
            changes.put(copy.deepcopy(event))


CLOSED = Event("CLOSED", Key(Resource("", ""), "", ""), {})


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _without_status(value: Object) -> Object:
    return {name: part for name, part in value.items() if name not in ("metadata", "status")}
