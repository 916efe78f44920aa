"""A store read often: only what has changed since is copied."""

from __future__ import annotations

import contextlib

from tests.fakekube.store import Key, Missing, Object, Resource, Store


class View:
    """Always the newest. What it hands out is shared: to be read only."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: dict[Resource, dict[Key, Object]] = {}

    def objects(self, resource: Resource, namespace: str = "") -> list[Object]:
        """By name. An empty namespace means all of them."""
        old = self._seen.get(resource, {})
        new: dict[Key, Object] = {}
        for key, version in self._store.versions(resource).items():
            if key in old and old[key]["metadata"]["resourceVersion"] == version:
                new[key] = old[key]
            else:
                with contextlib.suppress(Missing):
                    new[key] = self._store.get(key)
        self._seen[resource] = new
        return [value for key, value in new.items() if namespace in ("", key.namespace)]
