"""Objects that Kubernetes' typed clients send as protobuf. Helm's do so with what it keeps of its releases.

The numbers are those of `generated.proto` in k8s.io/api and k8s.io/apimachinery.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.fakekube.store import Object

MAGIC = b"k8s\x00"


class Field(NamedTuple):
    name: str
    type: str
    """A message's name, or: string, bytes, integer, boolean, map (of strings), blobs (a map of bytes)."""
    repeated: bool = False


META = Field("metadata", "ObjectMeta")
BINDING = {1: META, 2: Field("subjects", "Subject", repeated=True), 3: Field("roleRef", "RoleRef")}
MESSAGES: dict[str, dict[int, Field]] = {
    "ObjectMeta": {
        1: Field("name", "string"),
        2: Field("generateName", "string"),
        3: Field("namespace", "string"),
        5: Field("uid", "string"),
        6: Field("resourceVersion", "string"),
        11: Field("labels", "map"),
        12: Field("annotations", "map"),
        13: Field("ownerReferences", "OwnerReference", repeated=True),
        14: Field("finalizers", "string", repeated=True),
    },
    "OwnerReference": {
        1: Field("kind", "string"),
        3: Field("name", "string"),
        4: Field("uid", "string"),
        5: Field("apiVersion", "string"),
        6: Field("controller", "boolean"),
        7: Field("blockOwnerDeletion", "boolean"),
    },
    "Secret": {
        1: META,
        2: Field("data", "blobs"),
        3: Field("type", "string"),
        4: Field("stringData", "map"),
        5: Field("immutable", "boolean"),
    },
    "ConfigMap": {
        1: META,
        2: Field("data", "map"),
        3: Field("binaryData", "blobs"),
        4: Field("immutable", "boolean"),
    },
    "Namespace": {1: META},
    "ServiceAccount": {1: META, 4: Field("automountServiceAccountToken", "boolean")},
    "DeleteOptions": {
        1: Field("gracePeriodSeconds", "integer"),
        2: Field("preconditions", "Preconditions"),
        4: Field("propagationPolicy", "string"),
        5: Field("dryRun", "string", repeated=True),
    },
    "Preconditions": {1: Field("uid", "string"), 2: Field("resourceVersion", "string")},
    "SelfSubjectAccessReview": {1: META, 2: Field("spec", "SelfSubjectAccessReviewSpec")},
    "SelfSubjectAccessReviewSpec": {
        1: Field("resourceAttributes", "ResourceAttributes"),
        2: Field("nonResourceAttributes", "NonResourceAttributes"),
    },
    "ResourceAttributes": {
        number: Field(name, "string")
        for number, name in enumerate(("namespace", "verb", "group", "version", "resource", "subresource", "name"), 1)
    },
    "Role": {1: META, 2: Field("rules", "PolicyRule", repeated=True)},
    "ClusterRole": {1: META, 2: Field("rules", "PolicyRule", repeated=True)},
    "PolicyRule": {
        number: Field(name, "string", repeated=True)
        for number, name in enumerate(("verbs", "apiGroups", "resources", "resourceNames", "nonResourceURLs"), 1)
    },
    "RoleBinding": BINDING,
    "ClusterRoleBinding": BINDING,
    "Subject": {
        number: Field(name, "string") for number, name in enumerate(("kind", "apiGroup", "name", "namespace"), 1)
    },
    "RoleRef": {number: Field(name, "string") for number, name in enumerate(("apiGroup", "kind", "name"), 1)},
    "NonResourceAttributes": {1: Field("path", "string"), 2: Field("verb", "string")},
}


class UnknownMessage(Exception):
    """A kind whose numbers are not written down here."""


def decode(body: bytes) -> Object:
    """An object from the bytes of a request, the magic number included. Raises UnknownMessage."""
    envelope = dict(_read(body.removeprefix(MAGIC)))
    type_meta = dict(_read(envelope[1]))
    api_version, kind = type_meta[1].decode(), type_meta[2].decode()
    if kind not in MESSAGES:
        raise UnknownMessage(f"no protobuf of {kind} is known here")
    return {"apiVersion": api_version, "kind": kind} | _message(kind, envelope[2])


def _message(name: str, data: bytes) -> Object:
    fields = MESSAGES[name]
    made: Object = {}
    for number, raw in _read(data):
        if number not in fields:
            continue
        field = fields[number]
        if field.type in ("map", "blobs"):
            entry = dict(_read(raw))
            value = entry.get(2, b"")
            text = base64.b64encode(value) if field.type == "blobs" else value
            made.setdefault(field.name, {})[entry.get(1, b"").decode()] = text.decode()
        elif field.repeated:
            made.setdefault(field.name, []).append(_value(field.type, raw))
        elif (value := _value(field.type, raw)) != "":  # a Go client sends empty strings too
            made[field.name] = value
    return made


def _value(kind: str, raw: Any) -> Any:
    if kind == "string":
        return raw.decode()
    if kind == "boolean":
        return bool(raw)
    return raw if kind == "integer" else _message(kind, raw)


def _read(data: bytes) -> Iterator[tuple[int, Any]]:
    """Field numbers with integers or bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
        elif wire == 2:
            length, at = _varint(data, at)
            yield number, data[at : at + length]
            at += length
        else:
            size = {1: 8, 5: 4}[wire]
            yield number, struct.unpack_from({8: "<q", 4: "<i"}[size], data, at)[0]
            at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
