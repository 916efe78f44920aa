"""Deletion, and what follows from it: dependents, what is in a namespace, the objects of a CRD."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager

from tests.fakekube.kinds import CRDS, NAMESPACES, PODS
from tests.fakekube.store import Event, Key, Missing, Object, Resource, Store, owners

FOREGROUND = "foregroundDeletion"
EMPTYING = "kubernetes"
"""The finalizer of a namespace that is not empty yet."""
DEFAULT_GRACE_S = 30.0


def delete(store: Store, key: Key, propagation: str = "Background", grace_s: float | None = None) -> Object:
    """Deletes one object as a client asks for it.

    Args:
        propagation: Background, Foreground or Orphan.
        grace_s: of a pod. None: its own. A pod that runs nowhere has none.

    Raises:
        Missing.
    """
    if propagation == "Orphan":
        _orphan(store, key)
    elif propagation == "Foreground" and store.dependents(store.get(key)["metadata"]["uid"]):
        store.modify(key, lambda value: _add_finalizer(value, FOREGROUND))
    if key.resource == NAMESPACES:
        store.modify(key, _close)
    return store.delete(key, _grace_s(store.get(key), grace_s) if key.resource == PODS else None)


@contextmanager
def garbage_collector(store: Store) -> Generator[None]:
    """Runs one in a thread of its own until leaving. The store's watches must be closed by then."""
    with store.watch() as events:
        thread = threading.Thread(target=_collect, args=(store, events), name="garbage collector")
        thread.start()
        try:
            yield
        finally:
            thread.join()


def _collect(store: Store, events: Iterator[Event]) -> None:
    for event in events:
        _follow(store, event)


def _follow(store: Store, event: Event) -> None:
    metadata = event.object["metadata"]
    if event.type == "DELETED":
        for key in store.dependents(metadata["uid"]):
            _disown(store, key, metadata["uid"])
        if event.key.resource == CRDS:
            spec = event.object["spec"]
            _delete_all(store, list(store.versions(Resource(spec["group"], spec["names"]["plural"]))))
        for key in _waiting(store, event):
            _finish(store, key)
    elif metadata.get("deletionTimestamp"):
        _finish(store, event.key)
    elif event.type == "ADDED" and owners(event.object) and not any(map(store.has_uid, owners(event.object))):
        _delete_all(store, [event.key])  # it was made when its owner had just gone


def _waiting(store: Store, event: Event) -> list[Key]:
    """The owners and the namespace of what is gone, which may wait for that."""
    metadata = event.object["metadata"]
    names = {reference["name"] for reference in metadata.get("ownerReferences") or ()}
    keys = store.keys()
    found = [key for key in keys if key.name in names and key.namespace in ("", event.key.namespace)]
    return [*found, Key(NAMESPACES, "", event.key.namespace)]


def _finish(store: Store, key: Key) -> None:
    """Deletes what a marked object waits for, and lets it go when nothing is left of that."""
    try:
        metadata = store.get(key)["metadata"]
        if not metadata.get("deletionTimestamp"):
            return
        finalizers = metadata.get("finalizers") or ()
        if FOREGROUND in finalizers:
            left = store.dependents(metadata["uid"])
            _delete_all(store, left, "Foreground")
            if not store.dependents(metadata["uid"]):
                store.modify(key, lambda value: _drop_finalizer(value, FOREGROUND))
        if EMPTYING in finalizers and key.resource == NAMESPACES:
            _delete_all(store, _inside(store, key.name))
            if not _inside(store, key.name):
                store.modify(key, lambda value: _drop_finalizer(value, EMPTYING))
    except Missing:
        return  # somebody else was faster


def _inside(store: Store, namespace: str) -> list[Key]:
    keys = store.keys()
    return [key for key in keys if key.namespace == namespace]


def _delete_all(store: Store, keys: list[Key], propagation: str = "Background") -> None:
    for key in keys:
        try:
            if not store.get(key)["metadata"].get("deletionTimestamp"):
                delete(store, key, propagation)
        except Missing:
            continue


def _disown(store: Store, key: Key, uid: str) -> None:
    """A dependent whose last owner this was goes too."""
    try:
        if all(owner == uid or not store.has_uid(owner) for owner in owners(store.get(key))):
            _delete_all(store, [key])
        else:
            store.modify(key, lambda value: _drop_owner(value, uid))
    except Missing:
        return


def _orphan(store: Store, key: Key) -> None:
    uid = store.get(key)["metadata"]["uid"]
    for dependent in store.dependents(uid):
        store.modify(dependent, lambda value: _drop_owner(value, uid))


def _grace_s(pod: Object, asked_s: float | None) -> float:
    ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    spec = pod.get("spec", {})
    if ended or not spec.get("nodeName"):
        return 0.0
    own_s = spec.get("terminationGracePeriodSeconds")
    return asked_s if asked_s is not None else DEFAULT_GRACE_S if own_s is None else float(own_s)


def _close(namespace: Object) -> None:
    _add_finalizer(namespace, EMPTYING)
    namespace["status"] = {"phase": "Terminating"}


def _add_finalizer(value: Object, name: str) -> None:
    finalizers = value["metadata"].setdefault("finalizers", [])
    if name not in finalizers:
        finalizers.append(name)


def _drop_finalizer(value: Object, name: str) -> None:
    value["metadata"]["finalizers"] = [other for other in value["metadata"].get("finalizers", ()) if other != name]


def _drop_owner(value: Object, uid: str) -> None:
    references = value["metadata"].get("ownerReferences") or ()
    value["metadata"]["ownerReferences"] = [reference for reference in references if reference["uid"] != uid]
